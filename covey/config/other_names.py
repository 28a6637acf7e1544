"""Names of settings in TRL, verl and Covey 0.1, for error messages and docs/settings.md.

The names of verl's settings come from verl's PPO trainer, without the prefix `actor_rollout_ref`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from covey.config.schema import about


class Names(NamedTuple):
    """Names of a setting in TRL and in verl; an empty name if the library has no such setting."""

    trl: str = ""
    verl: str = ""


OPTIONS: Mapping[str, Names] = {
    "objective.beta": Names("beta", "actor.kl_loss_coef"),
    "objective.clip_low": Names("epsilon", "actor.clip_ratio_low"),
    "objective.clip_high": Names("epsilon_high", "actor.clip_ratio_high"),
    "objective.dual": Names("delta", "actor.clip_ratio_c"),
    "objective.ratio": Names("importance_sampling_level"),
    "objective.advantage": Names("scale_rewards", "algorithm.norm_adv_by_std_in_grpo"),
    "objective.weights": Names("loss_type", "actor.loss_agg_mode"),
    "objective.correction": Names("vllm_importance_sampling_mode", "algorithm.rollout_correction"),
    "objective.top_entropy": Names("top_entropy_quantile"),
    "objective.entropy_bonus": Names("", "actor.entropy_coeff"),
}
"""Names of options of algorithms, which are not settings of the schema."""
OTHER_NAMES: Mapping[str, Names] = {
    **{key: Names(facts.trl, facts.verl) for key, facts in about() if facts.trl or facts.verl},
    **OPTIONS,
}
"""Maps each setting of Covey to its names in TRL and verl."""


def ours(name: str) -> str | None:
    """Return Covey's name for a setting of TRL or verl; None if Covey has no such setting.

    >>> ours("num_generations"), ours("lr"), ours("nothing")
    ('rollout.group_size', 'optimizer.learning_rate', None)
    """
    for key, names in OTHER_NAMES.items():
        last = names.verl.rpartition(".")[2]
        if name in (names.trl, names.verl) or (name == last and name not in COMMON):
            return key
    return None


COMMON = frozenset({"", "path", "name", "n", "strategy", "enable", "seed", "temperature"})
"""Last parts of verl's dotted names, such as `enable`, that are too common to identify a
setting."""


def theirs(*names: str) -> str:
    """Return a hint if one of `names` is a setting of TRL or verl, or else an empty text."""
    found = next((new for name in names if (new := ours(name))), None)
    return "" if found is None else f"; TRL's or verl's {names[-1]} is '{found}' here"


# Keys of Covey 0.1 and their new names.
#
# A configuration with an old key is rejected, and the error names the new key. Old keys in run
# folders are translated, so that runs of Covey 0.1 stay readable.

SETTINGS: Mapping[str, str] = {
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
"""Maps each renamed key of Covey 0.1 to its new name.

The new name of a section applies to all keys of the section that are not listed themselves.
"""


def new_setting(key: str) -> str | None:
    """Return the new name of a renamed key; None if the key was not renamed.

    >>> new_setting("rollout.samples"), new_setting("warmup.steps"), new_setting("train.steps")
    ('rollout.group_size', 'sft.steps', None)
    """
    if key in SETTINGS:
        return SETTINGS[key]
    section, dot, name = key.partition(".")
    return f"{SETTINGS[section]}.{name}" if dot and section in SETTINGS else None


def check_names(data: Mapping[str, Any]) -> str | None:
    """Return an error message for the first renamed key; None if no key was renamed."""
    for section, values in data.items():
        keys = [f"{section}.{name}" for name in values] if isinstance(values, Mapping) else []
        for key in keys or [section]:
            if new := new_setting(key):
                example = ", as in stop_after = {tokens = 1000000}" if "stop_after" in new else ""
                return f"config: {key} was renamed to {new}{example}"
    return None


def translated(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with every renamed key replaced by its new name."""
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
