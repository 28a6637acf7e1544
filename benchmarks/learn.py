"""Learning curves of a real model in minutes on a GPU, with commands and seeds.

    python benchmarks/learn.py chain_sum --algorithms grpo,gspo     # 330 steps of each
    python benchmarks/learn.py gsm8k                                # SFT first, then GRPO
    python benchmarks/learn.py chain_sum --export prompts           # where reasoning-gym is
    python benchmarks/learn.py chain_sum --prompts prompts          # where it is not

Every number comes from run folders that `covey sft` and `covey train` wrote. Seconds cover
sampling, scoring and training; `wall` also counts loading and evaluations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from described import anywhere, described
from own_process import flags

from covey.config import load_config
from covey.config.resolve import resolve, task_of
from covey.evaluation.intervals import paired_difference
from covey.records.folder import RunFolder
from covey.tasks.task import Task

HERE = Path(__file__).parent
SPLITS = ("train", "held_out")


def curve(run: RunFolder) -> list[dict[str, Any]]:
    """Return every evaluation with the seconds of training before it."""
    spent, seconds = {0: 0.0}, 0.0
    for row in run.steps():
        seconds += row["time/total"]
        spent[row["step"]] = seconds
    return [
        {"step": row["step"], "seconds": round(spent[row["step"]], 1), **row["greedy"]}
        for row in run.evaluations()
    ]


def paired(run: RunFolder, first: int, last: int) -> dict[str, float]:
    """Return the paired difference between two evaluations of a run."""
    rows = [run.items(step) for step in (last, first)]
    after, before = ([row["values"]["greedy"] for row in part] for part in rows)
    return paired_difference(after, before).row()


def covey(*words: str) -> float:
    """Run a command of covey's and return its seconds."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "covey", *words], check=True)
    return time.perf_counter() - began


def report(run: RunFolder, words: Sequence[str], wall: float) -> dict[str, Any]:
    """Return curve, best accuracy and gain of one `covey train` run."""
    points = curve(run)
    best = max(points, key=lambda point: point["value"])
    return {
        "command": " ".join(["covey", *anywhere(words)]),
        "wall_seconds": round(wall, 1),
        "curve": points,
        "best": best,
        "gain": paired(run, points[0]["step"], points[-1]["step"]),
        "sampler_logp_diff_mean": [
            row["debug/sampler_logp_diff_mean"] for row in run.steps()[:: max(1, len(points))]
        ],
        "config": run.config_file.read_text(),
    }


def files_of(folder: Path, task: str) -> list[str]:
    """Return the settings that read prompts from files."""
    named = [f"task.name={task}"]
    return named + [f"task.{split}_file={folder / split}.jsonl" for split in SPLITS]


def export(task: Task, folder: Path, prefix: str = "") -> None:
    """Write the prompts of a task to files."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, prompts in zip(SPLITS, (task.train(), task.held_out()), strict=True):
        lines = [json.dumps({"question": p.text, "answer": p.target}) + "\n" for p in prompts]
        (folder / f"{prefix}{split}.jsonl").write_text("".join(lines))


def chain_sum(arguments: argparse.Namespace, settings: list[str]) -> dict[str, Any]:
    if arguments.prompts is not None:
        settings = [*files_of(arguments.prompts, "jsonl"), *settings]
    results = {}
    for name in arguments.algorithms.split(","):
        run = arguments.runs / f"chain_sum-{name}"
        chosen = [*settings, f"objective.name={name}", "objective.beta=0.0"]
        words = ["train", str(HERE / "chain_sum.toml"), *flags(chosen), "--run", str(run)]
        wall = covey(*words)
        results[name] = report(RunFolder.open(run), words, wall)
    return results


def gsm8k(arguments: argparse.Namespace, settings: list[str]) -> dict[str, Any]:
    if arguments.prompts is not None:
        settings = [*files_of(arguments.prompts, "gsm8k"), *settings]
    warm, run = arguments.runs / "gsm8k-warmup", arguments.runs / "gsm8k-grpo"
    first = ["sft", str(HERE / "gsm8k.toml"), *flags(settings), "--run", str(warm)]
    seconds = covey(*first)
    checkpoint = RunFolder.open(warm).checkpoints()[-1][1]
    words = ["train", str(HERE / "gsm8k.toml"), *flags(settings)]
    words += ["--model", str(checkpoint), "--run", str(run)]
    wall = covey(*words)
    warmup = {"command": " ".join(["covey", *anywhere(first)]), "wall_seconds": round(seconds, 1)}
    return {"warmup": warmup, "grpo": report(RunFolder.open(run), words, wall)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("chain_sum", "gsm8k"))
    parser.add_argument("--algorithms", default="grpo,gspo", help="Of chain_sum, one by one.")
    parser.add_argument("--prompts", type=Path, help="Folder with train.jsonl and held_out.jsonl.")
    parser.add_argument("--export", type=Path, help="Write chain_sum's prompts there, and stop.")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.export is not None:
        config = resolve(load_config(str(HERE / "chain_sum.toml")))
        export(task_of(config), arguments.export)
        return
    results = {"chain_sum": chain_sum, "gsm8k": gsm8k}[arguments.what](
        arguments, arguments.settings
    )
    file = arguments.out or HERE / "results" / f"{arguments.what}.json"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    environment = described(0, device, torch.get_num_threads())
    file.write_text(json.dumps({"environment": environment, **results}, indent=1) + "\n")
    for name, result in results.items():
        if "curve" in result:
            line = ", ".join(
                f"{p['step']}: {100 * p['value']:.1f}% ({p['seconds']:.0f} s)"
                for p in result["curve"]
            )
            print(f"{name}: {line}")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
