"""Evaluation items: the scored completions of each prompt, from which all metrics are computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from covey.errors import ConfigError, nearest
from covey.evaluation.intervals import (
    Difference,
    Estimate,
    mean_over_prompts,
    paired_difference,
    pass_at_k,
)
from covey.types import Prompt, Rollout

GREEDY = "greedy"
REWARD, PART = "reward", "parts/"
"""The metric name of the mean reward, and the prefix of the metric names of reward parts."""
NO_CATEGORY = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCompletion:
    """A completion of an evaluation, with its score and its length."""

    text: str
    reward: float | None
    tokens: int
    finish: str
    success: bool | None
    """Whether the completion is correct, or None if scoring failed; None counts as incorrect."""
    parts: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(rollout: Rollout) -> ItemCompletion:
        """Convert a rollout to an ItemCompletion."""
        return ItemCompletion(
            text=rollout.text,
            reward=rollout.reward,
            tokens=rollout.sampled,
            finish=rollout.finish,
            success=rollout.success,
            parts=dict(rollout.parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt with its greedy and its sampled completions."""

    prompt: Prompt
    greedy: ItemCompletion
    samples: tuple[ItemCompletion, ...] = ()

    def values(self) -> dict[str, float]:
        """Return the value of each metric for this prompt, such as `greedy` or `mean@k`."""
        values = {GREEDY: float(bool(self.greedy.success))}
        count = len(self.samples)
        if count:
            correct = sum(bool(sample.success) for sample in self.samples)
            values[f"mean@{count}"] = correct / count
            for k in (2**power for power in range(1, count.bit_length())):
                values[f"pass@{k}"] = pass_at_k(count, correct, k)
        return values

    def rewards(self) -> dict[str, float]:
        """Return the greedy completion's reward and reward parts; empty if the reward is None."""
        if self.greedy.reward is None:
            return {}
        parts = {f"{PART}{name}": value for name, value in self.greedy.parts.items()}
        return {REWARD: self.greedy.reward, **parts}

    def row(self) -> dict[str, Any]:
        """Return the item as a dict for one line of a JSON Lines file."""
        return {
            "prompt_id": self.prompt.id,
            "prompt": self.prompt.text,
            "target": self.prompt.target,
            **{name: value for name, value in asdict(self.greedy).items() if name != "text"},
            "completion": self.greedy.text,
            "values": self.values(),
            "samples": [asdict(sample) for sample in self.samples],
            "info": dict(self.prompt.info),
        }


def estimates(
    items: Sequence[Item], reward_bounds: tuple[float, float] | None = None
) -> dict[str, Estimate]:
    """Estimate each metric over prompts; `reward_bounds` may be infinite.

    The means of the reward and of the reward's parts include only completions that were scored.
    """
    values = [item.values() for item in items]
    shares = {
        name: mean_over_prompts([item[name] for item in values], bounds=(0.0, 1.0))
        for name in values[0]
    }
    rewards = [item.rewards() for item in items]
    names = sorted(
        {name for row in rewards for name in row}, key=lambda name: (name != REWARD, name)
    )
    known = reward_bounds if reward_bounds and all(map(math.isfinite, reward_bounds)) else None
    return shares | {
        name: mean_over_prompts(
            [row[name] for row in rewards if name in row], bounds=known if name == REWARD else None
        )
        for name in names
    }


def is_graded(scored: Iterable[tuple[float | None, bool | None]]) -> bool:
    """Return whether any reward differs from the usual 1 for a success and 0 for a failure.

    Each element of `scored` has the reward and the success of one completion. Completions without a
    reward are ignored.

    >>> is_graded([(1.0, True), (None, None)]), is_graded([(0.5, True)])
    (False, True)
    """
    return any(reward not in (None, float(bool(success))) for reward, success in scored)


def check_category(prompts: Sequence[Prompt], key: str) -> None:
    """Raise ConfigError if `key` is not `task` and no prompt has `key` in its `info`."""
    known = {"task"}.union(*(prompt.info for prompt in prompts))
    if key not in known:
        hint = nearest(key, known)
        raise ConfigError(f"--by {key}: no prompt has this key in its `info` field{hint}")


def by_category(items: Sequence[Item], key: str) -> dict[str, tuple[Item, ...]]:
    """Group items by the value of `key` in the prompt's `info`, or by task if `key` is `task`."""
    found: dict[str, list[Item]] = {}
    for item in items:
        info: Mapping[str, Any] = {"task": item.prompt.task, **item.prompt.info}
        found.setdefault(str(info.get(key, NO_CATEGORY)), []).append(item)
    return {name: tuple(found[name]) for name in sorted(found, key=_category_order)}


def _category_order(name: str) -> tuple[bool, float, str]:
    """Return a sort key that puts numeric category names first, in numeric order."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of two policies on the same prompts."""

    differences: Mapping[str, Difference]
    gained: tuple[str, ...]
    """Ids of prompts on which only the first policy's greedy completion is correct."""
    lost: tuple[str, ...]
    """Ids of prompts on which only the second policy's greedy completion is correct."""

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        rows = {name: difference.row() for name, difference in self.differences.items()}
        return {**rows, "gained": list(self.gained), "lost": list(self.lost)}


def compare(first: Sequence[Item], second: Sequence[Item]) -> Comparison:
    """Compare two evaluations of the same prompts, item by item."""
    if [item.prompt.id for item in first] != [item.prompt.id for item in second]:
        raise ValueError("the evaluations are not of the same prompts")
    a, b = [item.values() for item in first], [item.values() for item in second]
    ids = [item.prompt.id for item in first]
    change = [one[GREEDY] - other[GREEDY] for one, other in zip(a, b, strict=True)]
    differences = {
        name: paired_difference([v[name] for v in a], [v[name] for v in b]) for name in a[0]
    }
    return Comparison(
        differences=differences | _reward_differences(first, second),
        gained=tuple(i for i, by in zip(ids, change, strict=True) if by > 0),
        lost=tuple(i for i, by in zip(ids, change, strict=True) if by < 0),
    )


def _reward_differences(first: Sequence[Item], second: Sequence[Item]) -> dict[str, Difference]:
    """Compare rewards and reward parts on prompts that were scored for both policies."""
    rows = [(one.rewards(), other.rewards()) for one, other in zip(first, second, strict=True)]
    names = list(dict.fromkeys(name for a, b in rows for name in a if name in b))
    pairs = {
        name: [(a[name], b[name]) for a, b in rows if name in a and name in b] for name in names
    }
    return {
        name: paired_difference([a for a, _ in both], [b for _, b in both], span=None)
        for name, both in pairs.items()
    }
