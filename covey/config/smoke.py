"""`--smoke`: any recipe, made so small that it runs for real in a minute or two on two cores.

What is tried is whether everything works together: the prompt, the reward, the objective, the
reference, evaluation and saving. What is learned in two steps means nothing.

It is applied to the recipe before `--set`, so that every size can still be chosen.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from covey.config.load import load_config, overridden, parse_config, read_settings
from covey.config.schema import Config, Named

AT_MOST: Mapping[str, float] = MappingProxyType(
    {
        "rollout.prompts_per_step": 2,
        "rollout.group_size": 4,
        "rollout.max_tokens": 32,
        "engine.max_concurrent": 16,
        "train.steps": 2,
        "train.mini_batches": 2,
        "train.epochs": 2,
        "train.micro_batch_tokens": 2048,
        "train.logits_megabytes": 64.0,
        "optimizer.warmup_steps": 1,
        "sft.steps": 2,
        "sft.solutions": 4,
        "sft.warmup_steps": 1,
        "evaluate.prompts": 8,
        "evaluate.samples": 1,
        "scoring.workers": 1,
    }
)
"""A setting becomes the smaller of the recipe's value and this one."""

ZERO_IS_MANY = frozenset({"sft.steps", "evaluate.prompts", "scoring.workers"})
"""Settings of which 0 means as many as there are: the cap is then the smaller one."""

ALWAYS: Mapping[str, bool | int | dict[str, int]] = MappingProxyType(
    {
        "train.stop_after": {},
        "evaluate.every": 2,  # at the start and at the end
        "save.every": 0,  # at the end
        "sft.evaluate_every": 2,
        "sft.max_tokens": 256,  # solutions are longer than the answers above
        "filter.dynamic_sampling": False,  # so few and short answers are hardly ever right
    }
)
"""A setting becomes this."""

DATA = files("covey") / "tasks" / "data"
WORD_PROBLEMS: Mapping[str, str] = MappingProxyType(
    {
        "train_file": str(DATA / "word_problems_train.jsonl"),
        "held_out_file": str(DATA / "word_problems_held_out.jsonl"),
    }
)
"""What stands in for data of the hub: 24 problems in the form of GSM8K, written for covey."""

EMBEDDED = "embedded"
FOR_EMBEDDED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"task": {"name": "arithmetic"}, "reward": {"name": "think_answer"}}
)
"""The embedded model reads its own sums and nothing else."""

ABOUT_WORDS = (
    ("model", ("template", "chat_options", "prefill", "prefill_in_text")),
    ("sft", ("template",)),
)
"""Settings that go with the question and its reward, and leave with them."""


def load_smoke(source: str, overrides: Iterable[str] = ()) -> tuple[Config, list[str]]:
    """Read a configuration, make it small, apply overrides; return it and what the user reads."""
    data, notes = smoke_settings(source, overrides)
    return parse_config(data), notes


def changed_by_smoke(source: str, overrides: Iterable[str] = ()) -> frozenset[str]:
    """Return the settings that are small because of `--smoke`, and nobody's own."""
    settings = list(overrides)
    whole, (small, _) = load_config(source, settings), load_smoke(source, settings)
    keys = (*AT_MOST, *ALWAYS)
    return frozenset(key for key in keys if _setting(whole, key) != _setting(small, key))


def smoke_settings(source: str, overrides: Iterable[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Do the same with plain data: settings that nobody gave are left out."""
    settings = list(overrides)
    data = read_settings(source)
    wanted = parse_config(overridden(data, settings))
    small, notes = smaller(data, model=wanted.model.path)
    return overridden(small, settings), notes


def smaller(data: Mapping[str, Any], *, model: str) -> tuple[dict[str, Any], list[str]]:
    """Return plain data that runs quickly with a model, and a line for each thing replaced."""
    small: dict[str, Any] = copy.deepcopy(dict(data))
    config = parse_config(small)
    for key, cap in AT_MOST.items():
        value = _value(config, key)
        many = value == 0 and key in ZERO_IS_MANY
        _put(small, key, cap if many else min(value, cap))
    for key, fixed in ALWAYS.items():
        _put(small, key, fixed)
    steps, prompts = small["train"]["steps"], small["rollout"]["prompts_per_step"]
    notes = [
        f"smoke: {steps} steps of {prompts} x {small['rollout']['group_size']} answers of at most "
        f"{small['rollout']['max_tokens']} tokens: everything is tried, nothing is learned"
    ]
    return small, notes + (
        _ask_sums(small, config) if model == EMBEDDED else _without_hub(small, config)
    )


def _ask_sums(small: dict[str, Any], config: Config) -> list[str]:
    task = FOR_EMBEDDED["task"]["name"]
    if config.task.name == task:
        return []
    small.update({section: dict(named) for section, named in FOR_EMBEDDED.items()})
    for section, keys in ABOUT_WORDS:
        for key in keys:
            small.get(section, {}).pop(key, None)
    _put(small, "rollout.stop", [])
    return [
        f"smoke: the embedded model reads sums only: {task} and {FOR_EMBEDDED['reward']['name']} "
        f"stand in for task {config.task.name} and reward {config.reward.name}"
    ]


def _without_hub(small: dict[str, Any], config: Config) -> list[str]:
    if not _is_of_hub(config.task):
        return []
    asked = {key: config.task.options.get(key, "") for key in ("system", "instruction")}
    if config.task.name == "gsm8k":
        asked = config.task.options
    small["task"] = {"name": "gsm8k", **asked, **WORD_PROBLEMS}
    return [
        f"smoke: word problems that come with covey stand in for the data of {config.task.name}"
    ]


def _is_of_hub(task: Named) -> bool:
    return task.name == "hub" or (task.name == "gsm8k" and not task.options.get("train_file"))


def _setting(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _value(config: Config, key: str) -> float:
    value = _setting(config, key)
    assert isinstance(value, int | float)
    return value


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    data.setdefault(section, {})[name] = value
