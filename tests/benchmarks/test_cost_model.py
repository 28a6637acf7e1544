"""The cost model beside everything that was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts import each other

from cluster_model import (
    COUNTS,
    PUBLISHED,
    Workload,
    engine_split,
    fewest_trainers,
    splits,
)
from cost_model import PAGE, TOLERANCE, Case, cases, page_with

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=[f"{case.name}, {case.where}" for case in CASES])
def test_every_measured_case_is_within_a_fifth(case: Case) -> None:
    assert abs(case.off) <= TOLERANCE


def test_all_measured_cases_are_there() -> None:
    assert len(CASES) >= 50
    kinds = {case.name.partition(",")[0] for case in CASES}
    assert {"decode step", "call", "update", "step"} <= kinds


def test_the_page_has_the_tables_of_the_model() -> None:
    text = PAGE.read_text()
    assert page_with(text, CASES) == text, "python benchmarks/cost_model.py --write"


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_best_split_of_a_cluster(size: str) -> None:
    model = PUBLISHED[size]
    load = Workload(rows=1024, group=16, prompt=256, completion=2048)
    before = float("inf")
    for gpus in COUNTS:
        found = splits(model, load, gpus)
        if not found:
            assert gpus < fewest_trainers(model) + engine_split(model)
            continue
        best = found[0]
        assert best.shared or best.trainers + best.engines * best.engine_gpus <= gpus
        assert best.trainers >= fewest_trainers(model)
        assert best.seconds <= before, "more GPUs are never slower"
        assert best.seconds <= min(split.seconds for split in found)
        before = best.seconds


def test_overlap_is_worth_at_most_a_factor_of_two() -> None:
    load = Workload(rows=1024, group=16, prompt=256, completion=2048)
    for model in PUBLISHED.values():
        in_turn, beside = (splits(model, load, 64, staleness=k)[0].seconds for k in (0, 1))
        assert 1.0 <= in_turn / beside <= 2.0
