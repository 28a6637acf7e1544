"""Runs a comparison: prints its arms, trains its runs, and writes its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.live import Live
from rich.table import Table
from rich.text import Text

from covey.config import toml_value
from covey.lab.compare.comparison import Design, load_comparison, write_design
from covey.lab.compare.conclusion import count
from covey.lab.compare.design import Prepared, parallel_runs
from covey.lab.compare.launch import Progress, Running, Watch, make_jobs, run_jobs
from covey.lab.compare.report_files import terminal_report, write_reports
from covey.lab.compare.report_tables import NO_OPTION, finding_title
from covey.records.files import write_text
from covey.records.folder import RunFolder
from covey.records.provenance import describe_environment
from covey.screen import Screen, cell


def show_design(prepared: Prepared, console: Screen) -> None:
    """Print a comparison's arms, the settings in which they differ, and warnings."""
    design = prepared.design
    runs = len(design.arms) * len(design.seeds)
    seeds = ", ".join(str(seed) for seed in design.seeds)
    console.print(
        f"{count(runs, 'run')} of {design.amount} {design.budget}: "
        f"{count(len(design.arms), 'arm')}, seeds {seeds}, "
        f"{count(design.threads, 'thread')} each, in {prepared.folder}",
    )
    table = Table("arm", "differences from the common configuration")
    for arm in design.arms:
        lines = [
            f"{key} = {NO_OPTION if v is None else v if key == 'seed' else toml_value(v)}"
            for key, v in arm.differences.items()
        ]
        table.add_row(cell(arm.name), cell("\n".join(lines) or "none"))
    console.print(table)
    for row in design.findings:
        text = Text().append(f"{finding_title(row)}\n", style="yellow")
        text.append(f"  {row['why']}\n  remedy: {row['remedy']}", style="dim")
        console.print(text)


def run_comparison(prepared: Prepared, parallel: int | None, console: Screen) -> Running:
    """Start or resume all unfinished runs. Write the reports unless Ctrl-C stopped the runs."""
    folder, design = prepared.folder, prepared.design
    # This loads the model, so that a bad model fails before anything is written.
    jobs = make_jobs(folder, design)
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).locked():
        if prepared.previous != design:
            write_design(folder, design)
        if prepared.previous is None:
            about = describe_environment(min(design.seeds), "", design.threads)
            del about["command"], about["device"]
            write_text(folder / "environment.json", json.dumps(about, indent=2) + "\n")
        with _progress(design, console) as watch:
            running = run_jobs(folder, jobs, parallel or parallel_runs(design), watch)
    if not running.stopping:
        write_report(folder, console)
    return running


@contextmanager
def _progress(design: Design, console: Screen) -> Iterator[Watch]:
    """Yield the progress display: a live table in a terminal, and plain lines elsewhere."""
    progress = Progress(console=console, budget=design.budget, amount=design.amount)
    if console.quiet or not console.is_terminal:
        yield progress
        return
    with Live(console=console, auto_refresh=False) as live:
        yield replace(progress, live=live)


def write_report(folder: Path, console: Screen) -> None:
    """Write the report files of a comparison. Print the report and the errors of failed runs."""
    comparison = load_comparison(folder)
    write_reports(folder, comparison)
    console.print(terminal_report(comparison))
    for run in comparison.runs:
        if run.state == "failed":
            console.print(f"failed: {run.arm} seed {run.seed}: {run.error}")
    console.print(f"report   {folder / 'report.html'}")
