"""Kill a run with overlap at random moments, resume it each time, and compare it with one in peace.

    python benchmarks/kill_resume.py --moments 20 [--mode ahead] [--staleness 2] [--engine process]

The run must end with the same weights and the same rollouts, to the bit, and every prompt must have
been trained on exactly once. The result is one line of JSON with all moments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from own_process import flags

from covey.records.folder import RunFolder

SETTINGS = {
    "model.device": "cpu", "task.min_operations": 1, "task.max_operations": 2,
    "rollout.prompts_per_step": 4, "rollout.group_size": 6, "rollout.max_tokens": 24,
    "optimizer.learning_rate": 3e-4, "train.mini_batches": 1, "evaluate.every": 0,
    "filter.dynamic_sampling": "true", "save.samples_every": 0, "save.keep": 3,
}  # fmt: skip


def command(run: Path, given: argparse.Namespace) -> list[str]:
    """Return the command that starts or resumes a run."""
    words = [sys.executable, "-m", "covey", "train"]
    if (run / "config.toml").exists():
        return [*words, "--resume", str(run)]
    settings = {
        **SETTINGS,
        "train.steps": given.steps,
        "save.every": given.save_every,
        "overlap.staleness": given.staleness,
        "overlap.mode": given.mode,
        "engine.kind": given.engine,
    }
    return [*words, "arithmetic", "--run", str(run), *flags(settings)]


def finish(run: Path, given: argparse.Namespace) -> float:
    """Run to the end, and return the seconds of its steps."""
    done = subprocess.run(command(run, given), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {done.stdout}{done.stderr}")
    return math.fsum(row["time/total"] for row in RunFolder.open(run).steps())


def kill_after(run: Path, given: argparse.Namespace, seconds: float) -> int:
    """Kill a run `seconds` after it has logged its next step; return its last logged step."""
    process = subprocess.Popen(
        command(run, given), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    before = len(steps_of(run))
    while process.poll() is None and len(steps_of(run)) <= before:
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return len(steps_of(run))


def steps_of(run: Path) -> list[str]:
    """Return the logged steps."""
    file = run / "steps.jsonl"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def bits(run: Path, steps: int) -> dict[str, Any]:
    """Return digests of the weights and rollouts of a run, and how often it used each prompt."""
    folder = RunFolder.open(run)
    used: Counter[tuple[int, str, int]] = Counter()
    rollouts = []
    for step in range(1, steps + 1):
        rows = folder.require_rollouts(step)
        used.update((step, row["prompt_id"], row["sample"]) for row in rows)
        rollouts.append([[row["tokens"], row["sampler_logp"], row["advantage"]] for row in rows])
    weights = (folder.checkpoints()[-1][1] / "model.safetensors").read_bytes()
    return {
        "weights": hashlib.sha256(weights).hexdigest()[:16],
        "rollouts": hashlib.sha256(json.dumps(rollouts).encode()).hexdigest()[:16],
        "prompts": sorted({(step, prompt) for step, prompt, _ in used}),
        "repeated": [key for key, count in used.items() if count > 1],
        "groups": [row["rollout/trained_groups"] for row in folder.steps()],
    }


def main() -> int:
    """Kill, resume, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--mode", default="copy", choices=["ahead", "copy"])
    parser.add_argument("--engine", default="process", choices=["native", "process"])
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        peace, war = Path(folder) / "peace", Path(folder) / "war"
        seconds = finish(peace, given)
        moments = []
        for _ in range(given.moments):
            moments.append(kill_after(war, given, chance.random() * seconds / given.moments))
            print(f"killed after {moments[-1]} of {given.steps} steps", flush=True)
        finish(war, given)
        expected, found = bits(peace, given.steps), bits(war, given.steps)
    same = {name: expected[name] == found[name] for name in expected}
    ok = all(same.values()) and not found["repeated"]
    print(json.dumps({**vars(given), "steps_at_kills": moments, "same": same, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
