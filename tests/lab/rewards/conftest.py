"""Shared pieces of the reward lab's tests."""

from __future__ import annotations

import pytest

from covey.lab.rewards.hacks import HACKS


@pytest.fixture
def without_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the longest hacks for rewards that another test tries them on."""
    short = tuple(hack for hack in HACKS if not hack.name.startswith("100,000"))
    monkeypatch.setattr("covey.lab.rewards.checks.HACKS", short)
