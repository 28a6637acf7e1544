"""What a task is: training prompts and held-out prompts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, overload

from covey.errors import ConfigError
from covey.types import Message, Prompt

THINK_THEN_ANSWER = (
    "Think it through between <think> and </think>, then give the final answer, and nothing else, "
    "between <answer> and </answer>."
)
"""What is asked for where a task is judged by the answer tags."""

MOST_PROMPTS = 10**9
"""Prompts of a split that are made when they are asked for."""


class Task(Protocol):
    """Two disjoint sequences of prompts, each prompt a function of its index alone.

    `info["solution"]`, where a task has it, is a right answer: what belongs between the answer
    tags, or the code or the tool call itself. `info["worked"]` is the way to it.

    A task that skips bad rows says which in `bad_rows`; see `bad_rows_of`.
    """

    @property
    def name(self) -> str:
        """The name that prompts and logs carry."""

    def train(self) -> Sequence[Prompt]:
        """Prompts to learn from."""

    def held_out(self) -> Sequence[Prompt]:
        """Prompts that are only ever used to measure."""


class Generated(Sequence[Prompt]):
    """Prompts that are made when they are asked for: prompt i is `make(i)`."""

    def __init__(self, size: int, make: Callable[[int], Prompt]) -> None:
        self.size = size
        self.make = make

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return self.make(index % self.size)


def hash_share(text: str) -> float:
    """Return a number from 0 up to 1 that is the same for the same text, everywhere and always.

    >>> round(hash_share("covey"), 6)
    0.104895
    """
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) / 2**32


def bad_rows_of(task: Task) -> list[str]:
    """Return what a task has skipped while it was read, a line for each row.

    Two splits of a task may be read from the same rows.
    """
    by_split: Mapping[str, Sequence[str]] = getattr(task, "bad_rows", {})
    return list(dict.fromkeys(line for lines in by_split.values() for line in lines))


def with_instruction(question: str, instruction: str) -> str:
    """Put what is wanted under what is asked."""
    return f"{question}\n\n{instruction}" if instruction else question


def asked(question: str, system: str = "") -> tuple[Message, ...]:
    """Return a question as messages, the system message first if there is one."""
    messages = ({"role": "user", "content": question},)
    return ({"role": "system", "content": system}, *messages) if system else messages


def check_sizes(train_size: int, held_out_size: int) -> None:
    """Refuse splits without prompts, and those that no run could ask."""
    if not 1 <= train_size <= MOST_PROMPTS or not 1 <= held_out_size <= MOST_PROMPTS:
        raise ConfigError(
            f"task: train_size and held_out_size must be at least 1 and at most {MOST_PROMPTS}, "
            f"not {train_size} and {held_out_size}"
        )
