"""`covey doctor`: check model, engine, reward and machine with the user's own configuration."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from covey.cli.run_verify import show_results
from covey.cli.screen import Screen
from covey.cli.startup import (
    STARTING,
    Model,
    Overrides,
    Trust,
    resolved,
    settings_of,
    waiting,
)
from covey.run.files import write_text
from covey.run.folder import RunFolder

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="Configuration to check: a TOML file, the name of a recipe, or a run folder. "
        "Default: arithmetic.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Write the results to this file as JSON. The results for a run folder are written to "
        "RUN/doctor.json by default.",
    ),
]


def doctor_command(
    target: Target = None,
    overrides: Overrides = None,
    model: Model = None,
    out: Out = None,
    trust: Trust = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a configuration on this machine, in about a minute.

    Small training steps with this configuration test the gradient, engine, reward, sandbox, exact
    resume, memory and time. The exit code is 0 if every check passes, and 1 if not.
    """
    run = RunFolder.open(Path(target)) if target and Path(target).is_dir() else None
    source = str(run.config_file) if run is not None else target or "arithmetic"
    started, found, console = time.perf_counter(), [], Screen(soft_wrap=True)
    with waiting(STARTING):
        config = resolved(source, settings_of(overrides, model))

        from covey.analysis.doctor.checkup import examine_run
    with waiting(f"checking {config.model.path}") as say:
        for result in examine_run(config):
            found.append(result)
            say(f"checking {config.model.path}: {len(found)} checks done, last: {result.name}")
    seconds = time.perf_counter() - started
    failed = [result for result in found if result.passed is False]
    data = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": config.model.path,
        "passed": not failed,
        "seconds": round(seconds, 1),
        "checks": [result.row() for result in found],
    }
    where = out or (run.path / "doctor.json" if run is not None else None)
    if where is not None:
        write_text(where, json.dumps(data, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(data))
    else:
        show_results(found, console)
        outcome = f"{len(failed)} of {len(found)} checks failed" if failed else "all checks pass"
        console.print(f"{outcome}, in {seconds:.0f} s")
    raise typer.Exit(1 if failed else 0)
