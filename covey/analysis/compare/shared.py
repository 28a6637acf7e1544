"""Answers that several runs start from, sampled once.

Before the first optimizer step all runs of a seed have the same weights, ask the same prompts and
draw the same random numbers, so their answers are the same: the first run that needs them writes
them down, and the others read. That holds on a GPU too, where numbers added up in another order
may come out otherwise. What is stored is named by all that decides it; a run that samples in
another way needs a file of another name and so never gets what is not its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from covey.engines.protocol import Engine, Question, Sampling
from covey.evaluate.evaluate import EVALUATION_STEP
from covey.run.files import write_text
from covey.run.records import read_lines
from covey.training.policy import Policy
from covey.types import Rollout


@dataclass(slots=True, kw_only=True)
class SharedEngine:
    """A sampler whose answers before the first optimizer step are kept for others."""

    sampler: Engine
    policy: Policy
    folder: Path
    start: str
    """What decides the starting policy: digest of its weights, its type, its adapter."""
    note: Path
    """Where the names of the answers of the first step are written down."""
    used: list[str] = field(default_factory=list)
    """These names."""

    @property
    def way(self) -> str:
        """How answers that are not stored are written."""
        return self.sampler.way

    def generate(
        self,
        questions: Sequence[Question],
        *,
        step: int,
        sampling: Sampling,
        version: int = 0,
        finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        """Return stored answers if there are any; otherwise sample, and store."""

        def sample() -> list[list[Rollout]]:
            return self.sampler.generate(
                questions, step=step, sampling=sampling, version=version, finished=finished
            )

        # Evaluations always say version 0: what counts is how far the policy is.
        if self.policy.version > 0:
            return sample()
        file = self.folder / f"{self._name(questions, step, sampling)}.jsonl"
        if step != EVALUATION_STEP and file.stem not in self.used:
            self.used.append(file.stem)
            write_text(self.note, json.dumps(self.used) + "\n")
        with _alone(file):
            if not file.exists():
                answers = sample()
                _write(file, answers)
                return answers
        answers = _read(file, len(questions))
        if finished is not None:
            for number, rollouts in enumerate(answers):
                for rollout in rollouts:
                    finished(number, rollout)
        return answers

    def _name(self, questions: Sequence[Question], step: int, sampling: Sampling) -> str:
        settings = asdict(sampling)
        del settings["slots"]  # how many are written at once changes nothing
        evaluation, greedy = step == EVALUATION_STEP, sampling.distribution.temperature == 0.0
        if greedy:
            settings["seed"] = None  # nothing is drawn
        asked = [(question.prompt.id, question.tokens) for question in questions]
        name = "evaluation" if evaluation else f"step-{step}"
        tail = "" if greedy else f"-seed-{sampling.seed}"
        return f"{name}{tail}-{_digest([self.start, asked, step, settings])[:16]}"


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Let one process at a time look for a file and write it. The lock ends with its process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / f".{file.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(file: Path, answers: Sequence[Sequence[Rollout]]) -> None:
    rows = ({"question": n, **asdict(r)} for n, rollouts in enumerate(answers) for r in rollouts)
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def _read(file: Path, questions: int) -> list[list[Rollout]]:
    answers: list[list[Rollout]] = [[] for _ in range(questions)]
    for row in read_lines(file):
        number = row.pop("question")
        for name in ("prompt_tokens", "tokens", "trained", "sampler_logp"):
            row[name] = tuple(row[name])
        answers[number].append(Rollout(**row))
    return answers
