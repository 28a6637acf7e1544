"""COVEY_EXAMPLES=10000 tries as many completions; the usual run tries fewer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.errors import ConfigError
from covey.rewards.registry import REWARDS
from covey.sandbox import require_isolation

pytest.importorskip("reasoning_gym")
try:
    require_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

COUNT = os.environ.get("COVEY_EXAMPLES", "120")
SCRIPT = Path(__file__).with_name("model_text.py")


def test_nothing_of_a_completion_runs_in_the_process_that_scores_it() -> None:
    # An audit hook cannot be removed, so it runs in a process of its own.
    done = subprocess.run(
        [sys.executable, str(SCRIPT), COUNT],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = {row["reward"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == REWARDS.keys() - {"judge", "environment", "sum"}
    for row in found.values():
        assert row["outside"] == {}, row
        assert (row["files"], row["unscored"]) == (0, 0), row
