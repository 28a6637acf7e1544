"""The program computes what it computed when the fixture was recorded; see record.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.regression import record
from tests.regression.cases import CASES, QUICK, ROUNDING_DECIDES

CHOSEN = list(CASES) if os.environ.get("ALL_NUMBERS") else list(QUICK)


@pytest.mark.parametrize("name", CHOSEN)
def test_numbers_are_those_that_were_recorded(name: str) -> None:
    assert record.check(name, record.load()) == []


@pytest.mark.parametrize("file", sorted(record.FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_every_case_is_recorded(file: Path) -> None:
    fixture = json.loads(file.read_text(encoding="utf-8"))
    assert set(fixture["cases"]) == set(CASES)
    assert fixture["environment"]["processor"].replace(" ", "-") == file.stem


def test_machines_that_recorded_agree_where_rounding_decides_nothing() -> None:
    first, second = (
        json.loads(file.read_text(encoding="utf-8"))["cases"]
        for file in sorted(record.FOLDER.glob("*.json"))
    )
    differ = {
        name
        for name in CASES
        for key, values in first[name].items()
        if not isinstance(values, str)
        and record.differences({key: values}, {key: second[name][key]}, exact=False)
    }
    assert differ == set(ROUNDING_DECIDES)


def test_a_difference_is_named_and_what_is_new_is_not() -> None:
    then = {"optim/grad_norm": [1.0, 2.0], "lr": record.digest([0.1]), "gone": [1]}
    now = {"optim/grad_norm": [1.0, 2.0000000000000004], "lr": [0.1], "new": [3]}
    assert record.differences(then, now, exact=True) == [
        "optim/grad_norm differs from value 2 on: it was 2.0 and is now 2.0000000000000004",
        "gone is missing",
    ]
    assert record.differences(then, now, exact=False) == ["gone is missing"]
