from __future__ import annotations

import pytest

from covey.cli.runs import fitting_table, table_width

ROWS = [
    {"run": "runs/arithmetic-grpo-1", "steps": 4, "reward": 0.1772, "greedy_before": 0.219,
     "greedy_now": 0.219, "checkpoint": 4},
    {"run": "runs/warm", "steps": 3, "reward": None, "greedy_before": 0.25, "greedy_now": 0.25,
     "checkpoint": None},
]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (200, ["run", "steps", "reward", "greedy before", "greedy now", "checkpoint"]),
        (80, ["run", "steps", "reward", "greedy before", "greedy now"]),
        (56, ["run", "steps", "reward", "greedy now"]),
        (50, ["run", "steps", "greedy now"]),
        (40, ["run", "greedy now"]),
        (30, ["run"]),
        (10, ["run"]),  # here a name is folded
    ],
)
def test_a_narrow_terminal_has_fewer_columns_and_names_in_full(
    width: int, columns: list[str]
) -> None:
    table = fitting_table(ROWS, width)
    assert [column.header for column in table.columns] == columns
    assert table_width(table) <= max(width, 26)
