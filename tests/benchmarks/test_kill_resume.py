"""A run with rollouts in flight that is killed and resumed, as benchmarks/kill_resume.py does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


@pytest.mark.slow
def test_a_run_that_is_killed_twice_ends_with_the_same_bits() -> None:
    words = ["--moments", "2", "--steps", "8", "--mode", "ahead", "--engine", "native"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["steps_at_kills"]) == 2
    assert result["steps_at_kills"][0] < 8
    assert set(result["same"].values()) == {True}
