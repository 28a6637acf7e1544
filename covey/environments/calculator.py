"""The `calculator` environment: a tool for exact arithmetic."""

from __future__ import annotations

from typing import ClassVar

from covey.environments.tools import ToolEnvironment, ToolError
from covey.rewards.math.arithmetic_expression import ExpressionError, evaluate


class Calculator(ToolEnvironment):
    """One tool, which evaluates an arithmetic expression. The last turn is what is scored."""

    quick: ClassVar[bool] = True

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
