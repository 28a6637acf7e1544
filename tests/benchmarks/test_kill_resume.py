"""A run with rollouts in flight that is killed and resumed, as benchmarks/kill_resume.py does it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.processes import FORKS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_run_that_is_killed_twice_ends_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kill_resume

    words = ["--moments", "2", "--steps", "8", "--mode", "ahead", "--engine", "native"]
    monkeypatch.setattr(sys, "argv", ["kill_resume.py", *words])
    monkeypatch.setattr(kill_resume, "subprocess", FORKS)
    assert kill_resume.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["steps_at_kills"]) == 2
    assert result["steps_at_kills"][0] < 8
    assert set(result["same"].values()) == {True}
