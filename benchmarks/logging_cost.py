"""Share of a training step that logging costs: metrics of answers, health, run folder, trackers.

    python benchmarks/logging_cost.py [--steps 20]     about a minute on a CPU

The embedded model trains with every tracker that is installed. The time in each of them, in the
statistics of answers and in the health checks is measured and divided by the time of the steps,
on the clock and in CPU time. Only the latter means something while other programs run.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from described import described

import covey
from covey.records import trackers
from covey.records.health import Health
from covey.records.trackers.external import ExternalTracker
from covey.records.trackers.registry import TRACKERS
from covey.rollout import metrics as rollout_metrics

RESULT = Path(__file__).parent / "results/logging_cost.json"
spent: defaultdict[str, float] = defaultdict(float)
used: defaultdict[str, float] = defaultdict(float)
"""Seconds of each part: on the clock, and of the CPU in the training thread."""


def timed(owner: Any, name: str, label: str) -> None:
    """Replace a function by one that adds up its time."""
    function: Callable[..., Any] = getattr(owner, name)

    def measured(*arguments: Any, **named: Any) -> Any:
        began, before = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            spent[label] += time.perf_counter() - began
            used[label] += time.thread_time() - before

    setattr(owner, name, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    steps = given.steps
    os.environ.setdefault("WANDB_MODE", "offline")
    installed = [name for name in TRACKERS if find_spec(name) is not None]
    timed(rollout_metrics, "answer_metrics", "answers")
    timed(Health, "add", "health")
    timed(trackers.JsonlTracker, "step", "steps.jsonl")
    timed(trackers.JsonlTracker, "table", "rollouts")
    timed(ExternalTracker, "step", "trackers")
    timed(ExternalTracker, "table", "trackers")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TRACKIO_DIR", folder)
        settings = {"train.steps": steps + 2, "evaluate.every": 0, "save.every": 0}
        cpu = {}

        def warm(metrics: Mapping[str, Any]) -> None:
            # The first two steps import what trackers and tables need; they are left out.
            cpu[metrics["step"]] = time.process_time()
            if metrics["step"] == 2:
                spent.clear()
                used.clear()

        run = covey.train(
            "arithmetic", run=Path(folder) / "run", trackers=installed, callbacks=[warm],
            quiet=True, **settings,
        )  # fmt: skip
    total = sum(row["time/total"] for row in run.metrics[2:])
    result = {
        **described(0, "cpu", 1),
        "trackers": installed,
        "steps": steps,
        "seconds_per_step": total / steps,
        "milliseconds_per_step": {name: 1000 * s / steps for name, s in sorted(spent.items())},
        "share_of_step": sum(spent.values()) / total,
        "cpu_seconds_per_step": (cpu[steps + 2] - cpu[2]) / steps,
        "cpu_milliseconds_per_step": {name: 1000 * s / steps for name, s in sorted(used.items())},
        "cpu_share_of_step": sum(used.values()) / (cpu[steps + 2] - cpu[2]),
        "load": os.getloadavg()[0],
    }
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
