"""On a narrow terminal a table becomes a list, so that no number is cut off."""

from __future__ import annotations

import io

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from covey.screen import Screen

VALUES = ("-1.650", "-1.534", "+0.116", "by seed: +0.084, +0.147", "14.5")


def results() -> Table:
    table = Table(title=Text("Results"), caption=Text("Means over seeds."))
    for heading in ("arm", "initial", "final", "improvement", "95 % interval", "answers"):
        table.add_column(heading)
    table.add_row("grpo", *VALUES)
    table.add_row(Text("rloo [b]"), *VALUES)
    return table


@pytest.mark.parametrize("inside", [False, True])
def test_a_table_that_does_not_fit_is_a_list(inside: bool) -> None:
    screen = Screen(file=io.StringIO(), width=40)
    screen.print(Group(results()) if inside else results())
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.strip() for line in lines[:7]] == [
        "Results", "arm: grpo", "initial: -1.650", "final: -1.534", "improvement: +0.116",
        "95 % interval: by seed: +0.084, +0.147", "answers: 14.5",
    ]  # fmt: skip
    assert lines[7].strip() == "arm: rloo [b]"
    assert lines[13].strip() == "Means over seeds."
    assert max(map(len, lines)) <= 40


def test_a_table_that_fits_stays_a_table() -> None:
    screen = Screen(file=io.StringIO(), width=80)
    screen.print(results())
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "┏" in shown
    assert "initial:" not in shown
