"""Held-out accuracy of runs through vLLM beside runs with the native engine: several seeds of each.

    python benchmarks/engine_accuracy.py [--seeds 3] [--native-seeds 6]     # where vLLM is: 15 min

Both engines sample from the same distribution with other random numbers, so a run through vLLM is
another draw of the same experiment, as another seed is. The spread of native seeds says how far two
such runs are apart by chance. The interval of the difference is Welch's, over runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from described import described
from learn import flags
from overlap import HERE, Arm, run
from scipy import stats

NATIVE = Arm("native", {})
VLLM = Arm("vllm", {"engine.kind": "vllm", "engine.vllm.memory": 1})
SETTINGS = {
    "model.device": "cpu", "train.steps": 30, "evaluate.every": 30, "evaluate.prompts": 256,
    "save.every": 0, "save.rollouts": "false",
}  # fmt: skip


def welch(first: list[float], second: list[float]) -> dict[str, float]:
    """Return the difference of two means with its 95 % interval, over runs."""
    found = stats.ttest_ind(first, second, equal_var=False)
    interval = found.confidence_interval(0.95)
    return {
        "value": statistics.fmean(first) - statistics.fmean(second),
        "low": float(interval.low),
        "high": float(interval.high),
        "p": float(found.pvalue),
    }


def line(found: dict[str, Any]) -> str:
    """Describe a run."""
    accuracy = found["accuracy"]
    return (
        f"{found['arm']}, seed {found['seed']}: {accuracy['value']:.1%} "
        f"[{accuracy['low']:.1%}, {accuracy['high']:.1%}], "
        f"{1 / found['steps_per_second']:.2f} s a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="Of runs through vLLM.")
    parser.add_argument("--native-seeds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "engine_accuracy.json")
    given = parser.parse_args()
    words = ["arithmetic", *flags([f"{key}={value}" for key, value in SETTINGS.items()])]
    plan = [(VLLM, seed) for seed in range(given.seeds)]
    plan += [(NATIVE, seed) for seed in range(given.native_seeds)]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for arm, seed in sorted(plan, key=lambda each: each[1]):
            runs.append(run(words, arm, seed, Path(folder) / f"{len(runs)}"))
            print(line(runs[-1]), flush=True)
    for one in runs:
        del one["right"]
    values = {
        arm.name: [one["accuracy"]["value"] for one in runs if one["arm"] == arm.name]
        for arm in (NATIVE, VLLM)
    }
    difference = welch(values["vllm"], values["native"])
    for name, each in values.items():
        spread = statistics.stdev(each) if len(each) > 1 else float("nan")
        print(f"{name}: mean {statistics.fmean(each):.1%}, standard deviation {spread:.1%}")
    chance = difference["low"] <= 0.0 <= difference["high"]
    print(
        f"vLLM - native: {100 * difference['value']:+.1f} [{100 * difference['low']:+.1f}, "
        f"{100 * difference['high']:+.1f}] points: "
        f"{'within' if chance else 'outside'} what seeds explain"
    )
    about = described(0, "cpu", torch.get_num_threads())
    result = {"environment": about, "difference": difference, "values": values, "runs": runs}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
