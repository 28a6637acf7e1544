"""The quick version of benchmarks/comparison_statistics.py, with its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_equal_means_are_called_different_in_at_most_6_percent_for_every_shape() -> None:
    from comparison_statistics import SEEDS, SHAPES, false_positives

    rows = list(false_positives(4000))
    assert len(rows) == len(SHAPES) * len(SEEDS)
    assert [row for row in rows if row["false_positives"] > 0.06] == []
    # The shapes are what they should be: Student's t alone fails.
    assert max(row["student"] for row in rows) > 0.25


def test_intervals_of_several_pairs_are_simultaneous_and_agree_with_the_decisions() -> None:
    from comparison_statistics import several_pairs

    for row in several_pairs(2000):
        assert row["disagreements"] == 0
        assert row["any_interval_excludes_0"] == row["any_decision"] <= 0.06, row


def test_large_differences_are_found_and_intervals_contain_the_truth() -> None:
    from comparison_statistics import powers

    rows = {
        (row["accuracy"], row["deviation"], row["difference"], row["seeds"]): row
        for row in powers(500)
    }
    assert min(row["coverage"] for row in rows.values()) >= 0.93
    assert rows[0.3, 0.07, 0.3, 8]["power"] > 0.75
    assert rows[0.3, 0.07, 0.2, 20]["power"] > 0.75
    assert rows[0.3, 0.07, 0.5, 5]["power"] > 0.75
    assert rows[0.3, 0.02, 0.1, 12]["power"] < 0.05


def test_the_stated_power_holds_in_nine_of_ten_reports() -> None:
    from comparison_statistics import stated_power

    for row in stated_power(100):
        assert row["mean_power"] >= 0.8, row
        assert row["at_least_80"] >= 0.84, row


def test_intervals_of_evaluations_cover_near_floor_and_ceiling_too() -> None:
    from comparison_statistics import coverages

    rows = list(coverages(400, sizes=(16, 64)))
    assert [row for row in rows if row["coverage"] < 0.93] == []
    # Not by being useless: they are at most half as wide again as the normal approximation.
    widths = {(row["metric"], row["prompts"]): row["width"] for row in rows}
    assert widths["greedy, middle", 64] < 1.1 * 2 * 1.96 * (0.25 / 64) ** 0.5
    assert widths["pass@4, easy", 64] < 0.08
