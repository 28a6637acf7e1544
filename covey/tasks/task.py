"""What a task is: training prompts and held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from covey.types import Prompt


class Task(Protocol):
    """Two disjoint sequences of prompts, each prompt a function of its index alone."""

    @property
    def name(self) -> str:
        """The name that prompts and logs carry."""

    def train(self) -> Sequence[Prompt]:
        """Prompts to learn from."""

    def held_out(self) -> Sequence[Prompt]:
        """Prompts that are only ever used to measure."""
