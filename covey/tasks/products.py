"""The `products` task: products of two numbers, such as `472*839?`, for models with a calculator.

A hash of the two factors decides whether a product is held out, so no held-out product is a
training prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from random import Random

from covey.errors import ConfigError
from covey.tasks.task import GeneratedTask, chat_messages, hashed_into
from covey.types import Prompt

HELD_OUT_SHARE = 0.2


def factors(split: str, digits: int, index: int) -> tuple[int, int]:
    """Return the two numbers of problem `index` of a split."""
    random = Random(f"products/{split}/{digits}/{index}")
    low, high = 10 ** (digits - 1), 10**digits - 1
    for _ in count():
        left, right = random.randint(low, high), random.randint(low, high)
        if hashed_into(split, f"{left}*{right}", HELD_OUT_SHARE):
            return left, right
    raise AssertionError("every split has numbers, so one is drawn at some point")


@dataclass(frozen=True, slots=True, kw_only=True)
class Products(GeneratedTask):
    """Multiplication problems; both factors have `digits` digits."""

    digits: int = 3
    question: str = "{left}*{right}?"
    name: str = "products"

    def __post_init__(self) -> None:
        GeneratedTask.__post_init__(self)
        if not 1 <= self.digits <= 9:
            raise ConfigError(f"task: digits must be from 1 to 9, not {self.digits}")
        try:
            self.question.format(left=1, right=1)
        except (KeyError, IndexError, ValueError):
            raise ConfigError(
                f"task: the option question = {self.question!r} must contain {{left}} and {{right}}"
            ) from None

    def _prompt(self, split: str, index: int) -> Prompt:
        left, right = factors(split, self.digits, index)
        return Prompt(
            id=f"products/{split}/{self.digits}/{index}",
            task="products",
            messages=chat_messages(self.question.format(left=left, right=right)),
            target=str(left * right),
            info={"left": left, "right": right},
        )
