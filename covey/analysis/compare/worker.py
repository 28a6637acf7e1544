"""One run of a comparison, in a process of its own: `python -m covey.analysis.compare.worker`.

The job comes as a line on standard input, which then stays open: when it closes, whoever asked is
gone, and so the worker ends at once. What it had logged after its last checkpoint is done again by
the next who asks. What it says goes to the log; what became of it to outcome.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import tomllib
import traceback
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from covey.analysis.compare.digest import checkpoint_digest
from covey.analysis.compare.jobs import Job
from covey.analysis.compare.record import FIRST_ANSWERS, RunOutcome, write_outcome
from covey.analysis.compare.shared import SharedEngine
from covey.config import Config, parse_config
from covey.errors import CoveyError
from covey.evaluate.evaluate import Evaluation
from covey.run.folder import RunFolder
from covey.run.provenance import describe_environment
from covey.run.trackers import Tracker
from covey.shown import printable
from covey.stopping import stop_signal
from covey.training.build import Parts, assemble, scorer_of
from covey.training.loop import train

DONE, FAILED, STOPPED = 0, 1, 3
"""Exit codes; stopped: by a signal, after saving."""
LONGEST_ERROR = 300


class LogTracker(Tracker):
    """Notes and evaluations in the log of the process."""

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        """Print where the run is."""
        self.note(f"after step {done} of {steps}, {rollouts} rollouts a step")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Print an evaluation."""
        self.note(f"step {step}: {evaluation.estimates['greedy'].value:.1%}")

    def note(self, text: str) -> None:
        """Print a line."""
        print(printable(text), flush=True)


def main() -> None:
    """Do the job that standard input tells."""
    job = Job(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        code = work(job)
    except KeyboardInterrupt:
        code = STOPPED
    except BaseException as error:
        print(printable(traceback.format_exc()), file=sys.stderr)
        job.path.mkdir(parents=True, exist_ok=True)
        write_outcome(job.path, RunOutcome(key=job.key, state="failed", error=one_line(error)))
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is left to write; leave at once, whatever threads the parts of the run have started.
    os._exit(code)


def _end_with_parent() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(STOPPED)


def one_line(error: BaseException) -> str:
    """Return an error in one line: covey's own as they are, others with their kind."""
    text = " ".join(str(error).split())
    if not isinstance(error, CoveyError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= LONGEST_ERROR else text[:LONGEST_ERROR] + " ..."


def work(job: Job) -> int:
    """Train from where the run stands to its end, or to a signal."""
    torch.set_num_threads(job.threads)
    config = parse_config(tomllib.loads(job.config_toml))
    common = parse_config(tomllib.loads(job.common_toml))
    parts = assemble(config)
    with ExitStack() as stack:
        stack.enter_context(closing(parts.scorer))
        # The common reward judges evaluations, whatever reward the arm learns from.
        if (config.reward, config.scoring) != (common.reward, common.scoring):
            parts = replace(parts, judge=stack.enter_context(closing(scorer_of(common))))
        folder = _folder(job, config, parts)
        sampler = SharedEngine(
            sampler=parts.sampler,
            policy=parts.policy,
            folder=Path(job.shared),
            start=job.start,
            note=folder.path / FIRST_ANSWERS,
        )
        log = LogTracker()
        log.note(f"sampling: {sampler.way}")
        with folder.locked(), stop_signal() as stop:
            train(replace(parts, sampler=sampler), folder, [log], stop)
    if stop.received is not None:
        return STOPPED
    write_outcome(
        job.path,
        RunOutcome(
            key=job.key,
            state="done",
            weights=checkpoint_digest(folder.checkpoints()[-1][1]),
            first_answers=" ".join(json.loads((folder.path / FIRST_ANSWERS).read_text())),
        ),
    )
    return DONE


def _folder(job: Job, config: Config, parts: Parts) -> RunFolder:
    """Open the run, or make it."""
    if (job.path / "config.toml").is_file():
        return RunFolder.open(job.path)
    environment = describe_environment(
        config.seed, str(parts.policy.model.device), torch.get_num_threads()
    )
    environment |= {
        "reward": parts.scorer.identity,
        "judge": parts.judge.identity,
        "reference": parts.reference.identity if parts.reference else None,
        "arm": job.arm,
        "key": job.key,
    }
    return RunFolder.create(job.path, job.config_toml, environment)


if __name__ == "__main__":
    main()
