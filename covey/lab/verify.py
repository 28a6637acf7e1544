"""Checks the checkpoints of a run: whether they are whole."""

from __future__ import annotations

from covey.errors import RunError
from covey.lab.checks.result import Result
from covey.records.files import damage
from covey.records.folder import RunFolder
from covey.records.records import read_object


def checkpoint_checks(run: RunFolder) -> list[Result]:
    """Return one result per checkpoint: whether its files have their digests and can be read."""
    found = []
    for step, folder in run.checkpoints():
        problem = damage(folder)
        if problem is None:
            try:
                read_object(folder / "covey.json")
            except RunError as error:
                problem = str(error)
        found.append(
            Result(
                name=f"checkpoint {step}",
                passed=problem is None,
                figure=problem or "its files are as they were written",
                remedy="resume from another checkpoint, with --resume RUN --step N",
            )
        )
    return found or [
        Result(name="checkpoints", passed=None, figure="the run has no checkpoint yet")
    ]
