"""`covey runs report`: writes an offline report of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covey.cli.screen import echo
from covey.errors import RunError
from covey.run.folder import RunFolder


def report_command(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for the report. Default: the run folder."),
    ] = None,
) -> None:
    """Write the report of a run as report.html, which opens offline, and as report.md.

    The report shows curves, evaluations, completions before and after training, sampled
    completions, health and settings.
    """
    run = RunFolder.open(path)
    if out is not None and not out.is_dir():
        raise RunError(f"--out {out}: this folder does not exist")

    from covey.analysis.run_report.write import write_run_report

    for file in write_run_report(run, out or path):
        echo(str(file))
