"""Versions, machine and command of a result, without machine-specific paths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.records.provenance import describe_environment

PROJECT = Path(__file__).parents[1]
FOLDERS = re.compile(r"(^|=)/(?:[^/]+/)*")


def anywhere(words: Sequence[str]) -> list[str]:
    """Return a command without the folders of the machine that it ran on.

    >>> anywhere(["train", "--set", "model.path=/data/llm", "--run", "/data/runs/1"])
    ['train', '--set', 'model.path=llm', '--run', '1']
    """
    return [FOLDERS.sub(r"\1", word.replace(f"{PROJECT}/", "")) for word in words]


def described(seed: int, device: str, threads: int) -> dict[str, Any]:
    """Return versions, machine and command."""
    about = describe_environment(seed, device, threads)
    return {**about, "command": anywhere(about["command"])}
