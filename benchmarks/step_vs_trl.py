"""Seconds per training step: covey and TRL's `GRPOTrainer`, same model, prompts and settings, CPU.

    pip install -c constraints.txt -e ".[dev]"
    python benchmarks/step_vs_trl.py

A step is one rollout batch: 16 prompts x 8 completions sampled and scored, then four AdamW steps of
32 completions each. The two alternate, each time in a fresh process. TRL samples with transformers'
`generate`: its continuous batching is built for GPUs and takes several times as long on a CPU.
Everything that TRL can switch off (checkpoints, logs, progress bars, gradient checkpointing,
bfloat16) is off.

Run it on an idle machine. With as many threads as cores, another busy process can make some steps
ten times as long and invert the ratio; `--threads 1` suffers much less.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from described import described
from own_process import WorkerFailed, in_own_process
from rich.console import Console
from rich.table import Table
from step_workers import (
    COMPLETIONS,
    LEARNING_RATE,
    MAX_TOKENS,
    OPERATIONS,
    PROMPTS,
    SAMPLES,
    SEED,
    UPDATES,
    Steps,
)

LENGTH_TOLERANCE = 0.05
"""Largest relative difference of mean completion lengths at which the work counts as equal."""
INSTALL = 'pip install -c constraints.txt -e ".[dev]"'
OUTPUT = Path(__file__).parent / "results" / "step_vs_trl.json"
NAMES = ("covey", "trl")


def in_worker(name: str, arguments: argparse.Namespace) -> Any:
    """Run a worker process and return its result."""
    command = [sys.executable, str(Path(__file__).with_name("step_workers.py")), name]
    for option in ("steps", "warmup", "threads", "trl_cache"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    # Both run on the CPU and without network access.
    environment = {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(arguments.threads),
    }
    try:
        return in_own_process(command, environment=environment)
    except WorkerFailed as error:
        sys.exit(f"{error}\nerror: the {name} process failed")


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, list[Steps]]:
    """Alternate between the two, so that a slow minute of the machine affects both."""
    rounds: dict[str, list[Steps]] = {name: [] for name in NAMES}
    for number in range(1, arguments.rounds + 1):
        for name in NAMES:
            steps = Steps(**in_worker(name, arguments))
            rounds[name].append(steps)
            console.print(f"round {number}  {name:5}  {steps.median:.3f} s/step", highlight=False)
    return rounds


def floor_gflop(length: float) -> dict[str, float]:
    """Return the least arithmetic of a step with completions of the given mean length.

    Sampling processes each prompt once per group, and every completion token but the last.
    Training takes a forward pass and a backward pass of twice its cost over the same tokens, with
    the head on completions only. Attention is counted at mean lengths.
    """
    from covey.embedded import CHECKPOINT
    from covey.tasks.registry import make_task

    shape = json.loads((CHECKPOINT / "config.json").read_text())
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads = shape["head_dim"] * shape["num_attention_heads"]
    key_value = shape["head_dim"] * shape["num_key_value_heads"]
    projections = 2 * width * (heads + key_value) + 3 * width * shape["intermediate_size"]
    head = 2 * width * shape["vocab_size"]
    prompts = make_task("arithmetic", OPERATIONS).train()[:1000]
    prompt = statistics.fmean(len(p.text) for p in prompts)

    def body(start: float, end: float) -> float:
        """Count positions start to end, each attending to all before it."""
        seen = (end * (end + 1) - start * (start + 1)) / 2
        return float(layers * (2 * projections * (end - start) + 4 * heads * seen))

    once = PROMPTS * body(0, prompt) + COMPLETIONS * body(prompt, prompt + length - 1)
    sampling = once + head * (PROMPTS + COMPLETIONS * (length - 1))
    training = 3 * (once + head * COMPLETIONS * length)
    return {"sampling": sampling / 1e9, "training": training / 1e9}


def report(
    arguments: argparse.Namespace, rounds: dict[str, list[Steps]], gflops: float, load: float
) -> dict[str, Any]:
    """Return all measurements as plain data."""
    joined = {name: Steps.join(parts) for name, parts in rounds.items()}
    gflop = floor_gflop(joined["covey"].length)
    each = zip(rounds["trl"], rounds["covey"], strict=True)
    return {
        "environment": described(SEED, "cpu", arguments.threads),
        "trl": importlib.metadata.version("trl"),
        "load_at_start": load,
        "matmul_gflop_per_second": gflops,
        "settings": _settings(arguments),
        "ratio": joined["trl"].median / joined["covey"].median,
        "ratio_by_round": [trl.median / covey.median for trl, covey in each],
        "floor": {"gflop": gflop, "seconds": sum(gflop.values()) / gflops},
        "results": {
            name: {**_summary(steps), "by_round": [asdict(part) for part in rounds[name]]}
            for name, steps in joined.items()
        },
    }


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "beta": 0.0,
        "clip": 0.2,
        "updates": UPDATES,
        "optimizer": "AdamW",
        "learning_rate": LEARNING_RATE,
        "dtype": "float32",
        "seed": SEED,
        "trl_cache": arguments.trl_cache,
        "timed_steps": arguments.steps,
        "warmup_steps": arguments.warmup,
        "rounds": arguments.rounds,
    }


def _summary(steps: Steps) -> dict[str, float]:
    return {
        "seconds_median": steps.median,
        "seconds_min": min(steps.seconds),
        "seconds_max": max(steps.seconds),
        "tokens_per_second": steps.tokens_per_second,
        "completion_length": steps.length,
        "stop_rate": statistics.fmean(steps.stopped),
        "reward": statistics.fmean(steps.rewards),
    }


ROWS = (
    ("seconds per step, median", "seconds_median", ".3f"),
    ("  fastest step", "seconds_min", ".3f"),
    ("  slowest step", "seconds_max", ".3f"),
    ("tokens per second, whole step", "tokens_per_second", ",.0f"),
    ("tokens per completion, mean", "completion_length", ".2f"),
    ("completions that stop before the limit", "stop_rate", ".1%"),
    ("reward, mean", "reward", ".3f"),
)


def show(data: dict[str, Any], console: Console) -> None:
    """Print the report as a table."""
    covey, trl = (data["results"][name] for name in NAMES)
    table = Table(title="One training step, covey and TRL")
    table.add_column("")
    for heading in ("covey", f"TRL {data['trl']}", "TRL / covey"):
        table.add_column(heading, justify="right")
    for label, key, form in ROWS:
        ratio = f"{trl[key] / covey[key]:.2f}" if covey[key] else "-"
        table.add_row(label, format(covey[key], form), format(trl[key], form), ratio)
    floor = data["floor"]["seconds"]
    shares = [f"{r['seconds_median'] / floor:.1f}x floor" for r in (covey, trl)]
    table.add_row(f"arithmetic floor, {floor:.3f} s", *shares, "")
    console.print(table)
    for line in _notes(data):
        console.print(line, highlight=False, soft_wrap=True)


def _notes(data: dict[str, Any]) -> list[str]:
    settings, about, gflop = data["settings"], data["environment"], data["floor"]["gflop"]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in data["ratio_by_round"])
    versions = ", ".join(f"{name} {about['packages'][name]}" for name in ("torch", "transformers"))
    lines = [
        f"TRL takes {data['ratio']:.2f} times as long as covey; round by round: {ratios}.",
        f"A step: {PROMPTS} prompts x {SAMPLES} completions of at most {MAX_TOKENS} tokens, "
        f"{UPDATES} AdamW updates, temperature 1, beta 0, clip 0.2, float32. "
        f"{settings['rounds']} rounds of {settings['timed_steps']} steps each after "
        f"{settings['warmup_steps']} to warm up.",
        f"Learning rate {LEARNING_RATE:g} for both, so that the policy and the length of "
        "completions stay the same: the work is equal in every step.",
        "Old log-probs: covey uses the engine's; TRL's generate returns none, so TRL runs one more "
        "forward pass over the batch. The floor does not count that pass.",
        f"Floor: {gflop['sampling']:.2f} GFLOP to sample and {gflop['training']:.2f} to train, at "
        f"{data['matmul_gflop_per_second']:.0f} GFLOP/s (1024 x 1024 float32 matmul, here).",
        f"{about['started']}, {about['cores']} CPUs, {about['threads']} threads, load average "
        f"{data['load_at_start']:.2f} at the start; {versions}, trl {data['trl']}.",
    ]
    covey, trl = (data["results"][name]["completion_length"] for name in NAMES)
    if abs(trl / covey - 1) > LENGTH_TOLERANCE:
        lines.append(
            f"Warning: completions of {covey:.1f} and {trl:.1f} tokens are not the same work."
        )
    if data["load_at_start"] > 0.25 * about["cores"]:
        lines.append("Warning: the machine was busy at the start (load average).")
    return lines


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=_at_least(1), default=30, help="timed steps a round (30)")
    parser.add_argument("--warmup", type=_at_least(1), default=5, help="steps before those (5)")
    parser.add_argument("--rounds", type=_at_least(2), default=2, help="turns of each library (2)")
    parser.add_argument(
        "--threads", type=_at_least(1), default=os.cpu_count(), help="for torch (all CPUs)"
    )
    parser.add_argument(
        "--trl-cache",
        choices=("dynamic", "static"),
        default="dynamic",
        help="cache_implementation of TRL (dynamic, which is its default)",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the JSON goes")
    return parser.parse_args()


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return int(text)

    return whole_number


def main() -> None:
    """Measure, print, and write the JSON file."""
    arguments = parse()
    if any(importlib.util.find_spec(name) is None for name in ("trl", "datasets", "accelerate")):
        sys.exit(f"error: this benchmark needs TRL: {INSTALL}")
    load = os.getloadavg()[0]
    console = Console()
    gflops = in_worker("matmul", arguments)
    rounds = measure(arguments, console)
    data = report(arguments, rounds, gflops, load)
    show(data, console)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(data, indent=2) + "\n")
    console.print(f"Written to {arguments.output}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
