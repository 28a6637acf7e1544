"""`covey runs check`: checks the health of a run, with an exit code for scripts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from covey.cli.screen import Screen
from covey.cli.startup import AsJson
from covey.errors import RunError
from covey.run.folder import RunFolder, settings_of
from covey.run.health import Finding, silence, timeline

UNHEALTHY = 1
"""The exit code if the last step shows a problem."""


def check_command(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: AsJson = False,
) -> None:
    """Check the health of a run: show each problem with its first step, its cause and a remedy.

    The exit code is 1 if the last step shows a problem, and 0 otherwise.
    """
    run = RunFolder.open(path)
    rows = run.steps()
    if not rows:
        raise RunError(f"{path} has no training steps yet")
    found = timeline(rows, settings_of(run))
    seconds = time.time() - (run.path / "steps.jsonl").stat().st_mtime
    silent = silence(rows, seconds) if run.in_use() else None
    found += [silent] if silent else []
    last = rows[-1]["step"]
    if as_json:
        typer.echo(
            json.dumps({"run": str(path), "step": last, "findings": [f.row() for f in found]})
        )
    else:
        _show(found, last, path)
    if any(finding.problem and finding.until is None for finding in found):
        raise typer.Exit(UNHEALTHY)


def _show(found: list[Finding], last: int, path: Path) -> None:
    console = Screen(soft_wrap=True)
    now = [finding for finding in found if finding.until is None]
    before = [finding for finding in found if finding.until is not None]
    for finding in now:
        console.print(finding.line(), style="yellow" if finding.problem else "default")
    for finding in before:
        console.print(f"(over) {finding.line()}", style="dim")
    if not any(finding.problem for finding in now):
        console.print(f"{path}: nothing is wrong at step {last}")
