"""What must hold before a comparison starts, and what its reader should know beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from covey.analysis.compare.design import shares_first_answers
from covey.analysis.compare.digest import prompts_digest
from covey.analysis.compare.record import ArmRecord, Record
from covey.config import Config
from covey.errors import ConfigError, DataError
from covey.tasks import Task
from covey.training.build import held_out_of, task_of
from covey.types import Prompt

Row = Mapping[str, str]

ANSWERING = (
    "rollout.max_tokens", "rollout.stop", "model.template", "model.chat_options", "model.prefill",
)  # fmt: skip
"""Under what conditions a policy answers, at evaluations too."""


def check_prompts(configs: Mapping[str, Config]) -> None:
    """Refuse held-out prompts that are trained on, or that are not the same for all arms."""
    first_name, first = next(iter(configs.items()))
    asked = prompts_digest(held_out_of(first, task_of(first)))
    seen: list[dict[str, object]] = []
    for name, config in configs.items():
        task = task_of(config)
        if prompts_digest(held_out_of(config, task)) != asked:
            raise ConfigError(
                f"--arm {name}: it has other held-out prompts than {first_name}, so that their "
                "accuracies are not of the same thing; change [task] for all arms with --set"
            )
        section = config.task.model_dump()
        if section not in seen:
            check_disjoint(config, task)
            seen.append(section)


def check_disjoint(config: Config, task: Task) -> None:
    """Refuse a held-out prompt whose text is that of a training prompt."""
    held_out = {_text(prompt): prompt for prompt in held_out_of(config, task)}
    met = [held_out[text] for text in map(_text, task.train()) if text in held_out]
    if met:
        ids = {prompt.id for prompt in met}
        raise DataError(
            f"task: {len(ids)} of {len(held_out)} held-out prompts are training prompts too, so "
            f"that they measure memory; the first is {met[0].id}: {met[0].text!r}"
        )


def _text(prompt: Prompt) -> str:
    """What is asked, all of it, whatever its spaces and capitals."""
    return " ".join(" ".join(m["content"] for m in prompt.messages).casefold().split())


def known_beforehand(record: Record, configs: Mapping[str, Config]) -> tuple[Row, ...]:
    """Return what can be said before training, once for all arms that it is true of."""
    from covey.analysis.plan.findings import coincidences, findings

    rows: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for arm, config in configs.items():
        for finding in findings(config):
            rows.setdefault(tuple(finding.row().items()), []).append(arm)
    across = [dict(finding.row()) for finding in coincidences(configs)]
    single = [{**dict(row), "arms": ", ".join(arms)} for row, arms in rows.items()]
    return (*across, *_about_arms(record), *single)


def _about_arms(record: Record) -> list[Row]:
    """Say what arms do not have in common although comparisons mostly do."""
    judge = record.common["reward"]["name"]
    differing: list[tuple[str, str, str, Callable[[ArmRecord], bool]]] = [
        (
            "some arms sample the first step's answers for themselves",
            "They differ in what decides these answers, so they cannot learn from the same ones as "
            "the others; luck in the first step is part of the difference.",
            "none is needed if that difference is what you compare",
            lambda arm: not shares_first_answers(arm),
        ),
        (
            "some arms learn from another reward than the one that measures them",
            "The held-out answers of all arms are judged by the common reward, so that accuracies "
            "are of the same thing; one that an arm is not trained for may not suit it.",
            f"choose who judges with --set reward.name; now it is {judge}",
            lambda arm: any(key.startswith("reward.") for key in arm.differences),
        ),
        (
            "some arms answer the held-out prompts under conditions of their own",
            "How questions are put and where answers end is theirs at evaluations too: a "
            "difference may be one of these conditions, without any learning.",
            "look at the first evaluations, before training; or change it for all with --set",
            lambda arm: any(key in ANSWERING for key in arm.differences),
        ),
    ]
    return [
        {"title": title, "why": why, "remedy": remedy, "docs": "docs/compare.md", "arms": arms}
        for title, why, remedy, holds in differing
        if len(record.arms) > 1
        and (arms := ", ".join(arm.name for arm in record.arms if holds(arm)))
    ]
