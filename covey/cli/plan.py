"""`covey plan`: what a run will do, need and not do, before it is started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from covey.cli.screen import Screen, cell
from covey.cli.startup import (
    STARTING,
    Model,
    Overrides,
    Source,
    Trust,
    resolved,
    settings_of,
    waiting,
)
from covey.config import Config
from covey.errors import CoveyError

if TYPE_CHECKING:
    from covey.analysis.plan.describe import Plan
    from covey.analysis.plan.finding import Finding
    from covey.analysis.plan.forecast import Forecast

HEADINGS = {"same": "the same", "idle": "does nothing", "risk": "may harm"}


def plan_command(
    source: Source = None,
    overrides: Overrides = None,
    model: Model = None,
    trust: Trust = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a configuration will do, what memory it takes, and which settings do nothing.

    Nothing is trained and no weights are loaded: of the model only its configuration and its
    tokenizer are read.
    """
    settings = settings_of(overrides, model)
    with waiting(STARTING) as say:
        config = resolved(source or "arithmetic", settings, model=False)

        from covey.analysis.plan.describe import describe
        from covey.analysis.plan.findings import findings
        from covey.analysis.plan.look import look

        say("looking at the task")
        seen = look(config)
        plan, found = describe(config, seen), findings(config, seen)
        say(f"measuring {config.model.path}")
        memory, reason = _memory(config)
    if as_json:
        kept = memory.row() if memory else None
        rows = [finding.row() for finding in found]
        data = {"text": plan.paragraph(), "plan": plan.row(), "memory": kept}
        typer.echo(json.dumps({**data, "memory_unknown": reason, "findings": rows}))
        return
    console = Screen(highlight=False)
    _show_plan(plan, console)
    said = memory.text() if memory else f"memory: not known, {reason}"
    console.print(said, markup=False, soft_wrap=True)
    _show_findings(found, console)


def _memory(config: Config) -> tuple[Forecast | None, str]:
    """Foretell the memory, or say why that cannot be done."""
    from covey.analysis.plan.memory import forecast

    try:
        return forecast(config), ""
    except CoveyError as error:
        return None, str(error)


def _show_plan(plan: Plan, console: Console) -> None:
    console.print(plan.paragraph(), markup=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in plan.table():
        table.add_row(name, cell(value))
    console.print("", table, "", sep="\n")


def _show_findings(found: list[Finding], console: Console) -> None:
    if not found:
        console.print("\nNothing stands out: no setting is idle, none is known to harm.")
    for finding in found:
        console.print(f"\n[bold]{HEADINGS[finding.kind]}[/]: ", end="")
        console.print(finding.title, markup=False, style="bold")
        console.print(f"  {finding.why}", markup=False)
        console.print(f"  What to do: {finding.remedy} ({finding.docs}).", markup=False)
