"""Problems that ship with the package, one JSON object per line, split into training and held-out
problems."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from covey.tasks.task import hash_fraction

HELD_OUT_SHARE = 0.25


@cache
def _rows(name: str) -> tuple[dict[str, Any], ...]:
    text = (files("covey.tasks") / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.split("\n") if line)


def packaged_rows(name: str, split: str) -> list[dict[str, Any]]:
    """Return the rows of one split of a packaged file. A hash of the row's id decides the split."""
    held_out = split == "held_out"
    return [
        row
        for row in _rows(name)
        if (hash_fraction(f"{row['id']}/{name}") < HELD_OUT_SHARE) == held_out
    ]
