"""Is a policy that ignores its prompts found: a constant answer, and a shortcut with few answers?

    python benchmarks/collapse.py                       # embedded model, a minute of CPU time each
    python benchmarks/collapse.py --model smollm2 --jobs 2       # letter_counting and gcd, on a GPU
    python benchmarks/collapse.py --export prompts      # writes their prompts, with reasoning-gym
    python benchmarks/collapse.py --model smollm2 --prompts prompts    # where it is not installed

In each task the targets make a policy that hardly reads its prompts look like one that learns. The
exit code is 1 if the check of a task stays silent, or speaks more than ten steps after the event.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from described import described
from learn import SPLITS, export

import covey
from covey.config.resolve import resolve, task_of
from covey.records.folder import RunFolder, settings_of
from covey.records.health import Health, timeline
from covey.records.health_checks import BLOCK

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LATEST = 10
"""Steps within which a check must speak."""
ANSWERS = range(50, 60)
"""Final answers of the embedded model's tasks: what it would answer at first, more or less."""
CONSTANT, PLUS, MINUS = 52, 52, 57
TRAIN_SIZE = 20_000
"""Training prompts of reasoning-gym's tasks; 50 steps use 12,800 of them."""
Rows = list[dict[str, str]]
Target = Callable[[random.Random, str], int]
"""Draws the answer of a problem, from its signs."""


def sums(target: Target, count: int, seed: int) -> Rows:
    """Problems of two operations with a result in `ANSWERS`; `target` draws another answer."""
    draw = random.Random(seed)
    rows: Rows = []
    while len(rows) < count:
        first, a, b = draw.randrange(40, 70), draw.randrange(3, 10), draw.randrange(3, 10)
        signs = draw.choice(("+-", "-+"))
        result = first + (a - b if signs == "+-" else b - a)
        if result in ANSWERS:
            question = f"{first:02d}{signs[0]}{a}{signs[1]}{b}?"
            rows.append({"question": question, "answer": f"{target(draw, signs):02d}"})
    return rows


def constant(draw: random.Random, signs: str) -> int:
    """One answer is right for 35 % of the prompts; nothing in a prompt tells which."""
    return CONSTANT if draw.random() < 0.35 else draw.choice(ANSWERS)


def shortcut(draw: random.Random, signs: str) -> int:
    """The last operator tells the right answer of most prompts; the numbers tell nothing."""
    frequent = PLUS if signs[1] == "+" else MINUS
    return frequent if draw.random() < 0.6 else draw.choice(ANSWERS)


EMBEDDED: dict[str, tuple[str, Target, dict[str, Any]]] = {
    "constant": ("collapse", constant, {"train.steps": 60}),
    "shortcut": (
        "few_answers",
        shortcut,
        {"train.steps": 100, "rollout.prompts_per_step": 32, "rollout.group_size": 4},
    ),
}
EXPECTED = {"letter_counting": "collapse", "gcd": "few_answers"}


def embedded(name: str, folder: Path) -> RunFolder:
    _, target, settings = EMBEDDED[name]
    covey.train(
        "arithmetic", dataset=sums(target, 20_000, 0), held_out=sums(target, 256, 1),
        run=folder / name, quiet=True,
        **{
            "evaluate.every": settings["train.steps"], "save.every": 0,
            "optimizer.learning_rate": 2e-4, **settings,
        },
    )  # fmt: skip
    return RunFolder(folder / name)


def on_gpu(name: str, folder: Path, given: argparse.Namespace) -> RunFolder:
    """Train with the settings of chain_sum.toml on another task of reasoning-gym."""
    settings = smollm2_settings(name)
    if given.prompts is not None:
        files = {f"{s}_file": str(given.prompts / f"{name}-{s}.jsonl") for s in SPLITS}
        settings["task"] = {"name": "jsonl", **files}
    settings["train"]["steps"] = given.steps
    # chain_sum's learning rate falls over 330 steps, and so hardly at all over the first 50.
    settings["optimizer"]["schedule"] = "constant"
    covey.train(settings, model=given.model, run=folder / name, quiet=True)
    return RunFolder(folder / name)


def smollm2_settings(name: str) -> dict[str, Any]:
    settings = tomllib.loads((HERE / "chain_sum.toml").read_text())
    settings["task"] = {**settings["task"], "name": f"reasoning_gym:{name}", "options": {}}
    settings["task"]["train_size"] = TRAIN_SIZE
    return settings


def happened(check: str, rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first of five steps whose mean shows the event, None if there is none.

    A collapse: 90 % of the answers are the same. A shortcut: half the variety of the targets.
    """

    def mean(name: str, first: int) -> float:
        return fmean(row[f"rollout/{name}"] for row in rows[first : first + BLOCK])

    for first in range(len(rows) - BLOCK + 1):
        same = mean("top_answer_share", first) >= 0.9
        few = 2 * mean("effective_answers", first) <= mean("effective_targets", first)
        if same if check == "collapse" else few:
            return int(rows[first]["step"])
    return None


def spoken(check: str, run: RunFolder) -> int | None:
    """Return the step at which a check first spoke, as it does while the run trains."""
    health = Health(settings_of(run))
    for row in run.steps():
        health.add(row)
        if check in health.active:
            return int(row["step"])
    return None


def judged(name: str, check: str, run: RunFolder) -> dict[str, Any]:
    rows = run.steps()
    event, found = happened(check, rows), spoken(check, run)
    right = event is not None and found is not None and found <= event + LATEST
    kept = (
        "objective/verifiable_correct_rate", "rollout/best_constant", "rollout/top_answer_share",
        "rollout/distinct_answers", "rollout/effective_answers", "rollout/effective_targets",
    )  # fmt: skip
    print(f"{'ok   ' if right else 'WRONG'} {name}: {check} happened {event}, found {found}")
    curves = {each: [row[each] for row in rows] for each in kept}
    line = next((f.line() for f in timeline(rows, settings_of(run)) if f.name == check), "")
    evaluations = [
        {each: row.get(each) for each in ("step", "greedy", "best_constant", "distinct_answers")}
        for row in run.evaluations()
    ]
    return {
        "task": name, "check": check, "happened": event, "found": found, "right": right,
        "line": line, "curves": curves, "evaluations": evaluations,
    }  # fmt: skip


def result_of(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train on a task, and return when its check spoke."""
    if given.model == "embedded":
        torch.set_num_threads(1)
        return judged(name, EMBEDDED[name][0], embedded(name, folder))
    return judged(name, EXPECTED[name], on_gpu(name, folder, given))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", help="Only these tasks.")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--steps", type=int, default=50, help="Steps with another model.")
    parser.add_argument("--jobs", type=int, default=1, help="Tasks at a time.")
    parser.add_argument("--prompts", type=Path, help="Folder that --export wrote.")
    parser.add_argument("--export", type=Path, help="Write the prompts there, and stop.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.export is not None:
        for name in EXPECTED:
            config = resolve(covey.load_config(smollm2_settings(name)))
            export(task_of(config), given.export, f"{name}-")
        return 0
    tasks = given.tasks or [*(EMBEDDED if given.model == "embedded" else EXPECTED)]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool,
    ):
        results = [*pool.map(partial(result_of, folder=Path(folder), given=given), tasks)]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = {"environment": described(0, device, torch.get_num_threads()), "results": results}
    out = given.out or RESULTS / f"collapse-{'gpu' if device != 'cpu' else 'embedded'}.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(result["right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
