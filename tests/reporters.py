"""Somebody who watches a run, for tests."""

from __future__ import annotations


class Notes:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def started(self, **_: object) -> None: ...
    def sampled(self, answers: int) -> None: ...
    def step(self, metrics: object) -> None: ...
    def evaluated(self, step: int, evaluation: object) -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)
