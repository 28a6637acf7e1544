"""Trains one run of a comparison in a process of its own.

`python -m covey.lab.compare.run_process` reads the job as one line from standard input. If the
parent process ends, standard input closes, and the run exits at once. The process writes its output
to the run's log, and its result to outcome.json. A process that starts again resumes its run from
the last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import threading
import time
import tomllib
import traceback
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from safetensors import safe_open

from covey.baselines import baselines_of
from covey.config import Config, parse_config
from covey.errors import CoveyError
from covey.escape import printable, printable_line
from covey.evaluation.evaluate import Evaluation
from covey.lab.compare.comparison import RunOutcome
from covey.lab.compare.comparison_folder import FIRST_ROLLOUTS_FILE, write_outcome
from covey.lab.compare.launch import Job
from covey.lab.compare.shared_rollouts import SharedEngine
from covey.loop import train
from covey.records.folder import RunFolder
from covey.records.provenance import describe_environment
from covey.records.trackers import Tracker
from covey.run import Run
from covey.scoring import scorer_of
from covey.stopping import stop_signal

DONE, FAILED, STOPPED = 0, 1, 3
"""The exit codes of the process. A process with the exit code STOPPED was interrupted, and its run
can be resumed."""
LONGEST_ERROR = 300


class LogTracker(Tracker):
    """Prints the evaluations and notes of a run to its log."""

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        """Print the number of finished steps, and the number of completions per step."""
        self.note(f"after step {done} of {steps}, {rollouts} completions per step")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Print the accuracy of an evaluation."""
        self.note(f"step {step}: {evaluation.estimates['greedy'].value:.1%}")

    def note(self, text: str) -> None:
        """Print a line."""
        print(printable(text), flush=True)


def main() -> None:
    """Read a job from standard input, and train its run."""
    job = Job(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        code = run_job(job)
    except KeyboardInterrupt:
        code = STOPPED
    except BaseException as error:
        print(printable(traceback.format_exc()), file=sys.stderr)
        job.path.mkdir(parents=True, exist_ok=True)
        write_outcome(job.path, RunOutcome(key=job.key, state="failed", error=_one_line(error)))
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written. Exit without waiting for threads that the run has started.
    os._exit(code)


def _exit_with_parent() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(STOPPED)


def _one_line(error: BaseException) -> str:
    """Format an error as one line, with its class name unless it is a CoveyError."""
    text = str(error)
    if not isinstance(error, CoveyError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return printable_line(text, LONGEST_ERROR)


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
        folder = _run_folder(job, config, run)
        engine = SharedEngine(
            engine=run.engine,
            folder=Path(job.shared),
            start=job.start,
            names_file=folder.path / FIRST_ROLLOUTS_FILE,
        )
        log = LogTracker()
        log.note(f"generation: {engine.info.backend}")
        with folder.locked(), stop_signal() as stop:
            run.engine = engine
            train(run, folder, [log], stop)
    if stop.by_signal:
        return STOPPED
    write_outcome(
        job.path,
        RunOutcome(
            key=job.key,
            state="done",
            weights=checkpoint_digest(folder.checkpoints()[-1][1]),
            first_rollouts=" ".join(json.loads((folder.path / FIRST_ROLLOUTS_FILE).read_text())),
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


def _run_folder(job: Job, config: Config, run: Run) -> RunFolder:
    if (job.path / "config.toml").is_file():
        return RunFolder.open(job.path)
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
    return RunFolder.create(job.path, job.config_toml, environment)


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
