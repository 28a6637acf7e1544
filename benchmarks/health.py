"""Do health checks stay silent on healthy runs, and name what fails in others?

    python benchmarks/health.py --jobs 2    # six runs with a fault built in, then 20 healthy ones
    python benchmarks/health.py failing     # only those six

The thresholds of the health checks were chosen on "hackable reward"; the other two hackable rewards
were written afterwards, and no threshold was changed for them.

A run takes half a minute on one idle core.

Every run trains the embedded model on a CPU. The script reads `covey runs check`'s findings, and
its exit code is 1 if a healthy run has a problem or a failing run shows another problem first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from described import described

import covey
from covey.records.folder import RunFolder, settings_of
from covey.records.health import timeline
from covey.rewards import Score
from covey.types import Prompt

RESULT = Path(__file__).parent / "results/health.json"
Case = tuple[str, tuple[str, ...], dict[str, Any], "Reward | None"]
"""Name, expected findings (none for a healthy run), settings, reward."""
HEALTHY: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {"filter.dynamic_sampling": True},
    "rloo": {},
    "gspo": {"objective.clip_low": 0.03, "objective.clip_high": 0.04},
}


def is_correct(prompt: Prompt, text: str) -> bool:
    return f"<answer>{prompt.target}</answer>" in text


class Reward:
    """A reward that runs in the training process."""

    bounds = (-10.0, 10.0)
    quick = True
    version = 1


class Hackable(Reward):
    """Correct answers, and a bonus for digits: writing digits pays more than calculating."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        parts = {
            "correct": float(is_correct(prompt, text)),
            "digits": 0.2 * sum(c.isdigit() for c in text),
        }
        return Score(reward=sum(parts.values()), success=bool(parts["correct"]), parts=parts)


class Hurried(Reward):
    """Correct answers, and a bonus for few characters: stopping at once pays more than working."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        parts = {"correct": float(is_correct(prompt, text)), "short": 2.0 - 0.1 * len(text)}
        return Score(reward=sum(parts.values()), success=bool(parts["correct"]), parts=parts)


class Tagged(Reward):
    """Correct answers, and a bonus for every answer tag, right or wrong."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        answers = text.split("<answer>")[1:]
        correct = len(answers) == 1 and is_correct(prompt, text)
        parts = {"correct": float(correct), "tags": 0.5 * len(answers)}
        return Score(reward=sum(parts.values()), success=correct, parts=parts)


class Impossible(Reward):
    """Targets that no completion can contain."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        return Score(reward=0.0, success=False, parts={"correct": 0.0})


class Drifting(Reward):
    """A proxy that is near the goal at first and far from it later: long completions look good."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        return Score(reward=len(text) / 50, success=is_correct(prompt, text), parts={})


FAILING: dict[str, tuple[tuple[str, ...], dict[str, Any], Reward | None]] = {
    "learning rate 10x": (
        ("large_updates", "clip_fraction", "ratio_drift", "reward_falls", "nan"),
        {"optimizer.learning_rate": 1e-3},
        None,
    ),
    "hackable reward": (("parts_against",), {}, Hackable()),
    "hackable by haste": (("parts_against",), {"seed": 7}, Hurried()),
    # The policy did not learn this hack in 60 steps, but the task: nothing may be found.
    "hackable by tags": ((), {"seed": 11}, Tagged()),
    "impossible task": (("reward_flat", "no_signal"), {}, Impossible()),
    "no reference, drifting reward": (("parts_against", "length_explosion"), {}, Drifting()),
}


def findings(name: str, settings: dict[str, Any], reward: Reward | None, folder: Path) -> list[Any]:
    """Train once; return the problems in the order in which they were found."""
    run = folder / name.replace(" ", "-").replace(",", "")
    fixed = {"evaluate.every": 0, "save.every": 0}
    covey.train("arithmetic", rewards=reward, run=run, quiet=True, **{**fixed, **settings})
    written = RunFolder(run)
    return [each for each in timeline(written.steps(), settings_of(written)) if each.problem]


def judged(case: Case, folder: Path) -> dict[str, Any]:
    """Train, print and return what was found, and whether it is right."""
    name, expected, settings, reward = case
    torch.set_num_threads(1)
    found = findings(name, settings, reward, folder)
    lines = [each.line() for each in found]
    right = bool(found) and found[0].name in expected if expected else not found
    print(f"{'ok   ' if right else 'WRONG'} {name}: {lines[:2]}", flush=True)
    return {"run": name, "expected": list(expected), "found": lines, "right": right}


def cases(only: str | None, steps: int) -> list[Case]:
    """Runs that fail first, because they are few."""
    failing: list[Case] = [
        (name, expected, {"train.steps": steps, **settings}, reward)
        for name, (expected, settings, reward) in FAILING.items()
    ]
    healthy: list[Case] = [
        (
            f"{algorithm} seed {seed}", (),
            {"objective.name": algorithm, "seed": seed, "train.steps": steps, **more}, None,
        )
        for algorithm, more in HEALTHY.items()
        for seed in range(4)
    ]  # fmt: skip
    return {"failing": failing, "healthy": healthy}.get(only or "", failing + healthy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", choices=["healthy", "failing"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1, help="Runs at a time.")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the rows are added")
    given = parser.parse_args()
    chosen = cases(given.only, given.steps)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool,
    ):
        known = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
        rows = {row["run"]: row for row in known}
        for row in pool.map(partial(judged, folder=Path(folder)), chosen):
            rows[row["run"]] = {**row, "steps": given.steps}
            kept = [rows[case[0]] for case in cases(None, 0) if case[0] in rows]
            result = {"environment": described(0, "cpu", 1), "rows": kept}
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(rows[case[0]]["right"] for case in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
