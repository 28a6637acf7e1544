"""Launches the runs of a comparison, each in its own process, and several at a time.

A failed run does not stop the other runs. Each process reads its job from standard input, which
stays open for as long as the parent process lives. A run exits when its standard input closes.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from safetensors import safe_open

from covey.baselines import baselines_of
from covey.config import Config, parse_config, to_toml, toml_value
from covey.config.resolve import reward_of, task_of
from covey.config.schema import Adapter
from covey.errors import CoveyError, RunError
from covey.escape import printable, printable_line
from covey.evaluation.evaluate import Evaluation
from covey.lab.compare.comparison import (
    OUTCOME_FILE,
    Design,
    RunOutcome,
    log_path,
    read_outcome,
    run_path,
    write_design,
    write_outcome,
)
from covey.lab.compare.conclusion import count
from covey.lab.compare.design import Prepared, config_of, parallel_runs, task_digest
from covey.lab.compare.report import write_report
from covey.lab.compare.tables import NO_OPTION, finding_title
from covey.loop import train
from covey.notices import notice
from covey.policy.policy import load_model
from covey.records.files import write_text
from covey.records.folder import RunFolder
from covey.records.metric_registry import value_text
from covey.records.provenance import code_digest, describe_environment
from covey.records.records import last_row
from covey.records.trackers import Tracker
from covey.reference.fingerprint import fingerprint
from covey.rewards.identity import identity
from covey.run import Run
from covey.scoring import scorer_of
from covey.screen import Screen, cell
from covey.stopping import stop_signal
from covey.subprocesses import module_command

POLL_SECONDS = 0.2
Status = Literal["waiting", "running", "done", "failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The input of a process that trains one run."""

    arm: str
    seed: int
    """The seed in the comparison, to which the run adds the arm's seed offset."""
    folder: str
    config_toml: str
    common_toml: str
    """The common configuration, whose reward scores the evaluations of all arms."""
    key: str
    """A digest of all inputs that determine the run's result, a hyphen, and a digest of the code
    that trains it. Two runs with equal keys give equal results."""
    threads: int

    @property
    def path(self) -> Path:
        return Path(self.folder)


def make_jobs(folder: Path, design: Design) -> list[Job]:
    weights: dict[str, str] = {}
    data: dict[str, str] = {}
    common = parse_config(design.common)
    code = code_digest()
    jobs = []
    for seed in design.seeds:  # the outer loop, so that all arms make progress together
        for arm in design.arms:
            config = config_of(design, arm, seed)
            model, task = config.model.path, config.task.model_dump_json()
            if model not in weights:
                device = config.model.model_copy(update={"device": "cpu"})
                alone = config.model_copy(update={"model": device, "adapter": Adapter()})
                weights[model] = fingerprint(load_model(alone)).weights
            if task not in data:
                data[task] = task_digest(task_of(config))
            adapter = None
            if config.adapter.rank:
                adapter = {**config.adapter.model_dump(), "seed": config.seed}
            start = _digest([weights[model], config.model.dtype, config.model.device, adapter])
            inputs = inputs_digest(
                config, common, start=start, data=data[task], threads=design.threads
            )
            jobs.append(
                Job(
                    arm=arm.name,
                    seed=seed,
                    folder=str(run_path(folder, arm.name, seed)),
                    config_toml=to_toml(config),
                    common_toml=to_toml(common),
                    key=f"{inputs}-{code}",
                    threads=design.threads,
                )
            )
    return jobs


def inputs_digest(config: Config, common: Config, *, start: str, data: str, threads: int) -> str:
    """Return a digest of all inputs that determine a run's result."""
    scoring = [
        [identity(c.reward.name, reward_of(c)), c.scoring.model_dump()] for c in (config, common)
    ]
    return _digest([config.model_dump(), start, data, scoring, threads])


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, default=repr)  # JSON has no dates, TOML does
    return hashlib.sha256(text.encode()).hexdigest()


def ready(job: Job, elsewhere: Mapping[str, Path]) -> bool:
    """Prepare a run's folder for training, and return False if the run has already finished.

    `elsewhere` maps digests of inputs (`Job.key`) to the folders of finished runs. A finished run
    with the job's key is copied instead of trained again. If the job's folder contains a run with
    a different key, for example from other code, the folder of this run is renamed, and a note says
    so. No run is ever deleted.
    """
    path = job.path
    ended = read_outcome(path)
    if path.exists():
        about = RunFolder(path).environment(lambda text: None)
        key = about.get("key") if ended is None else ended.key
        if job.key != key:
            _move_aside(path, key, job.key)
            ended = None
    if ended is not None and ended.state == "done":
        return False
    if not path.exists() and job.key in elsewhere:
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(elsewhere[job.key], partial)
        partial.rename(path)
        return False
    (path / OUTCOME_FILE).unlink(missing_ok=True)  # a failed run is tried again
    path.parent.mkdir(parents=True, exist_ok=True)
    return True


def _move_aside(path: Path, old: str | None, new: str) -> None:
    """Rename the folder of a run that has another key than its job."""
    inputs, _, code = (old or "").partition("-")
    difference = "other code, and perhaps other settings, data or rewards"
    if inputs == new.partition("-")[0]:
        difference = "other code of Covey, or other versions of torch or transformers"
    elif code == new.partition("-")[2]:
        difference = "other settings, data or rewards"
    for number in range(1, 1000):
        aside = path.with_name(f"{path.name}.aside-{number}")
        if not aside.exists():
            path.rename(aside)
            if log_path(path).exists():
                log_path(path).rename(log_path(aside))
            notice(
                f"{path} was trained with {difference}: it is kept as {aside.name}, and the run is "
                "repeated, because arms that differ in their code cannot be compared. To continue "
                "the old runs, stop now, rename the folders back, and use the code that trained "
                "them"
            )
            return
    raise RunError(
        f"{path}: the old run cannot be renamed, because the folders {path}.aside-1 to "
        f"{path}.aside-999 exist; delete some of them"
    )


LIVE_SECONDS = 0.5
"""The time between updates of the table in a terminal."""
PLAIN_SECONDS = 10.0
"""The time between a run's progress lines in a log."""
STYLES: dict[Status, str] = {
    "waiting": "dim",
    "running": "",
    "done": "green",
    "failed": "red",
    "stopped": "yellow",
}


@dataclass(slots=True, kw_only=True)
class Running:
    """The jobs of a comparison, with the status of each job, and the display of their progress."""

    jobs: Sequence[Job]
    design: Design
    console: Console
    live: Live | None = None
    """A table in a terminal; without it, progress is shown as plain lines."""
    status: dict[str, Status] = field(default_factory=dict)
    stopping: bool = False
    shown: dict[str, Status] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)

    def having(self, status: Status) -> list[Job]:
        return [job for job in self.jobs if self.status[job.folder] == status]

    def show(self) -> None:
        """Update the table or, without one, print lines about runs, if it is time."""
        elapsed = time.monotonic() - self.last
        budget, amount = self.design.budget, self.design.amount
        if self.live is not None:
            if elapsed < LIVE_SECONDS and (self.having("running") or self.having("waiting")):
                return
            self.last = time.monotonic()
            table = Table(
                title="stopping: each run saves its current step" if self.stopping else None
            )
            for heading in ("arm", "seed", "", "spent", "step", "held-out"):
                table.add_column(heading, justify="left" if heading in ("arm", "") else "right")
            for job in self.jobs:
                status = self.status[job.folder]
                progress = run_progress(job, budget, amount)
                cells = (Text(printable(job.arm)), str(job.seed), status, *progress)
                table.add_row(*cells, style=STYLES[status])
            self.live.update(table, refresh=True)
            return
        if again := elapsed > PLAIN_SECONDS:
            self.last = time.monotonic()
        for job in self.jobs:
            status = self.status[job.folder]
            changed = status != self.shown.get(job.folder, "waiting")
            if changed or (again and status == "running"):
                self.shown[job.folder] = status
                spent, step, result = run_progress(job, budget, amount)
                outcome = read_outcome(job.path) if status == "failed" else None
                error = f": {outcome.error}" if outcome is not None else ""
                line = f"{job.arm} seed {job.seed}: {status}, {spent}, step {step}, {result}"
                self.console.print(line + error)


def run_progress(job: Job, budget: str, amount: int) -> tuple[str, str, str]:
    """Return three texts: the used share of the budget, the step, and the newest evaluation."""
    step = last_row(job.path / "steps.jsonl")
    evaluation = last_row(job.path / "eval.jsonl")
    spent = min(1.0, step.get("step" if budget == "steps" else budget, 0) / amount)
    found = [
        f"{label} {value_text(name, evaluation[name]['value'])}"
        for name, label in (("greedy", "accuracy"), ("reward", "reward"))
        if name in evaluation
    ]
    return f"{spent:.0%}", str(step.get("step", 0)), ", ".join(found) or "not evaluated"


def run_jobs(folder: Path, running: Running, parallel: int) -> None:
    """Run all unfinished jobs, at most `parallel` at a time.

    On Ctrl-C, each run saves its current step and stops.
    """
    # A run that another comparison in the same parent folder has finished is not repeated.
    elsewhere = {}
    for file in sorted(folder.parent.glob(f"*/runs/*/seed-*/{OUTCOME_FILE}")):
        ended = read_outcome(file.parent)
        if ended is not None and ended.state == "done":
            elsewhere[ended.key] = file.parent
    waiting = deque(job for job in running.jobs if ready(job, elsewhere))
    running.status = {job.folder: "waiting" if job in waiting else "done" for job in running.jobs}
    processes: dict[subprocess.Popen[bytes], Job] = {}
    try:
        while waiting or processes:
            try:
                for process in [p for p in processes if p.poll() is not None]:
                    job = processes.pop(process)
                    running.status[job.folder] = _ended(job, process, running.stopping)
                while waiting and len(processes) < parallel:
                    job = waiting.popleft()
                    processes[start(job)] = job
                    running.status[job.folder] = "running"
                running.show()
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
    running.show()


def start(job: Job) -> subprocess.Popen[bytes]:
    """Start a job's process in its own session, so that the terminal's Ctrl-C does not reach it."""
    with log_path(job.path).open("ab") as log:
        process = subprocess.Popen(
            module_command("covey.lab.compare.launch"),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(job.threads), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # the process has already ended; the next poll notices
    return process


def _ended(job: Job, process: subprocess.Popen[bytes], stopping: bool) -> Status:
    assert process.stdin is not None
    process.stdin.close()
    outcome = read_outcome(job.path)
    if outcome is not None:
        return "done" if outcome.state == "done" else "failed"
    if stopping:
        return "stopped"
    job.path.mkdir(parents=True, exist_ok=True)
    code, log = process.returncode, log_path(job.path)
    if code == -signal.SIGKILL:
        error = "killed (SIGKILL), perhaps because the machine ran out of memory"
    elif code < 0:
        error = f"killed by {signal.Signals(-code).name}"
    else:
        lines = log.read_text("utf-8", "replace").split("\n") if log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        error = f"exited with code {code}: {last}"
    write_outcome(job.path, RunOutcome(key=job.key, state="failed", error=error))
    return "failed"


# A whole comparison: its arms, runs and report.


def show_design(prepared: Prepared, console: Screen) -> None:
    design = prepared.design
    runs = len(design.arms) * len(design.seeds)
    seeds = ", ".join(str(seed) for seed in design.seeds)
    console.print(
        f"{count(runs, 'run')} of {design.amount} {design.budget}: "
        f"{count(len(design.arms), 'arm')}, seeds {seeds}, "
        f"{count(design.threads, 'thread')} each, in {prepared.folder}",
    )
    table = Table("arm", "differences from the common configuration")
    for arm in design.arms:
        lines = [
            f"{key} = {NO_OPTION if v is None else v if key == 'seed' else toml_value(v)}"
            for key, v in arm.differences.items()
        ]
        table.add_row(cell(arm.name), cell("\n".join(lines) or "none"))
    console.print(table)
    for row in design.findings:
        text = Text().append(f"{finding_title(row)}\n", style="yellow")
        text.append(f"  {row['why']}\n  remedy: {row['remedy']}", style="dim")
        console.print(text)


def run_comparison(prepared: Prepared, parallel: int | None, console: Screen) -> Running:
    """Start or resume all unfinished runs. Write the reports unless Ctrl-C stopped the runs."""
    folder, design = prepared.folder, prepared.design
    # This loads the model, so that a bad model fails before anything is written.
    jobs = make_jobs(folder, design)
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).locked():
        if prepared.previous != design:
            write_design(folder, design)
        if prepared.previous is None:
            about = describe_environment(min(design.seeds), "", design.threads)
            del about["command"], about["device"]
            write_text(folder / "environment.json", json.dumps(about, indent=2) + "\n")
        running = Running(jobs=jobs, design=design, console=console)
        table = console.is_terminal and not console.quiet
        with Live(console=console, auto_refresh=False) if table else nullcontext() as running.live:
            run_jobs(folder, running, parallel or parallel_runs(design))
    if not running.stopping:
        write_report(folder, console)
    return running


# The other side of the pipe: one run in a process of its own. It reads its job as one line from
# standard input. If the parent ends, standard input closes, and the run exits at once.


DONE, FAILED, STOPPED = 0, 1, 3
"""The exit codes of the process. A process with the exit code STOPPED was interrupted, and its run
can be resumed."""
LONGEST_ERROR = 300


class LogTracker(Tracker):
    """Prints the evaluations and notes of a run to its log."""

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        self.note(f"after step {done} of {steps}, {rollouts} completions per step")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.note(f"step {step}: {evaluation.estimates['greedy'].value:.1%}")

    def note(self, text: str) -> None:
        print(printable(text), flush=True)


def main() -> None:
    job = Job(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        code = run_job(job)
    except KeyboardInterrupt:
        code = STOPPED
    except BaseException as error:
        print(printable(traceback.format_exc()), file=sys.stderr)
        text = str(error)
        if not isinstance(error, CoveyError):
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        text = printable_line(text, LONGEST_ERROR)
        job.path.mkdir(parents=True, exist_ok=True)
        write_outcome(job.path, RunOutcome(key=job.key, state="failed", error=text))
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written. Exit without waiting for threads that the run has started.
    os._exit(code)


def _exit_with_parent() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(STOPPED)


def run_job(job: Job) -> int:
    """Train from the last checkpoint until the end or a stop signal. Return the exit code."""
    torch.set_num_threads(job.threads)
    config = parse_config(tomllib.loads(job.config_toml))
    common = parse_config(tomllib.loads(job.common_toml))
    run = Run.build(config)
    with ExitStack() as stack:
        stack.enter_context(closing(run))
        # The common reward scores evaluations, whatever reward the arm is trained on.
        apart = bool(common.evaluate.reward.name)  # all arms have it, because [evaluate] is common
        if not apart and (config.reward, config.scoring) != (common.reward, common.scoring):
            scorer = stack.enter_context(closing(scorer_of(common)))
            known = baselines_of(common, scorer, run.held_out)
            run.eval_scorer, run.baselines = scorer, known
        if (job.path / "config.toml").is_file():
            folder = RunFolder.open(job.path)
        else:
            environment = describe_environment(
                config.seed, str(run.policy.model.device), torch.get_num_threads()
            )
            environment |= {
                "reward": run.scorer.identity,
                "evaluation_reward": run.eval_scorer.identity,
                **run.facts,
                "arm": job.arm,
                "key": job.key,
            }
            folder = RunFolder.create(job.path, job.config_toml, environment)
        log = LogTracker()
        log.note(f"generation: {run.engine.info.backend}")
        with folder.locked(), stop_signal() as stop:
            train(run, folder, [log], stop)
    if stop.by_signal:
        return STOPPED
    write_outcome(
        job.path,
        RunOutcome(
            key=job.key,
            state="done",
            weights=checkpoint_digest(folder.checkpoints()[-1][1]),
            memory_gib=peak_memory(run.policy.model.device) / 2**30,
            cpu_seconds=time.process_time(),
        ),
    )
    return DONE


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of a GPU or, if `device` is a CPU, of this process, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def checkpoint_digest(folder: Path) -> str:
    """Return a SHA-256 digest of the weights in the checkpoint of a model or an adapter.

    The digest covers the names, dtypes, shapes and values of the weights. The digest does not
    depend on metadata, or on how many files contain the weights.
    """
    files = [*folder.glob("model*.safetensors"), *folder.glob("adapter_model.safetensors")]
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        tensors = {name: file for file in opened for name in file.offset_keys()}
        digest = hashlib.sha256()
        for name, file in sorted(tensors.items()):
            about, values = file.get_slice(name), file.get_tensor(name).reshape(-1)
            digest.update(f"{name} {about.get_dtype()} {about.get_shape()}\n".encode())
            digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


if __name__ == "__main__":
    main()
