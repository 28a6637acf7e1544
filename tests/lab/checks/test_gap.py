from __future__ import annotations

import math

import pytest
import torch

from covey.lab.checks.numerics import CAUSES, Cause, ClipRange, Gap, gap_of
from covey.objective import ratio

TOKENS = ClipRange(low=0.8, high=1.2)


def test_the_numbers_of_a_difference_by_hand() -> None:
    # Ratios 2, 1, 1/2, 1: their sum is 4.5, that of their squares 6.25.
    difference = torch.tensor([[math.log(2), 0.0], [-math.log(2), 0.0], [torch.nan, 9.0]])
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    gap = gap_of(difference, mask, TOKENS)
    assert gap.tokens == 4
    assert gap.mean == pytest.approx(math.log(2) / 2, rel=1e-6)
    assert gap.p99 == gap.max == pytest.approx(math.log(2), rel=1e-6)
    assert gap.ratio_mean == pytest.approx(4.5 / 4, rel=1e-6)
    assert gap.outside == 0.5
    assert gap.effective == pytest.approx(4.5**2 / (4 * 6.25), rel=1e-6)


@pytest.mark.parametrize(("kind", "first"), [(ratio.sequence, 0.1), (ratio.product, 0.2)])
def test_sequence_level_ratios_are_counted_per_completion(kind: ratio.Ratio, first: float) -> None:
    difference = torch.tensor([[0.4, -0.2], [0.3, 7.0], [0.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    gap = gap_of(difference, mask, ClipRange(low=0.8, high=1.2, ratio=kind))
    ratios = [math.exp(first), math.exp(0.3)]
    assert gap.ratio_mean == pytest.approx(sum(ratios) / 2, rel=1e-6)
    assert gap.outside == sum(r > 1.2 for r in ratios) / 2
    assert gap.max == pytest.approx(0.4)  # of tokens still
    assert gap.tokens == 3


@pytest.mark.parametrize(("count", "place"), [(1, 1), (99, 99), (100, 99), (200, 198), (201, 199)])
def test_ninety_nine_of_a_hundred_are_at_most_p99(count: int, place: int) -> None:
    sizes = torch.arange(1, count + 1)[torch.randperm(count)]
    difference = (sizes * (-1) ** sizes)[None].float()
    assert gap_of(difference, torch.ones(1, count, dtype=torch.bool), TOKENS).p99 == place


def test_without_tokens_there_is_no_difference() -> None:
    gap = gap_of(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), TOKENS)
    assert (gap.tokens, gap.max, gap.ratio_mean, gap.severity) == (0, 0.0, 1.0, "harmless")


@pytest.mark.parametrize(
    ("effective", "outside", "mean", "severity"),
    [
        (1.0, 0.0, 1.0, "harmless"),
        (0.999, 0.0, 0.9991, "harmless"),
        (0.998, 0.0, 1.0, "small"),
        (1.0, 0.001, 1.0, "small"),
        (1.0, 0.0, 0.98, "small"),  # a bias: no ratio above 1 makes up for it
        (0.94, 0.0, 1.0, "matters"),
        (1.0, 0.02, 1.0, "matters"),
        (1.0, 0.0, 1.06, "matters"),
    ],
)
def test_severity_depends_on_the_ratios(
    effective: float, outside: float, mean: float, severity: str
) -> None:
    gap = Gap(
        tokens=9, mean=0.0, p99=0.0, max=9.0,
        ratio_mean=mean, outside=outside, effective=effective,
    )  # fmt: skip
    assert gap.severity == severity


def test_the_row_of_a_cause() -> None:
    gap = gap_of(torch.tensor([[0.1]]), torch.tensor([[True]]), TOKENS)
    for name, words in CAUSES.items():
        row = Cause(name=name, gap=gap, updates=2).row()
        assert row["title"].startswith(words.title)
        assert row["mean"] == gap.mean
        assert row["what"]
        assert row["advice"]
        assert not row["what"].endswith(".")
    assert Cause(name="staleness", gap=gap, updates=1).title == "staleness, 1 optimizer step"
    assert Cause(name="staleness", gap=gap, updates=2).title == "staleness, 2 optimizer steps"
