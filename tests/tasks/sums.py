"""Read the prompts of the arithmetic task back."""

from __future__ import annotations

from covey.tasks.arithmetic import Sum


def parse_prompt(text: str) -> list[Sum]:
    """Parse a prompt into its sums."""
    sums: list[Sum] = []
    left = int(text[:2])
    for at in range(2, len(text) - 1, 2):
        sums.append(Sum(left, text[at], int(text[at + 1])))
        left = sums[-1].result
    return sums
