"""Calls the scorers of reasoning_gym datasets. This module runs in the sandbox if the scorer is
impure."""

from __future__ import annotations

import importlib
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from covey.rewards.gym.plain_answer import NotPlainError, plain_data, plain_formula, plain_sum
from covey.tasks.reasoning_gym import entry_of

Entry = Mapping[str, Any]


def _as_data(answer: str, entry: Entry) -> str:
    return plain_data(answer)


def _as_sum(answer: str, entry: Entry) -> str:
    return plain_sum(answer)


def _as_formula(answer: str, entry: Entry) -> str:
    names = re.findall(r"[A-Za-z]\w*", str(entry["answer"]), re.ASCII)  # including its variables
    return plain_formula(answer, names)


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
"""Maps each dataset whose scorer evaluates answers as code to a function that makes a safe copy of
an answer."""


def load() -> None:
    """Import slow packages and fill sympy's caches, before any child process is forked."""
    importlib.import_module("reasoning_gym.composite")
    sympy = importlib.import_module("sympy")
    integral = sympy.parse_expr("x**3/3 + sin(2*x)*exp(x) + log(x) + sqrt(x) + C")
    sympy.simplify(sympy.diff(integral, sympy.Symbol("x")))


def prepare(info: Mapping[str, Any]) -> tuple[str, Any, Entry]:
    """Return the dataset's name, the dataset, and the dataset entry of a prompt."""
    dataset, entry = entry_of(info)
    name = info["reasoning_gym"]["dataset"]
    # An entry of a composite dataset comes from one of its sub-datasets, which scores it.
    return entry["metadata"]["source_dataset"] if name == "composite" else name, dataset, entry


def score(prepared: tuple[str, Any, Entry], text: str) -> float:
    """Return the score from 0 to 1 that the dataset's own scorer gives to an answer."""
    name, dataset, entry = prepared
    try:
        answer = readable(name, text, entry)
    except NotPlainError:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scored(dataset, answer, entry)


def scored(dataset: Any, answer: str, entry: Entry) -> float:
    """Return the score, from 0 to 1, of an answer that `readable` returned."""
    try:
        given = float(dataset.score_answer(answer, entry))
    except Exception:  # scorers raise different errors for an answer in an unexpected form
        return 0.0
    return min(max(given, 0.0), 1.0) if math.isfinite(given) else 0.0


def readable(name: str, text: str, entry: Entry) -> str:
    """Return the text that the scorer gets as the answer.

    A scorer that evaluates answers as code gets new text, which is generated from the answer's
    syntax tree. Raises NotPlainError if an answer that would be evaluated is neither plain data
    (numbers, strings, lists) nor arithmetic.
    """
    if name not in EVALUATING:
        return text
    known = [entry["answer"], *entry["metadata"].get("valid_answers", ())]
    # The entry's own answers are trusted, and not all of them can be parsed.
    for answer in known:
        if isinstance(answer, str) and answer.strip() == text.strip():
            return answer
    return EVALUATING[name](text, entry)
