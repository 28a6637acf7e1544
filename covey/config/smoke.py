"""The option `--smoke`, which shrinks a config to a run of 1 to 2 minutes on two CPU cores.

A smoke run shows that prompts, reward, objective, reference model, evaluation and checkpoints work
together. The results of a smoke run are meaningless. Covey applies `--set` after `--smoke`, so
`--set` can raise any setting that `--smoke` has lowered.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from covey.config.load import load_config, overridden, parse_config, read_settings
from covey.config.schema import Config, about

FACTS = dict(about())
AT_MOST = {key: facts.smoke_most for key, facts in FACTS.items() if facts.smoke_most is not None}
ALWAYS = {key: facts.smoke for key, facts in FACTS.items() if facts.smoke is not None}

DATA = files("covey") / "tasks" / "data"
WORD_PROBLEMS: Mapping[str, str] = {
    "train_file": str(DATA / "word_problems_train.jsonl"),
    "held_out_file": str(DATA / "word_problems_held_out.jsonl"),
}
"""Files that replace Hugging Face datasets in smoke runs: 24 problems in GSM8K format."""

EMBEDDED = "embedded"
FOR_EMBEDDED: Mapping[str, Mapping[str, str]] = {
    "task": {"name": "arithmetic"},
    "reward": {"name": "think_answer"},
}
"""Task and reward of smoke runs with the embedded model, which can only do arithmetic."""

ABOUT_WORDS = (
    ("model", ("template", "chat_options", "prefill", "prefill_in_text")),
    ("sft", ("template",)),
)
"""Settings for the text of prompts and solutions, which `--smoke` removes when it replaces the
task."""


def load_smoke(source: str | None, overrides: Iterable[str] = ()) -> tuple[Config, list[str]]:
    """Load, shrink and override a config; return the config, and notes for the user."""
    data, notes = smoke_settings(source, overrides)
    return parse_config(data), notes


def changed_by_smoke(source: str | None, overrides: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of settings that `--smoke` changes and that no override sets."""
    settings = list(overrides)
    whole, (small, _) = load_config(source, settings), load_smoke(source, settings)
    keys = (*AT_MOST, *ALWAYS)
    return frozenset(key for key in keys if _setting(whole, key) != _setting(small, key))


def smoke_settings(
    source: str | None, overrides: Iterable[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return a smoke run's settings as a dict without defaults, and notes for the user."""
    settings = list(overrides)
    data = {} if source is None else read_settings(source)
    dropped: list[str] = []
    wanted = parse_config(overridden(data, settings, dropped.append))
    small, notes = smaller(data, model=wanted.model.path)
    notes = [*dropped, *notes]
    return overridden(small, settings), notes


def smaller(data: Mapping[str, Any], *, model: str) -> tuple[dict[str, Any], list[str]]:
    """Shrink settings for a smoke run; return the settings, and notes about the changes."""
    small: dict[str, Any] = copy.deepcopy(dict(data))
    config = parse_config(small)
    for key, cap in AT_MOST.items():
        value = _setting(config, key)
        assert isinstance(value, int | float)
        many = value == 0 and FACTS[key].zero_is_many
        _put(small, key, cap if many else min(value, cap))
    for key, fixed in ALWAYS.items():
        _put(small, key, fixed)
    steps, rollout = small["train"]["steps"], small["rollout"]
    notes = [
        f"smoke: {steps} steps of {rollout['prompts_per_step']} x {rollout['group_size']} "
        f"completions of up to {rollout['max_tokens']} tokens; this only tests the setup, and its "
        "results mean nothing"
    ]
    return small, notes + (
        _use_arithmetic(small, config) if model == EMBEDDED else _replace_hub(small, config)
    )


def _use_arithmetic(small: dict[str, Any], config: Config) -> list[str]:
    task = FOR_EMBEDDED["task"]["name"]
    if config.task.name == task:
        return []
    small.update({section: dict(named) for section, named in FOR_EMBEDDED.items()})
    for section, keys in ABOUT_WORDS:
        for key in keys:
            small.get(section, {}).pop(key, None)
    small.pop("environment", None)
    small.get("evaluate", {}).pop("reward", None)
    _put(small, "rollout.stop", [])
    return [
        f"smoke: the embedded model knows only sums: {task} and {FOR_EMBEDDED['reward']['name']} "
        f"replace task {config.task.name} and reward {config.reward.name}"
    ]


def _replace_hub(small: dict[str, Any], config: Config) -> list[str]:
    name, options = config.task.name, config.task.options
    gsm8k = name == "gsm8k" and not options.get("train_file")
    if name != "hub" and not gsm8k:
        return []
    kept = options if gsm8k else {k: options.get(k, "") for k in ("system", "instruction")}
    small["task"] = {"name": "gsm8k", **kept, **WORD_PROBLEMS}
    return [f"smoke: word problems that come with covey replace the data of {name}"]


def _setting(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    data.setdefault(section, {})[name] = value
