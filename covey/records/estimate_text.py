"""Formats the numbers of evaluations: accuracies in percent, rewards as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping


def is_reward(name: str) -> bool:
    """Whether an evaluation metric is a reward or a reward part, and not a rate.

    >>> is_reward("parts/format"), is_reward("pass@4")
    (True, False)
    """
    return name == "reward" or name.startswith("parts/")


def value_text(name: str, value: float) -> str:
    """Format a metric's value: a reward as a plain number, a rate or accuracy in percent.

    >>> value_text("greedy", 0.125), value_text("reward", -0.125)
    ('12.5%', '-0.125')
    """
    return f"{value:.3f}" if is_reward(name) else f"{value:.1%}"


def change_text(name: str, change: float) -> str:
    """Format a metric's change: a reward as a plain number, a rate in percentage points.

    >>> change_text("greedy", 0.125), change_text("reward", 0.125)
    ('+12.5 points', '+0.125')
    """
    return f"{change:+.3f}" if is_reward(name) else f"{100 * change:+.1f} points"


def estimate_text(name: str, estimate: Mapping[str, float]) -> str:
    """Return an estimate as text, with its confidence interval unless the interval's length is 0.

    >>> estimate_text("greedy", {"value": 0.0, "low": 0.0, "high": 0.037})
    '0.0% [0.0%, 3.7%]'
    """
    value, low, high = (value_text(name, estimate[key]) for key in ("value", "low", "high"))
    return value if estimate["low"] == estimate["high"] else f"{value} [{low}, {high}]"
