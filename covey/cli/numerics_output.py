"""Terminal output of `covey numerics`: a table of causes with advice."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from covey.analysis.numerics.measure_gaps import Report
from covey.cli.explain_output import number_column
from covey.cli.screen import cell

COLUMNS = ("mean", "p99", "max", "ratio", "outside", "effective")
NOT_A_SUM = (
    "Each line changes one thing at a time; the lines need not add up to the first: rounding "
    "errors partly cancel, and staleness is no part of it."
)


def show_report(report: Report, console: Console) -> None:
    """Print the table, and the meaning of each line."""
    clip = report.clip
    unit = "completions" if clip.per_completion else "tokens"
    console.print(
        f"{report.model} on {report.device} in {report.dtype}: {report.completions} completions, "
        f"{report.causes[0].gap.tokens} tokens; {report.alone} also generated one at a time, of "
        f"which {report.diverged} diverged",
        style="bold",
    )
    console.print(_table(report))
    console.print(
        "mean, p99, max: |difference| in nats. ratio: mean of exp(difference). outside: share "
        f"of {unit} whose ratio is not in [{clip.low:.4g}, {clip.high:.4g}], the clip range. "
        f"effective: effective sample size, as a share of all {unit}.",
    )
    console.print(NOT_A_SUM)
    for cause in report.causes:
        row = cause.row()
        console.print(f"\n{row['title']}: {row['severity']}", style="bold")
        console.print(f"  {row['what']}.")
        console.print(f"  What to do: {row['advice']}.")
    for note in report.notes:
        console.print(f"\n{note}")


def _table(report: Report) -> Table:
    columns = map(number_column, COLUMNS)
    table = Table(Column("difference", no_wrap=True), *columns, "", box=SIMPLE)
    for cause in report.causes:
        gap = cause.gap
        table.add_row(
            cell(cause.title),
            *(f"{value:.2e}" for value in (gap.mean, gap.p99, gap.max)),
            f"{gap.ratio_mean:.5f}",
            f"{gap.outside:.2%}",
            f"{gap.effective:.2%}",
            gap.severity,
        )
    return table
