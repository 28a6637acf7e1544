"""Train the embedded model with every algorithm's defaults and record accuracy before and after.

    python benchmarks/every_algorithm.py --steps 30 --jobs 2

Not a comparison: one seed, few steps, and one learning rate for all. It shows that every algorithm
trains with finite numbers, and whether accuracy rises. A distillation learns from the model that
the first algorithm, GRPO, ends with. Algorithms named after the options are run alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from described import described
from own_process import flags

from covey.objective import ALGORITHMS
from covey.records.folder import RunFolder

RESULT = Path(__file__).parent / "results" / "every_algorithm.json"
CURVES = ("objective/verifiable_correct_rate", "policy/entropy_avg")
"""Metrics that the pages of the algorithms show; `make docs` draws them."""
TEACHER = "grpo"
TAUGHT = ("opd",)


def train(
    name: str, folder: Path, steps: int, seed: int, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Train with one algorithm in a separate process; `more` are further settings."""
    settings = {"objective.name": name, "train.steps": steps, "evaluate.every": steps}
    settings |= {"seed": seed, "save.every": 0}
    command = [sys.executable, "-m", "covey", "train", "arithmetic", "--run", str(folder / name)]
    command += flags(settings) + flags(more)
    if name in TAUGHT:
        _, teacher = RunFolder.open(folder / TEACHER).checkpoints()[-1]
        command += flags({"teacher.path": teacher})
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    run = RunFolder.open(folder / name)
    first, last = run.evaluations()[0], run.evaluations()[-1]
    # All entries but the reward's id are numbers; None stands for a number that was not finite.
    numbers = [v for row in run.steps() for name, v in row.items() if name != "reward_id"]
    result = {
        "algorithm": name,
        "before": first["greedy"]["value"],
        "after": last["greedy"]["value"],
        "low": last["greedy"]["low"],
        "high": last["greedy"]["high"],
        "finite": all(v is not None and math.isfinite(v) for v in numbers),
        "skipped_updates": sum(row["optim/skipped"] for row in run.steps()),
        "seconds": round(time.perf_counter() - started, 1),
        "curves": {
            curve: [float(f"{row[curve]:.4g}") for row in run.steps()]
            for curve in CURVES
            if all(curve in row for row in run.steps())
        },
    }
    shown = f"{name:22} {result['before']:6.1%} -> {result['after']:6.1%}"
    print(f"{shown}  finite {result['finite']}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time.")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--set", action="append", default=[], help="Another setting for all.")
    parser.add_argument("names", nargs="*", help="Algorithms; all unless given.")
    arguments = parser.parse_args()
    names = arguments.names or list(ALGORITHMS)
    if set(names) & set(TAUGHT):
        names = [TEACHER, *(name for name in names if name != TEACHER)]
    untaught, taught = ([n for n in names if (n in TAUGHT) is t] for t in (False, True))
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        one = partial(
            train, folder=Path(folder), steps=arguments.steps, seed=arguments.seed,
            more=arguments.set,
        )  # fmt: skip
        results = [*pool.map(one, untaught), *pool.map(one, taught)]
    report = {
        "steps": arguments.steps,
        "environment": described(arguments.seed, "cpu", threads),
        "results": results,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
