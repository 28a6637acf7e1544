"""False-positive rate of comparisons: grpo against itself, and against a frozen policy.

    python benchmarks/aa_study.py --repetitions 20 --jobs 2

Each repetition compares two arms of the same algorithm with different seeds (A/A). A difference
found there is a false positive, and a test at 5 % should report one in twenty. Each repetition also
compares the first arm with one whose learning rate is 0; that difference must be found. Decisions
are those of `covey compare`, on real training runs of the embedded model. Finished runs are kept in
a file, so the same command resumes an interrupted study.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from described import described
from scipy import stats

import covey
from covey.lab.compare.comparison import Arm, Comparison, Point, RunResult
from covey.lab.compare.conclusion import PairResult, conclude
from covey.lab.compare.statistics import LEVEL, power
from covey.records.files import append_line
from covey.records.records import read_lines
from covey.records.trackers import Tracker

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation

RESULT = Path(__file__).parent / "results" / "aa_study.json"
SETTINGS: Mapping[str, Any] = {
    "task.min_operations": 1,
    "task.max_operations": 1,
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 8,
    "rollout.max_tokens": 32,
    "train.steps": 25,
    "train.mini_batches": 4,
    "evaluate.every": 25,
    "evaluate.prompts": 128,
    "save.every": 0,
    "save.rollouts": False,
    "save.samples_every": 0,
}
ARMS: Mapping[str, dict[str, Any]] = {
    "grpo": {},
    "again": {},
    "frozen": {"optimizer.learning_rate": 0.0},
}
AGAIN = 1_000_000
"""Offset of the second arm's seeds; a pair is named by the first arm's seed."""


class Watch(Tracker):
    """A tracker that keeps evaluations, tokens and seconds."""

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []
        self.tokens = 0
        self.updates = 0
        self.seconds = 0.0

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        self.rollouts = rollouts

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.tokens += round(metrics["val/sequence_lengths"] * self.rollouts)
        self.updates += SETTINGS["train.mini_batches"]
        self.seconds += metrics["time/total"]

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        correct = {item.prompt.id: bool(item.greedy.success) for item in evaluation.items}
        place = {
            "step": step,
            "tokens": self.tokens,
            "updates": self.updates,
            "seconds": self.seconds,
        }
        self.points.append({**place, "correct": correct})


def train_one(arm: str, seed: int) -> dict[str, Any]:
    """Train one run in this process; return it as a line of the file."""
    torch.set_num_threads(1)
    started = time.process_time()
    settings = {**SETTINGS, **ARMS[arm], "seed": seed + (AGAIN if arm == "again" else 0)}
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        covey.train("arithmetic", run=run, trackers=[watch], quiet=True, **settings)
    seconds = time.process_time() - started
    return {"arm": arm, "seed": seed, "cpu_seconds": seconds, "points": watch.points}


def kept_runs(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Read the runs of earlier calls. Those with other settings do not count."""
    rows = read_lines(file)
    return {(r["arm"], r["seed"]): r for r in rows if r["settings"] == SETTINGS}


def train_missing(wanted: Iterable[tuple[str, int]], file: Path, jobs: int) -> None:
    """Train what the file does not have yet."""
    there = kept_runs(file)
    missing = [run for run in wanted if run not in there]
    file.parent.mkdir(parents=True, exist_ok=True)
    # A fork of a process that has used torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(train_one, *run) for run in missing]
        for count, future in enumerate(as_completed(futures), start=1):
            row = future.result()
            append_line(file, {**row, "settings": SETTINGS})
            end = sum(row["points"][-1]["correct"].values()) / SETTINGS["evaluate.prompts"]
            print(f"{count}/{len(missing)} {row['arm']} seed {row['seed']}: {end:.1%}", flush=True)


def outcome(row: Mapping[str, Any]) -> RunResult:
    """Convert a kept run to a RunResult."""
    points = tuple(Point(**point) for point in row["points"])
    return RunResult(arm=row["arm"], seed=row["seed"], state="done", points=points)


def compare(
    runs: Mapping[tuple[str, int], Mapping[str, Any]], names: tuple[str, str], seeds: list[int]
) -> PairResult:
    """Compare two arms as `covey compare` does."""
    comparison = Comparison(
        name="aa-study",
        command=" ".join(sys.argv),
        arms=tuple(Arm(name=name, differences=ARMS[name]) for name in names),
        seeds=tuple(seeds),
        budget="steps",
        amount=SETTINGS["train.steps"],
        runs=tuple(outcome(runs[name, seed]) for name in names for seed in seeds),
    )
    return conclude(comparison).pairs[0]


def summary(pairs: list[PairResult]) -> dict[str, Any]:
    """Count decisions, and give the interval that chance allows."""
    found = sum(pair.decision == "better" for pair in pairs)
    interval = stats.binomtest(found, len(pairs)).proportion_ci(method="wilson")
    differences = np.array([value for pair in pairs for value in pair.differences])
    deviation = float(differences.std(ddof=1))
    return {
        "repetitions": len(pairs),
        "mean_difference": float(differences.mean()),
        "deviation_between_seeds": deviation,
        # What the power computation of a comparison makes of all seeds together.
        "power": power(float(differences.mean()) / deviation, len(pairs[0].seeds)),
        "found": found,
        "rate": found / len(pairs),
        "rate_interval": [interval.low, interval.high],
        "checkpoints_compared": sum(len(pair.checkpoints) for pair in pairs),
        # What would be called a difference by a test over problems, one seed at a time.
        "checkpoints_below_5_percent": sum(
            one.p_value < LEVEL for pair in pairs for one in pair.checkpoints
        ),
        "pairs": [
            {
                "seeds": pair.seeds,
                "differences": pair.differences,
                "p_value": pair.p_value,
                "decision": pair.decision,
                "better": pair.better,
                "summary": pair.summary,
            }
            for pair in pairs
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=6, help="Seeds an arm.")
    parser.add_argument("--jobs", type=int, default=2, help="Runs at a time, one thread each.")
    parser.add_argument("--runs", type=Path, default=Path("runs/aa_study.jsonl"))
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    groups = [
        list(range(first, first + arguments.seeds))
        for first in range(0, arguments.repetitions * arguments.seeds, arguments.seeds)
    ]
    wanted = [(arm, seed) for seeds in groups for arm in ("grpo", "again") for seed in seeds]
    wanted += [("frozen", seed) for seeds in groups for seed in seeds]
    train_missing(wanted, arguments.runs, arguments.jobs)
    runs = kept_runs(arguments.runs)
    same = summary([compare(runs, ("grpo", "again"), seeds) for seeds in groups])
    known = summary([compare(runs, ("grpo", "frozen"), seeds) for seeds in groups])
    allowed = stats.binom.ppf([0.025, 0.975], arguments.repetitions, LEVEL).astype(int).tolist()
    report = {
        "seeds_an_arm": arguments.seeds,
        "level": LEVEL,
        "settings": SETTINGS,
        "false_alarms_expected": allowed,
        "same_algorithm": same,
        "learning_rate_0": known,
        "cpu_seconds": round(sum(runs[run]["cpu_seconds"] for run in wanted)),
        "environment": described(0, "cpu", 1),
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        f"grpo against itself: {same['found']} alarms in {same['repetitions']} "
        f"(expected {allowed[0]} to {allowed[1]}); learning rate 0: found {known['found']} times "
        f"in {known['repetitions']}"
    )


if __name__ == "__main__":
    main()
