"""The Task protocol, and helpers that tasks share."""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any, Protocol, overload

from covey.errors import ConfigError
from covey.types import Message, Prompt

THINK_THEN_ANSWER = (
    "Think it through between <think> and </think>, then give the final answer, and nothing else, "
    "between <answer> and </answer>."
)
"""The instruction for tasks whose reward reads the answer between `<answer>` tags."""

MOST_PROMPTS = 10**9
"""Maximum number of prompts in the training or held-out split of a generated task."""


class Task(Protocol):
    """A task: prompts for training, and other prompts that are held out for evaluation.

    Each prompt depends only on its index in the sequence. Some tasks store a correct answer in
    `info["solution"]`: the text between the answer tags, the code, or the tool call. Some tasks
    also store the reasoning that leads to the correct answer, in `info["worked"]`.

    A task that skips bad rows lists the skipped rows in `bad_rows`; see `bad_rows_of`.
    """

    @property
    def name(self) -> str:
        """The task's name, which appears in `Prompt.task` and in logs."""

    def train(self) -> Sequence[Prompt]:
        """Prompts for training."""

    def held_out(self) -> Sequence[Prompt]:
        """Prompts for evaluation only."""


class Generated(Sequence[Prompt]):
    """Prompts generated on access: prompt i is `make(i)`."""

    def __init__(self, size: int, make: Callable[[int], Prompt]) -> None:
        self.size = size
        self.make = make
        self.block: tuple[str, ...] = ()
        """For a mixture of tasks, the task of each prompt in the block that the mixture repeats.
        `block` is empty for a task that is not a mixture."""

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


def sampled_ids(prompts: Sequence[Prompt], most: int = 256) -> list[int | str]:
    """Return the number of prompts and their ids. For generated prompts, return only about `most`
    ids.

    The settings of a task determine its generated prompts, so a sample of the prompt ids is enough
    to detect changed data. In a mixture of tasks, changed data in one task changes the ids of all
    later prompts.
    """
    step = len(prompts) // most + 1 if isinstance(prompts, Generated) else 1
    return [len(prompts), *(prompt.id for prompt in prompts[::step])]


class SplitTask:
    """Base class of tasks with a method `_prompts(split)` for the splits "train" and "held_out"."""

    __slots__ = ()

    def train(self) -> Sequence[Prompt]:
        return self._prompts("train")

    def held_out(self) -> Sequence[Prompt]:
        return self._prompts("held_out")

    def _prompts(self, split: str) -> Sequence[Prompt]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTask(SplitTask):
    """Base class of generated tasks. `_prompt(split, index)` generates one prompt of a split."""

    train_size: int = 100_000
    held_out_size: int = 256

    def __post_init__(self) -> None:
        for split in ("train", "held_out"):
            size = self._size(split)
            if not 1 <= size <= MOST_PROMPTS:
                raise ConfigError(
                    f"task: {split}_size must be at least 1 and at most {MOST_PROMPTS}, not {size}"
                )

    def _size(self, split: str) -> int:
        return self.train_size if split == "train" else self.held_out_size

    def _prompts(self, split: str) -> Sequence[Prompt]:
        return Generated(self._size(split), partial(self._prompt, split))

    def _prompt(self, split: str, index: int) -> Prompt:
        raise NotImplementedError


def hash_fraction(text: str) -> float:
    """Hash text to a number in [0, 1) that is the same in every process and Covey release.

    >>> round(hash_fraction("covey"), 6)
    0.104895
    """
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) / 2**32


def hashed_into(split: str, text: str, share: float) -> bool:
    """Return whether a text's hash puts the text into a split; the fraction `share` is held out."""
    return (hash_fraction(text) < share) == (split == "held_out")


def bad_rows_of(task: Task) -> list[str]:
    """Return one line of text for each bad row that a task skipped.

    If both splits are read from the same rows, each bad row is returned only once.
    """
    by_split: Mapping[str, Sequence[str]] = getattr(task, "bad_rows", {})
    return list(dict.fromkeys(line for lines in by_split.values() for line in lines))


def with_instruction(text: str, instruction: str) -> str:
    return f"{text}\n\n{instruction}" if instruction else text


def chat_messages(text: str, system: str = "") -> tuple[Message, ...]:
    messages = ({"role": "user", "content": text},)
    return ({"role": "system", "content": system}, *messages) if system else messages


def require_module(name: str) -> Any:
    """Import a module of an optional package, or raise an error that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"task: this task needs {package}: pip install covey[tasks] ({error})"
        ) from None


# Problems that ship with the package, one JSON object per line, split into training and held-out
# problems.

HELD_OUT_SHARE = 0.25


@cache
def _rows(name: str) -> tuple[dict[str, Any], ...]:
    text = (files("covey.tasks") / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.split("\n") if line)


def packaged_rows(name: str, split: str) -> list[dict[str, Any]]:
    """Return the rows of one split of a packaged file. A hash of the row's id decides the split."""
    rows = _rows(name)
    return [row for row in rows if hashed_into(split, f"{row['id']}/{name}", HELD_OUT_SHARE)]


# Finds held-out prompts that are also training prompts; evaluations on them measure memorization.


def shared_prompts(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """Return the held-out prompts whose text equals the text of a training prompt."""
    texts = {compared_text(prompt) for prompt in train}
    return [prompt for prompt in held_out if compared_text(prompt) in texts]


def compared_text(prompt: Prompt) -> str:
    """Return the text of all messages, with whitespace and case normalized."""
    return " ".join(" ".join(m["content"] for m in prompt.messages).casefold().split())
