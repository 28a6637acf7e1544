"""Checks before training that a comparison is fair, and collects possible problems."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

from covey.config import Config, toml_value
from covey.errors import ConfigError, DataError
from covey.lab.compare.comparison import Arm
from covey.lab.compare.comparison_folder import Design
from covey.lab.compare.design import NOT_SAMPLING, kept_options, shares_first_rollouts
from covey.tasks import Task
from covey.tasks.task import shared_prompts
from covey.training.resolve import held_out_of, task_of
from covey.types import Prompt

Row = Mapping[str, str]

GENERATION = (
    "rollout.max_tokens", "rollout.stop", "model.template", "model.chat_options", "model.prefill",
)  # fmt: skip
"""Settings that affect how the policy generates completions, both in training and in
evaluations."""


def check_prompts(configs: Mapping[str, Config]) -> None:
    """Raise an error if held-out prompts are also training prompts, or differ between arms."""
    first, expected = next(iter(configs)), ""
    seen: list[dict[str, object]] = []
    for name, config in configs.items():
        task = task_of(config)
        held_out = held_out_of(config, task)
        digest = prompts_digest(held_out)
        expected = expected or digest  # the digest of the first arm
        if digest != expected:
            raise ConfigError(
                f"arm {name} and arm {first} have different held-out prompts, so their accuracies "
                "cannot be compared; use the same [task] settings for all arms"
            )
        section = config.task.model_dump()
        if section in seen:
            continue
        seen.append(section)
        if found := shared_prompts(task.train(), held_out):
            raise DataError(
                f"task: {len(found)} of {len(held_out)} held-out prompts are also training "
                "prompts, so evaluations would measure memorization; remove these prompts from the "
                f"training data; the first such prompt is {found[0].id}: {found[0].text!r}"
            )


def task_digest(task: Task) -> str:
    """Return two SHA-256 digests: of a task's training prompts and of its held-out prompts."""
    return " ".join(prompts_digest(prompts) for prompts in (task.train(), task.held_out()))


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 digest of prompts, including all data that scoring reads."""
    digest = hashlib.sha256()
    for prompt in prompts:
        messages = [dict(message) for message in prompt.messages]
        row = [prompt.id, prompt.task, messages, prompt.target, dict(prompt.info)]
        digest.update(json.dumps(row, default=str).encode() + b"\n")
    return digest.hexdigest()


def known_beforehand(design: Design, configs: Mapping[str, Config]) -> tuple[Row, ...]:
    """Return the possible problems known before training, each with the names of its arms."""
    from covey.lab.plan.equivalence import coincidences
    from covey.lab.plan.findings import findings

    rows: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for arm, config in configs.items():
        for finding in findings(config):
            rows.setdefault(tuple(finding.row().items()), []).append(arm)
    across = [dict(finding.row()) for finding in coincidences(configs)]
    single = [{**dict(row), "arms": ", ".join(arms)} for row, arms in rows.items()]
    own = (*_differing_arms(design), *_kept_options(design))
    return (*across, *own, *single)


def _differing_arms(design: Design) -> Iterator[Row]:
    """Yield a finding for each condition, such as the reward, that differs between the arms."""
    arms = design.arms if len(design.arms) > 1 else ()
    common = design.common
    reward = common["evaluate"].get("reward", {}).get("name") or common["reward"]["name"]
    yield from _finding(
        [arm for arm in arms if not shares_first_rollouts(arm)],
        title="some arms sample their own rollouts in the first step",
        why="They differ in a setting that decides these rollouts, so they cannot learn from the "
        "same rollouts as the other arms. Luck in the first step is part of the difference.",
        remedy="none is needed if that setting is what you compare",
    )
    yield from _finding(
        [arm for arm in arms if any(key.startswith("reward.") for key in arm.differences)],
        title="some arms are trained on a different reward than the one that evaluates them",
        why="The common reward scores the held-out completions of all arms, so that accuracies "
        "mean the same; an arm that is not trained on it may be at a disadvantage.",
        remedy=f"choose it with evaluate.reward.name; now it is {reward}",
    )
    yield from _finding(
        [arm for arm in arms if any(map(_affects_evaluations, arm.differences))],
        title="some arms generate the held-out completions with their own settings",
        why="Their prompt format, stop strings, length limit or environment also apply in "
        "evaluations, so a difference may come from these settings, without any learning.",
        remedy="compare the first evaluations, before training; or change the setting for all arms",
    )


def _affects_evaluations(key: str) -> bool:
    """Return whether a setting affects how the policy generates the held-out completions."""
    return key in GENERATION or (key.startswith("environment.") and key not in NOT_SAMPLING)


def _kept_options(design: Design) -> Iterator[Row]:
    """Yield a finding for each arm that takes options from a recipe for another algorithm."""
    recipe = design.common["objective"]["name"]
    for arm in design.arms:
        if not (kept := kept_options(design, arm)):
            continue
        values = ", ".join(f"objective.{key} = {toml_value(v)}" for key, (v, _) in kept.items())
        own = ", ".join(f"{key} = {toml_value(default)}" for key, (_, default) in kept.items())
        yield from _finding(
            [arm],
            title=f"options of the recipe are kept: {values}",
            why=f"The recipe sets them for {recipe}; {arm.name}'s own defaults are {own}.",
            remedy=f"for the defaults of {arm.name}, add the arm "
            f"'{arm.name}-default: {arm.settings[0]}'",
        )


def _finding(arms: Iterable[Arm], *, title: str, why: str, remedy: str) -> Iterator[Row]:
    """Yield a finding about the given arms. Yield nothing if there are no arms."""
    if names := ", ".join(arm.name for arm in arms):
        yield {
            "title": title, "why": why, "remedy": remedy, "docs": "docs/compare.md", "arms": names,
        }  # fmt: skip
