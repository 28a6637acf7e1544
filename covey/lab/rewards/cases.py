"""Reads completions from files, to score them or to compare their scores with human labels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import DataError, reason
from covey.types import Prompt

TEXTS, PROMPTS = ("completion", "text", "response"), ("question", "prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A completion to score, with its prompt."""

    prompt: Prompt
    text: str
    correct: bool | None = None
    """The human label: whether the completion is correct, or None if there is no label."""


def read_cases(path: Path) -> list[Case]:
    """Read completions from a file of JSON Lines, such as a run's rollouts.

    Each line is an object, which can have the keys `completion` (or `text`), `target` (or
    `answer`), `prompt` (or `question`), and `correct` (a human label). Unknown keys, and the
    entries under the key `info`, are copied to the prompt's `info`.
    """
    try:
        # Not splitlines: JSON strings may contain other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {reason(error)}; check the path") from None
    cases = [_case(line, f"{path}:{n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not cases:
        raise DataError(
            f"{path} has no completions; write one JSON object per line, with the completion under "
            "the key 'completion'"
        )
    return cases


def read_labelled(path: Path) -> list[Case]:
    """Read completions with human labels from a file of JSON Lines.

    Raise an error if a completion has no label.
    """
    cases = read_cases(path)
    for number, case in enumerate(cases, start=1):
        if case.correct is None:
            raise DataError(
                f"{path}: completion {number} has no label; add the field 'correct' with the value "
                "true or false"
            )
    return cases


def _case(line: str, place: str) -> Case:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}; write one JSON object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{place} is a {type(row).__name__}, but each line must be a JSON object")
    text = _pop(row, TEXTS)
    if not isinstance(text, str):
        keys = " or ".join(map(repr, TEXTS))
        raise DataError(f"{place} has no completion text; put the text under the key {keys}")
    content, target = _pop(row, PROMPTS), _pop(row, ("target", "answer"))
    correct = row.pop("correct", None)
    if correct is not None and not isinstance(correct, bool):
        raise DataError(f"{place}: the field 'correct' must be true or false, not {correct!r}")
    info = row.pop("info", {})
    prompt = Prompt(
        id=str(row.pop("prompt_id", None) or place),
        task=str(row.pop("task", "") or ""),
        messages=({"role": "user", "content": "" if content is None else str(content)},),
        target="" if target is None else str(target),
        info={**row, **(info if isinstance(info, dict) else {"info": info})},
    )
    return Case(prompt=prompt, text=text, correct=correct)


def _pop(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    found = [row.pop(name) for name in names if name in row]
    return found[0] if found else None
