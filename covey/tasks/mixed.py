"""The `mixed` task: the prompts of several tasks, mixed in proportion to task weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.config.resolve_options import resolve_options
from covey.config.schema import Named
from covey.errors import ConfigError, DataError
from covey.tasks.task import Generated, Task
from covey.types import Prompt

LONGEST_BLOCK = 1000


def quotas(weights: Sequence[float]) -> list[int]:
    """Return how many prompts of each task are in a block, the unit that the mixture repeats.

    A block is the shortest sequence of prompts in which the number of prompts of each task is
    exactly proportional to the task's weight. If a block would need more than 1000 prompts, the
    numbers of prompts are rounded so that the block has about 1000 prompts. Each task has at least
    1 prompt in a block.

    >>> quotas([0.75, 0.25]), quotas([1, 1, 1]), quotas([2, 1e-9])
    ([3, 1], [1, 1, 1], [1000, 1])
    """
    total = math.fsum(weights)
    for length in range(len(weights), LONGEST_BLOCK + 1):
        counts = [weight / total * length for weight in weights]
        if all(round(c) >= 1 and math.isclose(c, round(c), rel_tol=1e-9) for c in counts):
            return [round(c) for c in counts]
    return [max(1, round(weight / total * LONGEST_BLOCK)) for weight in weights]


def pattern(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the order of the prompts in a block, as a list of (task index, prompt number).

    The n prompts of a task, numbered from 0, are spread evenly over the block: prompt r has the
    relative position (r + 1/2) / n.

    >>> pattern([3, 1])
    [(0, 0), (0, 1), (1, 0), (0, 2)]
    """
    places = [
        ((rank + 0.5) / count, part, rank)
        for part, count in enumerate(counts)
        for rank in range(count)
    ]
    return [(part, rank) for _, part, rank in sorted(places)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A mixture of tasks. `parts` maps a key to the name, weight and options of a task.

    In `parts`, `name` defaults to the key, and `weight` defaults to 1. The training prompts are
    divided into blocks. In each block, the number of prompts of a task is proportional to the
    task's weight. There are enough blocks to use every prompt of every task. When all prompts of a
    task have been used, they are repeated, with ids that end in `~1`, `~2` and so on. The held-out
    prompts of the mixture are the held-out prompts of its tasks, one task after the other.

    Prompts keep the name of their task, so rewards can depend on the task. The id of a prompt
    starts with the key of its task in `parts`.
    """

    parts: Mapping[str, Mapping[str, Any]]
    name: str = "mixed"
    tasks: dict[str, Task] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("task: the option `parts` must name at least one task")
        for key, options in self.parts.items():
            if not isinstance(options, Mapping):
                raise ConfigError(f"config: task.parts.{key} = {options!r} must be a table")
            _weight(key, options)
            self.tasks[key] = _build(key, options)

    @property
    def bad_rows(self) -> dict[str, list[str]]:
        """The bad rows that the tasks of the mixture skipped, by task and split."""
        return {
            f"{key}/{split}": lines
            for key, task in self.tasks.items()
            for split, lines in getattr(task, "bad_rows", {}).items()
        }

    def train(self) -> Sequence[Prompt]:
        keys = list(self.tasks)
        splits = [self.tasks[key].train() for key in keys]
        for key, prompts in zip(keys, splits, strict=True):
            if not prompts:
                raise DataError(f"task: task.parts.{key} has no training prompts")
        counts = quotas([_weight(key, self.parts[key]) for key in keys])
        block = pattern(counts)
        blocks = max(
            math.ceil(len(prompts) / count) for prompts, count in zip(splits, counts, strict=True)
        )

        def make(index: int) -> Prompt:
            number, place = divmod(index, len(block))
            part, rank = block[place]
            again, which = divmod(number * counts[part] + rank, len(splits[part]))
            prompt = _of_part(splits[part][which], keys[part])
            return replace(prompt, id=f"{prompt.id}~{again}") if again else prompt

        mixture = Generated(blocks * len(block), make)
        mixture.block = tuple(keys[part] for part, _ in block)
        return mixture

    def held_out(self) -> Sequence[Prompt]:
        return [_of_part(p, key) for key, task in self.tasks.items() for p in task.held_out()]


def _of_part(prompt: Prompt, key: str) -> Prompt:
    return prompt if prompt.id.startswith(f"{key}/") else replace(prompt, id=f"{key}/{prompt.id}")


def _weight(key: str, options: Mapping[str, Any]) -> float:
    weight = options.get("weight", 1.0)
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight <= 0:
        raise ConfigError(f"config: task.parts.{key}.weight = {weight!r} must be a number above 0")
    return float(weight)


def _build(key: str, options: Mapping[str, Any]) -> Task:
    from covey.tasks.registry import find_task, make_task  # the registry imports this module

    table = f"task.parts.{key}"
    name = options.get("name", key)
    if not isinstance(name, str):
        raise ConfigError(f"config: {table}.name = {name!r} must be the name of a task")
    constructor, preset = find_task(name, f"{table}.name")
    given = {k: v for k, v in options.items() if k not in ("name", "weight")}
    for option in sorted(preset.keys() & given.keys()):
        raise ConfigError(
            f"config: {table}.{option} cannot be set, because the task name {name!r} already sets "
            "this option"
        )
    section = Named.model_validate({"name": name, **preset, **given})
    resolved = resolve_options(constructor, section, table)
    try:
        return make_task(name, resolved, f"{table}.name")
    except ConfigError as error:
        reason = str(error).removeprefix("task: ").removeprefix("config: ")
        raise ConfigError(f"config: {table}: {reason}") from None
