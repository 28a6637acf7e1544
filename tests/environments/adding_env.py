"""An environment package in the style of verifiers: a tool that adds, and a rubric."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


def load_environment(size: int = 4, **options: Any) -> vf.Environment:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(size)]

    def correct(completion: Any, answer: str) -> float:
        return float(completion[-1].content.strip() == answer)

    rubric = vf.Rubric(funcs=[correct], weights=[0.5])
    dataset = Dataset.from_list(rows)
    return vf.ToolEnv(tools=[add], max_turns=3, dataset=dataset, rubric=rubric, **options)
