"""The Reasoning Gym scorers that run in the sandbox."""

from __future__ import annotations

import importlib
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from covey.rewards.plain_answer import plain_data, plain_formula, plain_sum
from covey.tasks.reasoning_gym import entry_of

Entry = Mapping[str, Any]


def _names(entry: Entry) -> list[str]:
    """Return the names in the target, which include its variables."""
    return re.findall(r"[A-Za-z]\w*", str(entry["answer"]), re.ASCII)


def _as_data(answer: str, entry: Entry) -> str:
    return plain_data(answer)


def _as_sum(answer: str, entry: Entry) -> str:
    return plain_sum(answer)


def _as_formula(answer: str, entry: Entry) -> str:
    return plain_formula(answer, _names(entry))


EVALUATING: Mapping[str, Callable[[str, Entry], str]] = {
    "binary_matrix": _as_data,
    "n_queens": _as_data,
    "spiral_matrix": _as_data,
    "string_insertion": _as_data,
    "countdown": _as_sum,
    "puzzle24": _as_sum,
    "intermediate_integration": _as_formula,
    "polynomial_multiplication": _as_formula,
    "simple_integration": _as_formula,
}
"""Datasets whose scorer evaluates the answer, and the parser that the answer must pass first."""


def load() -> None:
    """Import slow modules and fill sympy's caches, which child processes inherit."""
    importlib.import_module("reasoning_gym.composite")
    sympy = importlib.import_module("sympy")
    integral = sympy.parse_expr("x**3/3 + sin(2*x)*exp(x) + log(x) + sqrt(x) + C")
    sympy.simplify(sympy.diff(integral, sympy.Symbol("x")))


def prepare(info: Mapping[str, Any]) -> tuple[str, Any, Entry]:
    """Return the dataset's name, the dataset, and the entry of a prompt."""
    dataset, entry = entry_of(info)
    name = info["reasoning_gym"]["dataset"]
    # A composite dataset passes the answer to the dataset of the entry.
    return entry["metadata"]["source_dataset"] if name == "composite" else name, dataset, entry


def score(prepared: tuple[str, Any, Entry], text: str) -> float:
    """Return the score of the dataset's own scorer, from 0 to 1."""
    name, dataset, entry = prepared
    try:
        answer = readable(name, text, entry)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = float(dataset.score_answer(answer, entry))
    except Exception:  # scorers assume a format of the answer, and raise anything
        return 0.0
    return min(max(given, 0.0), 1.0) if math.isfinite(given) else 0.0


def readable(name: str, text: str, entry: Entry) -> str:
    """Return the answer as the scorer may see it: unchanged only if it evaluates nothing.

    Raises NotPlainError if the answer may not be evaluated.
    """
    if name not in EVALUATING:
        return text
    known = [entry["answer"], *entry["metadata"].get("valid_answers", ())]
    # Answers that the entry lists are the dataset's own text. Some are not expressions.
    for answer in known:
        if isinstance(answer, str) and answer.strip() == text.strip():
            return answer
    return EVALUATING[name](text, entry)
