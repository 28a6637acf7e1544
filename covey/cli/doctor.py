"""`covey doctor`: check the model, engine, reward and machine for a configuration."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from covey.cli.runs import show_results
from covey.cli.startup import (
    STARTING,
    AsJson,
    Model,
    Overrides,
    Trust,
    check_out,
    resolved,
    settings_of,
    waiting,
)
from covey.config import Config
from covey.lab.checks.result import LIMIT, Clock, Result
from covey.records.files import write_text
from covey.records.folder import RunFolder
from covey.screen import Screen

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="A TOML configuration file, the name of a recipe, or a run folder. "
        "Default: arithmetic.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Write the results to this file as JSON. Without --out, the results for a run folder "
        "are written to RUN/doctor.json.",
    ),
]


def doctor_command(
    target: Target = None,
    overrides: Overrides = None,
    model: Model = None,
    out: Out = None,
    trust: Trust = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            min=1,
            help="Time limit in seconds. The command skips checks that would exceed the limit.",
        ),
    ] = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Check a configuration on this machine, in at most two minutes.

    The command takes a few small training steps to check the gradient, engine, reward, sandbox,
    exact resume, memory and time. To save time, large models are checked with fewer and shorter
    completions. The exit code is 1 if a check fails, and 0 otherwise.
    """
    check_out(out)
    run = RunFolder.open(Path(target)) if target and Path(target).is_dir() else None
    source = str(run.config_file) if run is not None else target or "arithmetic"
    started = time.perf_counter()
    with waiting(STARTING):
        config = resolved(source, settings_of(overrides, model))
    found = _examined(config, seconds, started)
    taken = time.perf_counter() - started
    failed = [result for result in found if result.passed is False]
    data = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": config.model.path,
        "passed": not failed,
        "seconds": round(taken, 1),
        "checks": [result.row() for result in found],
    }
    where = out or (run.path / "doctor.json" if run is not None else None)
    if where is not None:
        write_text(where, json.dumps(data, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(data))
    else:
        console = Screen(soft_wrap=True)
        show_results(found, console)
        skipped = sum(result.figure.startswith("skipped") for result in found)
        some = f"{len(failed)} of {len(found)} checks failed"
        note = f", {skipped} skipped (see --seconds)" if skipped else ""
        console.print(f"{some if failed else 'all checks pass'}{note}, in {taken:.0f} s")
    raise typer.Exit(1 if failed else 0)


def _examined(config: Config, seconds: float, started: float) -> list[Result]:
    found: list[Result] = []
    with waiting(f"checking {config.model.path}") as status:
        from covey.lab.checks.doctor import examine_run

        def say(doing: str) -> None:
            passed = time.perf_counter() - started
            status(f"checking {config.model.path}: {len(found)} done, {passed:.0f} s; now {doing}")

        for result in examine_run(config, Clock(limit=seconds, say=say)):
            found.append(result)
    return found
