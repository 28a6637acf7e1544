"""The `calculator` environment: a tool for exact arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import ClassVar

from covey.environments.environment import Start
from covey.environments.tool_environment import ToolEnvironment, ToolError
from covey.errors import ConfigError
from covey.rewards.math.arithmetic_expression import ExpressionError, evaluate
from covey.tasks.task import GeneratedTask, chat_messages, hashed_into
from covey.types import Message, Prompt

# The `products` task: products of two numbers, such as `472*839?`, for models with a calculator.


HELD_OUT_SHARE = 0.2


def factors(split: str, digits: int, index: int) -> tuple[int, int]:
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


INSTRUCTION = (
    "Use the calculator: write <calculator>expression</calculator> and wait for its result. Then "
    "give the result between <answer> and </answer>."
)


def example(name: str) -> list[Message]:
    """Return an example conversation that multiplies two numbers; `name` seeds the numbers."""
    random = Random(name)
    left, right = random.randint(11, 999), random.randint(11, 999)
    texts = {
        "user": f"What is {left} * {right}?",
        "assistant": f"<calculator>{left} * {right}</calculator>",
        "tool": str(left * right),
    }
    answer = {"role": "assistant", "content": f"<answer>{left * right}</answer>"}
    return [*({"role": role, "content": text} for role, text in texts.items()), answer]


class Calculator(ToolEnvironment):
    """An environment with one tool, which evaluates arithmetic.

    The reward function scores the policy's last turn. The options `explain` and `examples` are for
    models whose chat template does not support tools. `explain` adds a system message that explains
    how to call the tool with tags. `examples` is the number of example conversations before the
    prompt.
    """

    quick: ClassVar[bool] = True

    def __init__(self, explain: bool = False, examples: int = 0) -> None:
        self.explain, self.examples = explain, examples

    def reset(self, prompt: Prompt, seed: int) -> Start:
        """Start the episode: show the group's example conversations, and then the prompt."""
        start = super().reset(prompt, seed)
        system = [{"role": "system", "content": INSTRUCTION}] if self.explain else []
        shown = [message for n in range(self.examples) for message in example(f"{seed}/{n}")]
        return replace(start, messages=[*system, *shown, *start.messages])

    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression exactly.

        Args:
            expression: Numbers, + - * / ** and parentheses, such as (17 + 4) * 3.
        """
        try:
            value = evaluate(expression, powers=True)
        except ExpressionError as error:
            raise ToolError(str(error)) from None
        except ZeroDivisionError:
            raise ToolError("division by zero") from None
        return str(value)
