"""What an evaluation knows of every single prompt; all its numbers are taken over these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from covey.errors import ConfigError, nearest
from covey.evaluate.intervals import (
    Difference,
    Estimate,
    mean_over_prompts,
    paired_difference,
    pass_at_k,
    proportion,
)
from covey.types import Prompt, Rollout

GREEDY = "greedy"
NO_CATEGORY = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is kept of an answer."""

    text: str
    right: bool | None
    """None where it could not be scored. It then counts as wrong: nothing can stand in for it."""
    reward: float | None
    tokens: int
    finish: str

    @staticmethod
    def of(rollout: Rollout) -> Answer:
        """Keep what an evaluation asks about."""
        return Answer(
            text=rollout.text,
            right=rollout.success,
            reward=rollout.reward,
            tokens=len(rollout.tokens),
            finish=rollout.finish,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt with its greedy answer and its sampled ones."""

    prompt: Prompt
    greedy: Answer
    samples: tuple[Answer, ...] = ()

    def values(self) -> dict[str, float]:
        """Return this prompt's share of each number: `greedy`, `mean@k`, `pass@2`, `pass@4`, ..."""
        values = {GREEDY: float(bool(self.greedy.right))}
        count = len(self.samples)
        if count:
            right = sum(bool(answer.right) for answer in self.samples)
            values[f"mean@{count}"] = right / count
            for k in (2**power for power in range(1, count.bit_length())):
                values[f"pass@{k}"] = pass_at_k(count, right, k)
        return values

    def row(self) -> dict[str, Any]:
        """Return plain data, one line of a file."""
        return {
            "prompt_id": self.prompt.id,
            "prompt": self.prompt.text,
            "expected": self.prompt.target,
            **{name: value for name, value in asdict(self.greedy).items() if name != "text"},
            "answer": self.greedy.text,
            "values": self.values(),
            "samples": [asdict(answer) for answer in self.samples],
            "info": dict(self.prompt.info),
        }


def estimates(items: Sequence[Item]) -> dict[str, Estimate]:
    """Return every number over these prompts: Wilson's interval for greedy, else a bootstrap."""
    values = [item.values() for item in items]
    right = sum(item[GREEDY] for item in values)
    return {
        name: proportion(int(right), len(items))
        if name == GREEDY
        else mean_over_prompts([item[name] for item in values])
        for name in values[0]
    }


def check_category(prompts: Sequence[Prompt], key: str) -> None:
    """Refuse a key that no prompt has."""
    known = {"task"}.union(*(prompt.info for prompt in prompts))
    if key not in known:
        raise ConfigError(f"--by {key}: no prompt has it in its info{nearest(key, known)}")


def by_category(items: Sequence[Item], key: str) -> dict[str, tuple[Item, ...]]:
    """Split items by what their prompts' `info` holds under a key; `task` is the task's name."""
    found: dict[str, list[Item]] = {}
    for item in items:
        told: Mapping[str, Any] = {"task": item.prompt.task, **item.prompt.info}
        found.setdefault(str(told.get(key, NO_CATEGORY)), []).append(item)
    return {name: tuple(found[name]) for name in sorted(found, key=_category_order)}


def _category_order(name: str) -> tuple[bool, float, str]:
    """Numbers by their size, and before other names."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two policies on the same prompts."""

    differences: Mapping[str, Difference]
    gained: tuple[str, ...]
    """Prompts, by id, that only the first answers right, greedily."""
    lost: tuple[str, ...]
    """Prompts that only the second answers right."""

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
    return Comparison(
        differences={
            name: paired_difference([v[name] for v in a], [v[name] for v in b]) for name in a[0]
        },
        gained=tuple(i for i, by in zip(ids, change, strict=True) if by > 0),
        lost=tuple(i for i, by in zip(ids, change, strict=True) if by < 0),
    )
