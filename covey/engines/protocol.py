"""What a sampler is asked and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from covey.engines.draw import Distribution
from covey.types import Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt with its tokens."""

    prompt: Prompt
    tokens: tuple[int, ...]
    opening: str = ""
    """The end of the prompt that answers are judged and read with, put there by `collect`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are sampled."""

    samples: int = 1
    """Answers to each question."""
    distribution: Distribution = field(default_factory=Distribution)
    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    """Texts that end an answer. They stay part of it, since rewards look for closing tags."""
    slots: int = 128
    """How many answers are written at once."""
    seed: int = 0


class Engine(Protocol):
    """Writes answers. The answer to a (question, sample) depends on nothing else in the call."""

    @property
    def way(self) -> str:
        """How answers are written, and why not faster, in one line for the user."""

    def generate(
        self,
        questions: Sequence[Question],
        *,
        step: int,
        sampling: Sampling,
        version: int = 0,
        finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        """Return `sampling.samples` answers for each question, in order.

        `finished` is called with the number of the question and the answer as soon as one ends.
        """
