"""Held-out accuracy of runs through vLLM beside runs with the native engine: several seeds of each.

    python benchmarks/engine_accuracy.py                                # where vLLM is: 8 minutes
    python benchmarks/engine_accuracy.py native --seeds 3 4 5           # more, added to the result

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
from overlap import HERE, Arm, run
from own_process import flags
from scipy import stats

NATIVE = Arm("native", {})
VLLM = Arm("vllm", {"engine.kind": "vllm", "engine.vllm.memory": 1})
ARMS = (NATIVE, VLLM)
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


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the engines over all runs that there are so far, and print that."""
    values = {
        arm.name: [one["accuracy"]["value"] for one in runs if one["arm"] == arm.name]
        for arm in ARMS
    }
    for name, each in values.items():
        if len(each) > 1:
            mean, spread = statistics.fmean(each), statistics.stdev(each)
            print(f"{name}: {len(each)} runs, mean {mean:.1%}, standard deviation {spread:.1%}")
    if min(map(len, values.values())) < 2:
        return {"values": values}
    difference = welch(values["vllm"], values["native"])
    chance = difference["low"] <= 0.0 <= difference["high"]
    print(
        f"vLLM - native: {100 * difference['value']:+.1f} [{100 * difference['low']:+.1f}, "
        f"{100 * difference['high']:+.1f}] points: "
        f"{'within' if chance else 'outside'} what seeds explain"
    )
    return {"values": values, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", nargs="*", choices=[[], *(arm.name for arm in ARMS)])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "engine_accuracy.json")
    given = parser.parse_args()
    words = ["arithmetic", *flags(SETTINGS)]
    arms = [arm for arm in ARMS if not given.engine or arm.name in given.engine]
    for seed in given.seeds:
        for arm in arms:
            with tempfile.TemporaryDirectory() as folder:
                found = run(words, arm, seed, Path(folder) / "run")
            del found["right"]
            print(line(found), flush=True)
            # The file keeps the runs of other engines and seeds, which may be made beside these.
            kept = json.loads(given.out.read_text())["runs"] if given.out.exists() else []
            runs = [one for one in kept if (one["arm"], one["seed"]) != (arm.name, seed)]
            about = described(seed, "cpu", torch.get_num_threads())
            runs.append({**found, "environment": about})
            text = json.dumps({**compared(runs), "runs": runs}, indent=1)
            given.out.write_text(text + "\n")
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
