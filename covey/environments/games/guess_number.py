"""Guess a number: the game answers each wrong guess with `higher` or `lower`."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar


class GuessNumber:
    """The game: guess a number from 1 to `size`, with enough guesses for a binary search."""

    SIZES: ClassVar[tuple[int, int, int]] = (2, 100, 10**9)

    def __init__(self, random: Random, size: int) -> None:
        self._number = random.randint(1, size)
        self._low, self._high = 1, size
        self._guess = 0
        self.rules = f"Guess a whole number from 1 to {size}. I say whether it is higher or lower."
        self.most_actions = size.bit_length()
        self.view = "What is your first guess?"

    @property
    def state(self) -> Any:
        """The range of numbers that the earlier guesses have not excluded."""
        return [self._low, self._high, self.won]

    @property
    def won(self) -> bool:
        """Whether the last guess was correct."""
        return self._guess == self._number

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self._guess = number
        if number == self._number:
            return "correct"
        if number < self._number:
            self._low = max(self._low, number + 1)
            return "higher"
        self._high = min(self._high, number - 1)
        return "lower"
