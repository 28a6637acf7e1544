"""Output of `covey plan --cluster` and `covey plan --measure`: splits of GPUs, and time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from covey.cli.screen import Screen
from covey.cli.startup import waiting
from covey.errors import CoveyError

if TYPE_CHECKING:
    from covey.analysis.plan.cost_model import ModelSize
    from covey.analysis.plan.task_facts import TaskFacts
    from covey.config import Config

HEADINGS = ("model", "GPUs", "trainers", "engines", "rollout", "update", "sync", "step", "in turn")


def show_cluster(config: Config, facts: TaskFacts, as_json: bool) -> None:
    """Print the best split of 8 to 1,024 GPUs, for this run's model and published model sizes."""
    from covey.analysis.plan.cluster_table import table, workload
    from covey.analysis.plan.task_facts import usable_prompt
    from covey.training.resolve import objective_of

    reference = "reference" in objective_of(config).needs
    work = workload(config, usable_prompt(config, facts), reference=reference)
    rows = table(work, _own(config))
    if as_json:
        typer.echo(json.dumps(rows))
        return
    console = Screen()
    console.print(
        f"Best split of H200 GPUs for {work.rows} completions of {work.completion} tokens a step, "
        "with overlap.mode = 'copy' and a staleness of 1; seconds by the model of docs/scale.md. "
        "'in turn': the same GPUs at staleness 0."
    )
    shown = Table(*HEADINGS, box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*_cells(row))
    console.print(shown)


def _own(config: Config) -> tuple[str, ModelSize] | None:
    """Return the model of the configuration and its size, or None if the size is unknown."""
    from covey.analysis.plan.cluster_table import size_of
    from covey.analysis.plan.model_shape import shape_of

    try:
        return config.model.path, size_of(shape_of(config))
    except CoveyError:
        return None


def _cells(row: dict[str, Any]) -> list[str]:
    engines = f"{row['engines']} x {row['engine_gpus']}"
    seconds = [f"{row[key]:.1f}" for key in ("rollout", "update", "sync", "seconds")]
    trainers = "the same" if row["shared"] else str(row["trainers"])
    in_turn = f"{row['seconds_in_turn']:.1f}"
    return [row["model"], str(row["gpus"]), trainers, engines, *seconds, in_turn]


def show_time(config: Config, as_json: bool) -> None:
    """Run a few steps, and print how long the whole run will take."""
    with waiting("measuring a few training steps"):
        from covey.analysis.plan.time_forecast import measure_time

        forecast = measure_time(config)
    typer.echo(json.dumps(forecast.row()) if as_json else forecast.text())
