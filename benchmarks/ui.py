"""The web page with 50 runs of 10,000 steps, one of 100,000 steps, and 1 GB of rollouts.

    python benchmarks/ui.py [--runs 50] [--steps 10000] [--out benchmarks/results/ui.json]

Makes the runs in a temporary folder, starts `covey ui` on them, and measures in real Chromium: the
start of the server, first paint, interactions, and the memory of the server.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from described import described

from covey.records.metric_registry import METRICS
from tests.lab.ui.browser import Browser
from tests.lab.ui.sample_runs import group, make_run

LIMITS = {"first_paint_s": 2.0, "interaction_s": 0.2, "server_mb": 300}
PAINTED = "document.querySelectorAll('.panel').length > 3"
# The time from an action to a painted page in which a condition holds, measured inside the page.
MEASURED = """new Promise((done) => {
  const before = performance.now(), until = before + 30000;
  ({act})();
  const look = () => {
    if ({holds} || performance.now() > until) requestAnimationFrame(() => setTimeout(() => done((performance.now() - before) / 1000), 0));
    else setTimeout(look, 2);
  };
  look();
})"""


def write_run(path: Path, steps: int, seed: int) -> None:
    """A run of many steps with every metric of the registry, about 3 KB each."""
    run = make_run(path, steps=1)
    draw = random.Random(seed)
    names = [name for name in METRICS if "*" not in name and name not in ("step", "reward_id")]
    # Lines differ in a few numbers only: writing 1.5 GB of others takes longer than the benchmark.
    lines = [json.dumps({name: draw.random() for name in names})[1:] for _ in range(50)]
    with (run.path / "steps.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            reward = 1 - math.exp(-3 * step / steps) + draw.gauss(0, 0.05)
            file.write(f'{{"step": {step}, "objective/scores": {reward:.17g}, ')
            file.write(lines[step % 50].replace('"objective/scores"', '"objective/other"'))
            file.write("\n")


def write_rollouts(path: Path, size: int) -> None:
    """A step with rollouts of that many bytes."""
    run = make_run(path, steps=1)
    rows = type(run).rollout_rows([group(1, (1.0, 0.0) * 4)], [[1.0, -1.0] * 4])
    lines = []
    for row in rows:
        row |= {"text": "word " * 800, "tokens": [7] * 1000, "sampler_logp": [-0.123456789] * 1000}
        row["prompt_id"] = "GROUP"
        lines.append(json.dumps(row) + "\n")
    with (run.path / "rollouts/000001.jsonl").open("w") as file:
        for number in range(size // sum(map(len, lines))):
            file.writelines(line.replace("GROUP", f"prompt-{number}", 1) for line in lines)


def measured(page: Browser, act: str, holds: str, times: int = 1) -> float:
    script = MEASURED.replace("{act}", act).replace("{holds}", holds)
    return float(median(page.run(script) for _ in range(times)))


def cpu(*roots: int) -> float:
    """CPU seconds of processes and their children so far: it depends little on what else runs."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid], used[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def below(pid: int) -> bool:
        return pid in roots or (pid in parents and below(parents[pid]))

    return sum(ticks for pid, ticks in used.items() if below(pid)) / os.sysconf("SC_CLK_TCK")


class Timer:
    """Interactions with their seconds, and with the CPU seconds of server and browser."""

    def __init__(self, page: Browser, server: int) -> None:
        self.page, self.server = page, server
        self.found: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, act: str, holds: str) -> None:
        pids = (self.server, self.page.process.pid)
        before = [cpu(pid) for pid in pids]
        wall = measured(self.page, act, holds)
        used = [round(cpu(pid) - at, 3) for pid, at in zip(pids, before, strict=True)]
        self.found[name] = {"wall": round(wall, 3), "server_cpu": used[0], "browser_cpu": used[1]}


def memory(pid: int) -> float:
    """Most resident memory of a process so far, in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


def started(folder: Path) -> tuple[subprocess.Popen[str], str, float]:
    before = time.monotonic()
    command = [sys.executable, "-m", "covey", "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, next(word for word in line.split() if "://" in word), time.monotonic() - before


def interactions(page: Browser, server: int) -> dict[str, dict[str, float]]:
    def go(address: str) -> str:
        return f"() => {{ location.hash = '{address}' }}"

    chart = "document.querySelector('canvas[aria-label^=\"objective/scores\"]')"
    label = f"({chart}?.getAttribute('aria-label') ?? '')"
    timed = Timer(page, server)
    for name, run in {"another run": "run-07", "a run of 10 times the steps": "long"}.items():
        timed(f"select {name}, first time", go(f"#run={run}"), f"{label}.includes('{run}')")
    time.sleep(4)  # the page reads the rest of the files
    timed("select a run again", go("#run=run-07"), f"{label}.includes('run-07')")
    page.run("location.hash = '#run=long'")
    page.wait(f"{label}.includes('long')")
    time.sleep(1)
    page.run(f"window.before = {label}")
    timed("zoom into it", go("#run=long&from=40000&to=41000"), f"{label} !== window.before")
    page.run("location.hash = '#run=run-07'")
    page.wait(f"{label}.includes('run-07')")
    page.run(f"window.before = {label}")
    timed("smooth", go("#run=run-07&smooth=0.9"), f"{label} !== window.before")
    timed(
        "filter the list",
        "() => { const f = document.getElementById('filter'); f.value = 'run-1'; f.dispatchEvent(new Event('input')) }",
        "document.querySelectorAll('#runs li').length === 10",
    )
    timed(
        "settings of two",
        go("#run=run-07&run=run-08&view=config"),
        "document.querySelectorAll('.settings').length === 2",
    )
    big = "#run=big&view=groups"
    timed("groups of a large step", go(big), "document.querySelectorAll('.group').length === 40")
    timed(
        "open a group",
        go(f"{big}&group=prompt-3"),
        "document.querySelectorAll('.rollout').length === 8",
    )
    timed(
        "tokens of a rollout",
        go(f"{big}&group=prompt-3&line=25"),
        "document.querySelectorAll('.token').length === 1000",
    )
    return timed.found


def overlay(page: Browser, server: int, runs: int) -> dict[str, dict[str, float]]:
    """All runs are overlaid for the first time, and the view is drawn again after reading all."""
    every = "&".join(f"run=run-{number:02d}" for number in range(runs))
    label = "(document.querySelectorAll('.legend li').length)"
    timed = Timer(page, server)
    go = f"() => {{ location.hash = '#{every}' }}"
    timed("overlay all runs, first time", go, f"{label} === {runs}")
    time.sleep(30)  # all files are read by then
    again = f"() => {{ location.hash = '#{every}&smooth=0.8' }}"
    timed("smooth all runs", again, "document.getElementById('smooth').value === '0.8'")
    return timed.found


def measure(runs: int, steps: int, megabytes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_rollouts(root / "big", megabytes * 10**6)
        write_run(root / "long", 10 * steps, 99)
        for number in range(runs):
            write_run(root / f"run-{number:02d}", steps, number)
        process, url, start = started(root)
        page = Browser()
        try:
            before, used = time.monotonic(), cpu(process.pid, page.process.pid)
            page.open(url)
            page.wait(PAINTED)
            paint = time.monotonic() - before
            used = cpu(process.pid, page.process.pid) - used
            found = interactions(page, process.pid) | overlay(page, process.pid, runs)
            before = time.monotonic()
            page.run("location.hash = '#run=big&view=groups'")
            page.wait("document.querySelectorAll('.group').length === 40")
            while page.run("document.body.innerText.includes('reading,')"):
                time.sleep(0.5)
            indexed = time.monotonic() - before
            problems = page.problems()
            return {
                "first_paint_s": paint, "first_paint_cpu_s": used, "server_start_s": start, "interactions": found,
                "rest_of_rollout_index_s": indexed,
                "server_mb": memory(process.pid), "problems": problems,
                "steps_file_mb": (root / "run-00/steps.jsonl").stat().st_size / 1e6,
            }  # fmt: skip
        finally:
            page.close()
            process.terminate()
            process.wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--runs", type=int, default=50)
    arguments.add_argument("--steps", type=int, default=10_000)
    arguments.add_argument("--megabytes", type=int, default=1000)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "results/ui.json")
    given = arguments.parse_args()
    load = os.getloadavg()[0]
    found = measure(given.runs, given.steps, given.megabytes)
    about = {
        "environment": described(0, "cpu", 1), "load_at_start": load, "runs": given.runs, "steps": given.steps,
        "rollouts_mb": given.megabytes, "limits": LIMITS,
    }  # fmt: skip
    text = json.dumps({**about, **found}, indent=2)
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
