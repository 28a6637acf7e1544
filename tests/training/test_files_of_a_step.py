"""How many files of the package a training step on a CPU goes through.

`python -m tests.training.test_files_of_a_step` prints their names.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import covey

PACKAGE = Path(covey.__file__).parent
MOST = 68
"""The limit of files that a training step calls; a change that adds a file should have a reason."""


def files_of_step(number: int, run: Path, **settings: Any) -> list[str]:
    """Train with the default configuration; return the files whose functions step `number` calls."""
    found: set[str] = set()
    watching = number == 1

    def called(frame: FrameType, event: str, argument: object) -> None:
        if watching and event == "call" and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename)

    def after(metrics: Mapping[str, Any]) -> None:
        nonlocal watching
        watching = metrics["step"] == number - 1

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        covey.train(
            run=run, callbacks=[after], quiet=True, **{"train.steps": number + 1, **settings}
        )
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = [Path(file) for file in found if Path(file).is_relative_to(PACKAGE)]
    return sorted(str(file.relative_to(PACKAGE)) for file in inside)


SMALL = {
    "model.device": "cpu", "evaluate.every": 0, "save.every": 0,
    "rollout.prompts_per_step": 2, "rollout.group_size": 4, "rollout.max_tokens": 24,
}  # fmt: skip


def test_a_step_goes_through_few_files(tmp_path: Path) -> None:
    files = files_of_step(2, tmp_path / "run", **SMALL)
    assert "training/step.py" in files
    assert "engines/native/scheduler.py" in files
    assert len(files) <= MOST, files


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        listed = files_of_step(2, Path(folder) / "run", **SMALL)
    print(*listed, f"{len(listed)} files", sep="\n")
