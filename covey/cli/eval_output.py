"""Shows evaluation results as tables in the terminal or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from covey.cli.screen import cell
from covey.evaluation import Comparison, by_category, compare, estimates
from covey.evaluation.evaluate import Evaluation
from covey.evaluation.items import PART
from covey.run.estimate_text import change_text, estimate_text
from covey.run.trackers.console import evaluation_line

SHOWN = 5
"""The terminal output lists at most this many prompt ids; --json and --out list all ids."""


def measured(
    models: Sequence[str], evaluations: Sequence[Evaluation], by: str | None
) -> dict[str, Any]:
    """Return JSON data: the evaluation results and, for two models, their comparison."""
    rows = [
        {"model": model, **evaluation.row(), **_categories(evaluation, by)}
        for model, evaluation in zip(models, evaluations, strict=True)
    ]
    if len(rows) == 1:
        return rows[0]
    comparison = compare(evaluations[0].items, evaluations[1].items)
    return {**rows[0], "against": rows[1], "difference": comparison.row()}


def _categories(evaluation: Evaluation, by: str | None) -> dict[str, Any]:
    if by is None:
        return {}
    return {
        "by": {
            name: {"prompts": len(items), **{n: e.row() for n, e in estimates(items).items()}}
            for name, items in by_category(evaluation.items, by).items()
        }
    }


def show_measured(
    models: Sequence[str], evaluations: Sequence[Evaluation], by: str | None, console: Console
) -> None:
    """Print the evaluation of each model and, for two models, their comparison."""
    for model, evaluation in zip(models, evaluations, strict=True):
        lead = f"{model}: " if len(models) > 1 else ""
        console.print(f"{lead}{evaluation_line(evaluation)}")
        if parts := _parts_line(evaluation):
            console.print(parts)
        if by is not None:
            console.print(_category_table(evaluation, by))
    if len(evaluations) > 1:
        _show_difference(compare(evaluations[0].items, evaluations[1].items), console)


def _parts_line(evaluation: Evaluation) -> str:
    """Return a line with the mean of each reward part; empty if there are no parts."""
    found = [
        f"{name.removeprefix(PART)} {estimate_text(name, estimate.row())}"
        for name, estimate in evaluation.estimates.items()
        if name.startswith(PART)
    ]
    return f"reward parts, greedy: {'  '.join(found)}" if found else ""


def _category_table(evaluation: Evaluation, by: str) -> Table:
    table = Table(Column(cell(by)), "n", "", "value, 95 % interval")
    for name, items in by_category(evaluation.items, by).items():
        labels = [cell(name), cell(len(items))]
        for number, estimate in estimates(items).items():
            table.add_row(*labels, cell(number), estimate_text(number, estimate.row()))
            labels = [cell(""), cell("")]
    return table


def _show_difference(comparison: Comparison, console: Console) -> None:
    table = Table("first - second", "difference", "95 % interval", "better", "worse", "p")
    for name, difference in comparison.differences.items():
        found = difference.estimate
        low, high = (change_text(name, v).removesuffix(" points") for v in (found.low, found.high))
        table.add_row(
            cell(name),
            change_text(name, found.value),
            "-" if found.low == found.high else f"[{low}, {high}]",
            str(difference.gained),
            str(difference.lost),
            f"{difference.p_value:.3g}",
        )
    console.print(table)
    for what, ids in (("gained", comparison.gained), ("lost", comparison.lost)):
        shown = ", ".join(ids[:SHOWN]) + (", ..." if len(ids) > SHOWN else "")
        console.print(f"{what} {len(ids)}: {shown or 'none'}")
