"""Answers from files: to be scored, or with a person's verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from covey.analysis.lab.lab import Case, Labelled
from covey.errors import DataError, reason
from covey.types import Prompt

TEXTS, QUESTIONS = ("completion", "text", "response"), ("question", "prompt")


def read_cases(path: Path) -> list[Case]:
    """Read answers from JSON Lines, one object a line.

    `completion` (or `text`) is the answer, `answer` what was expected, `question` (or `prompt`)
    what was asked; `info`, and whatever else there is, goes with the prompt. The files in a run's
    `rollouts` folder are of this kind. A row with `correct` is a labelled one.
    """
    try:
        # Not splitlines: texts may hold separators that are no end of a line to JSON.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from None
    cases = [_case(line, f"{path}:{n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not cases:
        raise DataError(f"{path} holds no answers")
    return cases


def _case(line: str, where: str) -> Case:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is not an object but {type(row).__name__}")
    text = _pop(row, TEXTS)
    if not isinstance(text, str):
        raise DataError(f"{where} has no text in {' or '.join(map(repr, TEXTS))}")
    question = _pop(row, QUESTIONS)
    correct = row.pop("correct", None)
    info = row.pop("info", {})
    prompt = Prompt(
        id=str(row.pop("prompt_id", None) or where),
        task=str(row.pop("task", "") or ""),
        messages=({"role": "user", "content": "" if question is None else str(question)},),
        target=str(row.pop("target", row.pop("answer", ""))),
        info={**row, **(info if isinstance(info, dict) else {"info": info})},
    )
    if correct is None:
        return Case(prompt=prompt, text=text)
    if not isinstance(correct, bool):
        raise DataError(f"{where}: correct must be true or false, not {correct!r}")
    return Labelled(prompt=prompt, text=text, correct=correct)


def _pop(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    found = [row.pop(name) for name in names if name in row]
    return found[0] if found else None


def read_labelled(path: Path) -> list[Labelled]:
    """Read answers of which every one has `correct`."""
    cases = read_cases(path)
    for number, case in enumerate(cases, start=1):
        if not isinstance(case, Labelled):
            raise DataError(f"{path}: answer {number} has no 'correct'")
    return [case for case in cases if isinstance(case, Labelled)]
