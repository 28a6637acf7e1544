"""Fault campaign: kill -9, full disks and clock jumps; every resumed run must be the run in peace.

    python benchmarks/faults.py --kills 100 --disks 60 --clocks 10 --out results/faults.json

Each run of the campaign meets one fault at a random place, is resumed, and is then compared with an
uninterrupted run: weights, optimizer, rollouts and evaluations bit for bit, and every prompt once.

    kills    SIGKILL at a random moment: while generating, scoring in worker processes, training,
             evaluating, saving, or starting. Runs are synchronous, overlapped, or score in
             processes.
    disks    the run folder is a tmpfs of some size, and full before the run has ended. From the
             size of nothing to that of the whole run, in equal parts. Needs root, to mount it.
    clocks   time.time jumps by up to a day, back and forth, on every call, and the run's files get
             times of the past and the future before it is resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from described import described
from kill_resume import SETTINGS, bits
from own_process import flags
from rich.progress import track

from covey.cli.main import run as covey
from covey.lab.verify import checkpoint_checks
from covey.records.files import DIGESTS_FILE
from covey.records.folder import RunFolder

STEPS = 6
COMMON = {**SETTINGS, "train.steps": STEPS, "save.every": 2, "evaluate.every": 2,
          "evaluate.prompts": 8, "filter.dynamic_sampling": "false"}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "overlapped": {"overlap.staleness": 1, "overlap.mode": "ahead"},
    "scored in processes": {"reward.name": "slow_reward:slow", "scoring.workers": 2},
}
REWARD = """
import time, zlib

def slow(prompt, text):
    time.sleep(0.002)
    return zlib.crc32(text.encode()) % 100 / 100
"""
DAY = 86_400.0


def arguments(run: Path, kind: str) -> list[str]:
    """Return the command line that starts a run, or resumes it."""
    if (run / "config.toml").exists():
        return ["train", "--resume", str(run)]
    return ["train", "arithmetic", "--run", str(run), *flags({**COMMON, **KINDS[kind]})]


def forked(work: Callable[[], int], log: Path) -> int:
    """Do work in a child process, and return its id. Nothing is imported again."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            with log.open("a", buffering=1) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout = sys.stderr = file
                code = work()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """Wait for a child, and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finish(run: Path, kind: str, log: Path) -> None:
    """Start or resume a run, and let it end."""
    if ended(forked(lambda: covey(arguments(run, kind)), log)):
        raise SystemExit(f"{run} does not end:\n{log.read_text()[-2000:]}")


def summary(run: Path) -> dict[str, Any]:
    """Return what two equal runs have in common."""
    folder = RunFolder.open(run)
    last = folder.checkpoints()[-1][1] / DIGESTS_FILE
    evaluations = [{**row, "seconds": 0} for row in folder.evaluations()]
    return {**bits(run, STEPS), "checkpoint": last.read_text(), "evaluations": evaluations}


def problems(run: Path, expected: dict[str, Any]) -> list[str]:
    """Return how a run differs from the one in peace, and what its own checkpoints say."""
    found = summary(run)
    other = [name for name in expected if found[name] != expected[name]]
    wrong = [r.name for r in checkpoint_checks(RunFolder.open(run)) if r.passed is False]
    return [*other, *(["repeated"] if found["repeated"] else []), *wrong]


def kill(run: Path, kind: str, log: Path, seconds: float) -> str:
    """Kill a run after some seconds; return what it was doing, as far as its folder says."""
    child = forked(lambda: covey(arguments(run, kind)), log)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    ended(child)
    if (run / "checkpoints").is_dir() and list((run / "checkpoints").glob(".*.partial")):
        return "saving"
    steps = RunFolder(run).steps() if (run / "config.toml").exists() else []
    return f"after step {steps[-1]['step']}" if steps else "before the first step"


@contextmanager
def small_disk(place: Path, size: int) -> Any:
    """Mount a file system of some bytes; yield a function that makes it large."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    subprocess.run(mount, check=True)
    try:
        grow = ["mount", "-o", "remount,size=1G", str(place)]
        yield lambda: subprocess.run(grow, check=True)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_disk(place: Path, log: Path, size: int, expected: dict[str, Any]) -> tuple[str, list[str]]:
    """Train on a disk that is too small, make it large, and resume."""
    run = place / "run"
    with small_disk(place, size) as grow:
        code = ended(forked(lambda: covey(arguments(run, "synchronous")), log))
        last = (
            max((row["step"] for row in RunFolder(run).steps()), default=0) if run.is_dir() else 0
        )
        grow()
        finish(run, "synchronous", log)
        return f"full after step {last}, exit code {code}", problems(run, expected)


def jump(run: Path, log: Path, chance: random.Random) -> None:
    """Train with a clock that jumps, stop in the middle, change all file times, and resume."""
    real = time.time

    def work() -> int:
        time.time = lambda: real() + chance.uniform(-DAY, DAY)
        return covey(arguments(run, "synchronous"))

    child = forked(work, log)
    while not (run / "rollouts/000003.jsonl").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGTERM)
    ended(child)
    for file in run.rglob("*"):
        moment = real() + chance.uniform(-DAY, DAY)
        os.utime(file, (moment, moment))
    if ended(forked(work, log)):
        raise SystemExit(f"{run} does not end:\n{log.read_text()[-2000:]}")


def campaign(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything, and return the figures."""
    chance, log = random.Random(given.seed), folder / "log"
    expected, seconds = {}, {}
    for kind in list(KINDS)[: max(1, given.kills)]:
        started = time.perf_counter()
        finish(folder / f"peace {kind}", kind, log)
        seconds[kind] = time.perf_counter() - started
        expected[kind] = summary(folder / f"peace {kind}")
    found: dict[str, list[dict[str, Any]]] = {"kills": [], "disks": [], "clocks": []}

    for number in track(range(given.kills), "kills"):
        kind, run = list(KINDS)[number % len(KINDS)], folder / f"killed-{number}"
        when = kill(run, kind, log, chance.uniform(0.02, 1) * seconds[kind])
        finish(run, kind, log)
        found["kills"].append(
            {"kind": kind, "when": when, "problems": problems(run, expected[kind])}
        )
    whole = sum(f.stat().st_size for f in (folder / "peace synchronous").rglob("*") if f.is_file())
    for number in track(range(given.disks), "full disks"):
        size = max(4096, int(whole * (number + 0.5) / max(1, given.disks)))
        place = folder / f"disk-{number}"
        when, wrong = fill_disk(place, log, size, expected["synchronous"])
        found["disks"].append({"bytes": size, "when": when, "problems": wrong})
    for number in track(range(given.clocks), "clock jumps"):
        run = folder / f"clock-{number}"
        jump(run, log, chance)
        found["clocks"].append({"problems": problems(run, expected["synchronous"])})
    same = {name: sum(not one["problems"] for one in rows) for name, rows in found.items()}
    return {"same": same, "of": {name: len(rows) for name, rows in found.items()}, "runs": found}


def main() -> int:
    """Run the campaign and write its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--disks", type=int, default=60)
    parser.add_argument("--clocks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = None if given.out is None else given.out.resolve()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slow_reward.py").write_text(REWARD)
        os.chdir(folder)
        os.environ["COVEY_TRUST"] = "slow_reward"
        result = campaign(given, Path(folder))
    if out is not None:
        report = {"environment": described(given.seed, "cpu", 1), **result}
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"same": result["same"], "of": result["of"]}))
    return 0 if result["same"] == result["of"] else 1


if __name__ == "__main__":
    sys.exit(main())
