"""The program computes what it computed when the fixture was recorded; see record.py."""

from __future__ import annotations

import os

import pytest

from tests.regression import record
from tests.regression.cases import CASES, QUICK

CHOSEN = list(CASES) if os.environ.get("ALL_NUMBERS") else list(QUICK)


@pytest.mark.parametrize("name", CHOSEN)
def test_numbers_are_those_that_were_recorded(name: str) -> None:
    assert record.check(name, record.load()) == []


def test_every_case_is_recorded() -> None:
    assert set(record.load()["cases"]) == set(CASES)


def test_a_difference_is_named_and_what_is_new_is_not() -> None:
    then = {"optim/grad_norm": [1.0, 2.0], "lr": record.digest([0.1]), "gone": [1]}
    now = {"optim/grad_norm": [1.0, 2.0000000000000004], "lr": [0.1], "new": [3]}
    assert record.differences(then, now, exact=True) == [
        "optim/grad_norm differs from value 2 on: it was 2.0 and is now 2.0000000000000004",
        "gone is missing",
    ]
    assert record.differences(then, now, exact=False) == ["gone is missing"]
