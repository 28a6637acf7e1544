"""Running a comparison: a process for each run, several side by side, no one's end another's.

Each is told its job on standard input, which stays open as long as this process lives: worker.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from covey.analysis.compare.jobs import Job, finished_runs, ready
from covey.analysis.compare.record import RunOutcome, log_path, read_outcome, write_outcome
from covey.run.folder import RunFolder
from covey.subprocesses import module_command

POLL_SECONDS = 0.2
Status = Literal["waiting", "running", "done", "failed", "stopped"]


@dataclass(slots=True, kw_only=True)
class Running:
    """All jobs of a comparison and how each stands."""

    jobs: Sequence[Job]
    status: dict[str, Status] = field(default_factory=dict)
    """By run folder."""
    stopping: bool = False

    def __post_init__(self) -> None:
        self.status = {job.folder: "waiting" for job in self.jobs}

    def of(self, status: Status) -> list[Job]:
        """Return the jobs that stand so."""
        return [job for job in self.jobs if self.status[job.folder] == status]


Watch = Callable[[Running], None]


def run_jobs(folder: Path, jobs: Sequence[Job], parallel: int, watch: Watch) -> Running:
    """Do all jobs that are not done, `parallel` at a time; Ctrl-C saves them where they stand."""
    running = Running(jobs=jobs)
    elsewhere = finished_runs(folder.parent)
    waiting: deque[Job] = deque()
    for job in jobs:
        if ready(job, elsewhere):
            waiting.append(job)
        else:
            running.status[job.folder] = "done"
    processes: dict[subprocess.Popen[bytes], Job] = {}
    try:
        while waiting or processes:
            try:
                _turn(running, waiting, processes, parallel)
                watch(running)
                time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                if running.stopping:
                    break
                running.stopping = True
                waiting.clear()
                for process in processes:
                    process.send_signal(signal.SIGINT)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    watch(running)
    return running


def _turn(
    running: Running,
    waiting: deque[Job],
    processes: dict[subprocess.Popen[bytes], Job],
    parallel: int,
) -> None:
    """Take in what has ended, and start what there is room for."""
    for process in [p for p in processes if p.poll() is not None]:
        job = processes[process]
        running.status[job.folder] = _ended(job, process, running.stopping)
        del processes[process]
    while waiting and len(processes) < parallel:
        job = waiting.popleft()
        processes[start(job)] = job
        running.status[job.folder] = "running"


def start(job: Job) -> subprocess.Popen[bytes]:
    """Start the process of a job. Ctrl-C in the terminal is for this process to pass on."""
    with log_path(job.path).open("ab") as log:
        process = subprocess.Popen(
            module_command("covey.analysis.compare.worker"),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(job.threads), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(job.line().encode())
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended already, and will be found so
    return process


def _ended(job: Job, process: subprocess.Popen[bytes], stopping: bool) -> Status:
    """Say how a run ended. One that could not tell us itself is told of here."""
    assert process.stdin is not None
    process.stdin.close()
    outcome = read_outcome(job.path)
    if outcome is not None:
        return "done" if outcome.state == "done" else "failed"
    if stopping:
        return "stopped"
    job.path.mkdir(parents=True, exist_ok=True)
    error = _why(process.returncode, log_path(job.path))
    write_outcome(job.path, RunOutcome(key=job.key, state="failed", error=error))
    return "failed"


def _why(code: int, log: Path) -> str:
    if code == -signal.SIGKILL:
        return "killed (SIGKILL): by somebody, or by the system for want of memory"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return f"ended with exit code {code}: {last}"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a comparison for this process alone. The lock goes with the process."""
    with RunFolder(folder).locked():
        yield
