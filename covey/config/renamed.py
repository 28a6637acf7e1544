"""Keys of Covey 0.1 and their new names.

A configuration with an old key is rejected, and the error names the new key. Old keys in run
folders are translated, so that runs of Covey 0.1 stay readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "rollout.prompts": "rollout.prompts_per_step",
        "rollout.samples": "rollout.group_size",
        "rollout.slots": "engine.max_concurrent",
        "train.token_budget": "train.micro_batch_tokens",
        "train.budget": "train.stop_after",
        "train.amount": "train.stop_after",
        "select.dynamic": "filter.dynamic_sampling",
        "select.max_rounds": "filter.max_rounds",
        "select.mask_truncated": "filter.mask_truncated",
        "select.skip_zero_gradient": "filter.skip_zero_gradient",
        "select.max_age": "overlap.max_staleness",
        "select": "filter",
        "warmup": "sft",
        "objective.low": "objective.clip_low",
        "objective.high": "objective.clip_high",
        "save.review_every": "save.samples_every",
        "save.review_answers": "save.samples_shown",
    }
)
"""The new key of each old key.

The entry of a section applies to all keys of the section that have no entry of their own.
"""


def new_setting(key: str) -> str | None:
    """Return the new name of an old key, or None for any other key.

    >>> new_setting("rollout.samples"), new_setting("warmup.steps"), new_setting("train.steps")
    ('rollout.group_size', 'sft.steps', None)
    """
    if key in SETTINGS:
        return SETTINGS[key]
    section, dot, name = key.partition(".")
    return f"{SETTINGS[section]}.{name}" if dot and section in SETTINGS else None


def check_names(data: Mapping[str, Any]) -> str | None:
    """Return an error message for the first old key; None if no key is old."""
    for section, values in data.items():
        keys = [f"{section}.{name}" for name in values] if isinstance(values, Mapping) else []
        for key in keys or [section]:
            if new := new_setting(key):
                example = ", as in stop_after = {tokens = 1000000}" if "stop_after" in new else ""
                return f"config: {key} was renamed to {new}{example}"
    return None


def translated(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which new keys replace the old keys."""
    result: dict[str, Any] = {}
    stop: dict[str, Any] = {}
    for section, values in data.items():
        if not isinstance(values, Mapping):
            result[section] = values
            continue
        for name, value in values.items():
            key = f"{section}.{name}"
            if key in ("train.budget", "train.amount"):
                stop[name] = value
                continue
            table, _, last = (new_setting(key) or key).partition(".")
            result.setdefault(table, {})[last] = value
        result.setdefault(SETTINGS.get(section, section), {})
    if stop.get("amount"):
        result["train"]["stop_after"] = {stop["budget"]: stop["amount"]}
    return result
