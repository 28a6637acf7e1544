"""Kill a rank at random moments, many times: all must end in time, and the run must resume.

    python tests/parallel/kill_ranks.py --times 20

A run of a few steps on two ranks is made once without interruption. Then it is made again and again:
a rank is killed with SIGKILL at a random moment, from the start to the end; the others must end
within 30 seconds; and the resumed run must have the numbers of the uninterrupted one, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
os.environ["OMP_NUM_THREADS"] = "1"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for a script; pytest has it there

import torch  # noqa: E402

import covey.loop  # noqa: E402 - imported once, before any fork
import covey.run  # noqa: E402, F401
from covey.cli.main import run as covey_command  # noqa: E402
from covey.records.folder import RunFolder  # noqa: E402
from tests.parallel.ranks import codes_of, start_ranks  # noqa: E402

SECONDS = 30.0
SIZE = 2
SETTINGS = [
    "model.device=cpu", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "rollout.max_tokens=24", "train.steps=8", "train.mini_batches=2", "evaluate.every=0",
    "save.every=1", "save.keep=50",
]  # fmt: skip


def rows(run: Path) -> list[dict[str, object]]:
    """Return the metrics of each step, without times."""
    return [{k: v for k, v in row.items() if "time/" not in k} for row in RunFolder(run).steps()]


def arguments(run: Path, strategy: str) -> list[str]:
    settings = [*SETTINGS, f"parallel.strategy={strategy}"]
    return ["train", *(w for s in settings for w in ("--set", s)), "--run", str(run)]


def trial(folder: Path, whole: Path, strategy: str, after: float, victim: int) -> tuple[float, int]:
    """Kill a rank; return how long the others took to end, and the steps that were saved."""
    run = folder / "run"
    ranks = start_ranks(SIZE, lambda rank: covey_command(arguments(run, strategy)), folder / "logs")
    time.sleep(after)
    os.kill(ranks[victim], signal.SIGKILL)
    struck = time.monotonic()
    if not (run / "config.toml").exists():
        # Ranks may not have joined yet: nothing but their launcher knows. torchrun does this.
        os.kill(ranks[1 - victim], signal.SIGTERM)
    codes_of(ranks, SECONDS)
    taken = time.monotonic() - struck
    saved = len(RunFolder(run).checkpoints())
    if (run / "config.toml").exists():
        again = start_ranks(
            SIZE, lambda rank: covey_command(["train", "--resume", str(run)]), folder / "again"
        )
        assert codes_of(again) == [0] * SIZE, "the run does not resume"
        assert rows(run) == rows(whole), "the resumed run has other numbers"
    return taken, saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, slowest = random.Random(options.seed), 0.0
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        whole, started = base / "whole", time.monotonic()
        words = arguments(whole, options.strategy)
        codes = codes_of(start_ranks(SIZE, lambda rank: covey_command(words), base / "logs"))
        assert codes == [0] * SIZE, (base / "logs" / "0.log").read_text()
        length = time.monotonic() - started
        for number in range(options.times):
            after, victim = draw.uniform(0.0, length), draw.randrange(SIZE)
            folder = base / str(number)
            taken, saved = trial(folder, whole, options.strategy, after, victim)
            slowest = max(slowest, taken)
            print(f"{number + 1}: rank {victim} killed after {after:.1f} s, with {saved} steps "
                  f"saved; all ended after {taken:.1f} s; resumed", flush=True)  # fmt: skip
            shutil.rmtree(folder)
    print(f"{options.times} of {options.times} as wanted; the slowest end took {slowest:.1f} s")


if __name__ == "__main__":
    main()
