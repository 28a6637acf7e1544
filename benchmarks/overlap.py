"""What overlap gains: steps per second and accuracy with and without it.

    python benchmarks/overlap.py cpu                     # two cores against one: 3 seeds, 9 minutes
    python benchmarks/overlap.py gpu [--model FOLDER]    # one GPU, sampling ahead: 4 minutes
    python benchmarks/overlap.py shape                   # the same, speed alone: 80 seconds

cpu: the trainer and an engine in its own process, one core each, at staleness 1, against one core
that does both. The default correction takes another forward pass, for old_logp; the third arm does
without, and has the ratio of the objective correct instead. gpu: the rollouts of 1, 2 and 4 steps
in one call, which is staleness 0, 1 and 3, while SmolLM2 learns sums. shape: the same with random
weights of SmolLM2's shape and completions of full length, so there is no accuracy. With --timed 1
only the runs of the first seed have the machine to themselves; those of the other seeds run side
by side, and count for accuracy only.

Steps per second are of training and generation, without loading, evaluation and the first steps.
They come from the median time of four steps in succession: in mode `ahead` the steps of one call
have different times, and four steps hold whole calls at each staleness.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from described import described
from learn import files_of
from own_process import flags

from covey.lab.compare.statistics import change
from covey.records.folder import RunFolder

HERE = Path(__file__).parent
BLOCK = 4
"""Steps that are timed together: at each staleness, they hold whole calls of the engine."""
FIRST = BLOCK
"""Steps that are not counted: they fill the pipeline, compile kernels and capture graphs."""


class Arm(NamedTuple):
    """One way to run, the same for every seed."""

    name: str
    settings: dict[str, Any]
    cores: int = 0
    """Cores that all its processes share, each with one thread. 0: all of the machine."""


COPY = {"overlap.mode": "copy", "engine.kind": "process"}
ARMS = {
    "cpu": (
        Arm("one core", {}, cores=1),
        Arm("one core each, staleness 1", {"overlap.staleness": 1, **COPY}, cores=2),
        Arm(
            "one core each, staleness 1, old_logp of the engine",
            {"overlap.staleness": 1, "train.old_logp": "sampler", **COPY},
            cores=2,
        ),
    ),
    "gpu": tuple(Arm(f"staleness {k}", {"overlap.staleness": k}) for k in (0, 1, 3)),
}
WANTED: dict[str, dict[str, float]] = {
    "cpu": {
        "one core each, staleness 1": 1.4,
        "one core each, staleness 1, old_logp of the engine": 1.4,
    },
    "gpu": {"staleness 1": 1.3, "staleness 3": 1.6},
}
"""Required speed relative to the first arm. The last lines say whether each arm reached it."""
CONFIGS = {"cpu": "arithmetic", "gpu": str(HERE / "chain_sum.toml")}
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"model.device": "cpu", "train.steps": 100, "rollout.max_tokens": 32},
    "gpu": {
        "train.steps": 64, "train.mini_batches": 1, "rollout.prompts_per_step": 16,
        "optimizer.warmup_steps": 2, "engine.max_concurrent": 1024,
    },
}  # fmt: skip
EVERY_RUN = {"save.every": 0, "save.rollouts": "false", "evaluate.every": 10**6}


def words_of(what: str, given: argparse.Namespace) -> list[str]:
    """Return the configuration and the settings that all arms share."""
    chosen = [f"{key}={value}" for key, value in {**SETTINGS[what], **EVERY_RUN}.items()]
    if given.prompts is not None:
        chosen = [*files_of(given.prompts, "jsonl"), *chosen]
    if given.model:
        chosen.append(f"model.path={given.model}")
    return [CONFIGS[what], *flags([*chosen, *given.settings])]


def steps_per_second(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the speed of the median block of steps."""
    seconds: list[float] = [row["time/total"] for row in rows]
    blocks = [sum(seconds[n : n + BLOCK]) for n in range(0, len(seconds) - BLOCK + 1, BLOCK)]
    return BLOCK / statistics.median(blocks)


def run(words: list[str], arm: Arm, seed: int, folder: Path) -> dict[str, Any]:
    """Train once, and return speed and accuracy."""
    own = flags({**arm.settings, "seed": seed})
    threads = {"OMP_NUM_THREADS": "1"} if arm.cores else {}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "covey", "train", *words, *own, "--run", str(folder)],
        check=True,
        env={**os.environ, **threads},
        stdout=subprocess.DEVNULL,
        preexec_fn=(lambda: os.sched_setaffinity(0, range(arm.cores))) if arm.cores else None,
    )
    wall = time.perf_counter() - began
    done = RunFolder.open(folder)
    rows = done.steps()[FIRST:]
    last = done.evaluations()[-1]
    means: dict[str, float] = {
        name: statistics.fmean(row[name] for row in rows)
        for name in ("time/rollout", "time/training", "time/wait_rollouts", "time/wait_training",
                     "overlap/staleness", "policy/correction_ess")
        if name in rows[0]
    }  # fmt: skip
    return {
        "arm": arm.name,
        "seed": seed,
        "steps_per_second": steps_per_second(rows),
        "accuracy": last["greedy"],
        "right": [item["values"]["greedy"] for item in done.items(last["step"])],
        "wall_seconds": wall,
        **means,
    }


def summary(runs: list[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """Compare every arm with the first: speed, and accuracy, with an interval over seeds."""
    lines = []
    base = [one for one in runs if one["arm"] == first]
    timed = [number for number, one in enumerate(base) if one["timed"]]
    for name in dict.fromkeys(one["arm"] for one in runs):
        arm = [one for one in runs if one["arm"] == name]
        pairs = [(arm[number], base[number]) for number in timed]
        gains = np.array([one["right"] for one in arm]) - np.array([one["right"] for one in base])
        speedups = [one["steps_per_second"] / other["steps_per_second"] for one, other in pairs]
        speed = (
            {
                "steps_per_second": statistics.fmean(one["steps_per_second"] for one, _ in pairs),
                "speedup": statistics.fmean(speedups),
                "speedups": speedups,
            }
            if timed
            else {}
        )
        lines.append(
            {
                "arm": name,
                **speed,
                "accuracy": [one["accuracy"]["value"] for one in arm],
                "accuracy_difference": change(gains).row(),
            }
        )
    return lines


def compared(line: dict[str, Any], wanted: float | None) -> dict[str, Any]:
    """Return whether an arm is as much faster as wanted, if it was timed, and not less accurate."""
    if wanted is None:
        return {}
    good = line["accuracy_difference"]["high"] >= 0.0
    accuracy = "as accurate within the interval" if good else "less accurate"
    if "speedup" not in line:
        return {"ok": good, "result": f": {accuracy}"}
    fast = line["speedup"] >= wanted
    speed = f"{'at least' if fast else 'less than'} {wanted:g} times as fast"
    return {"ok": fast and good, "result": f": {speed}, {accuracy}"}


def all_runs(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every arm with every seed, seed by seed, so that a busy machine slows all arms."""
    words, arms = words_of(given.what, given), ARMS[given.what]
    timed = given.seeds if given.timed is None else given.timed
    with tempfile.TemporaryDirectory() as folder:

        def one(seed: int, arm: Arm) -> dict[str, Any]:
            found = run(words, arm, seed, Path(folder) / f"{seed}-{arms.index(arm)}")
            found["timed"] = seed < timed
            print(
                f"{arm.name}, seed {seed}: {found['steps_per_second']:.3f} steps/s, "
                f"accuracy {found['accuracy']['value']:.1%}",
                flush=True,
            )
            return found

        pairs = [(seed, arm) for seed in range(given.seeds) for arm in arms]
        alone = timed * len(arms)
        runs = [one(*pair) for pair in pairs[:alone]]
        with ThreadPoolExecutor(max_workers=16) as pool:
            return [*runs, *pool.map(lambda pair: one(*pair), pairs[alone:])]


def measure_runs(given: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """Train every arm with every seed, and compare the arms."""
    runs = all_runs(given)
    arms = summary(runs, ARMS[given.what][0].name)
    for one in runs:
        del one["right"]
    for line in arms:
        difference = line["accuracy_difference"]
        line |= compared(line, WANTED[given.what].get(line["arm"]))
        times = f"{line['speedup']:.2f} times, " if "speedup" in line else ""
        print(
            f"{line['arm']}: {times}accuracy {100 * difference['value']:+.1f}"
            f" [{100 * difference['low']:+.1f}, {100 * difference['high']:+.1f}] points"
            f"{line.get('result', '')}"
        )
    save({"arms": arms, "runs": runs})


def measure_shape(given: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """Time every arm with random weights; the second round shows how far repeated runs differ."""
    from speed_device import forget
    from speed_sizes import sizes_for
    from speed_step import covey_run, run_config

    sizes = sizes_for("cuda" if torch.cuda.is_available() else "cpu")
    completions = sizes.prompts * sizes.group
    batch = f"{sizes.prompts} x {sizes.group} completions of {sizes.tokens} tokens, one update"
    rows: list[dict[str, Any]] = []
    for _ in range(given.rounds):
        for staleness in (0, 1, 3):
            forget(sizes.device)
            settings = {
                "rollout.prompts_per_step": sizes.prompts,
                "rollout.group_size": sizes.group,
                "rollout.max_tokens": sizes.tokens,
                "engine.max_concurrent": (staleness + 1) * completions,
                "objective.beta": 0.0,
                "overlap.staleness": staleness,
            }
            overrides = [f"{key}={value}" for key, value in settings.items()] + given.settings
            config = run_config(sizes, "smollm2", overrides, steps=FIRST + given.steps)
            done = covey_run(sizes, "smollm2", config, warmup=FIRST)
            speed, update = steps_per_second(done.rows), done.median("time/training")
            rows.append(
                {
                    "arm": f"staleness {staleness}",
                    "steps_per_second": speed,
                    "update": update,
                    "rest": 1 / speed - update,
                    "seconds": [row["time/total"] for row in done.rows],
                }
            )
            base = [row for row in rows if row["arm"] == "staleness 0"][-1]
            rows[-1]["speedup"] = speed / base["steps_per_second"]
            print(
                f"staleness {staleness}: {speed:.2f} steps/s, {rows[-1]['speedup']:.2f} times, "
                f"update {1e3 * update:.0f} ms, rest {1e3 * rows[-1]['rest']:.0f} ms",
                flush=True,
            )
            save({"ran": batch, "arms": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("cpu", "gpu", "shape"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--timed", type=int, help="Seeds whose runs are timed. Default: all.")
    parser.add_argument("--steps", type=int, default=24, help="Timed steps of each arm of shape.")
    parser.add_argument("--rounds", type=int, default=2, help="Runs of each arm of shape.")
    parser.add_argument("--model", default="", help="A folder instead of the model of the recipe.")
    parser.add_argument("--prompts", type=Path, help="Folder with train.jsonl and held_out.jsonl.")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    environment = described(0, device, torch.get_num_threads())
    file = given.out or HERE / "results" / f"overlap-{given.what}.json"

    def save(found: dict[str, Any]) -> None:
        file.write_text(json.dumps({"environment": environment, **found}, indent=1) + "\n")

    (measure_shape if given.what == "shape" else measure_runs)(given, save)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
