"""A reward that depends on chance, which tests of the doctor name."""

from __future__ import annotations

import random


def by_chance(prompt: object, text: str) -> float:
    """Return a random number."""
    return random.random()


by_chance.quick = True  # type: ignore[attr-defined]
