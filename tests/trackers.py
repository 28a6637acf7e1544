"""A tracker for tests."""

from __future__ import annotations

from covey.records.trackers import Tracker


class Notes(Tracker):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
