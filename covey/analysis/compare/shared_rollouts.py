"""Shared rollouts: completions before the first optimizer step, generated once for all arms.

Before the first optimizer step all runs of a seed have the same weights, prompts and random
numbers, so their completions are the same. The first run that needs them stores them; the others
read them. This holds on a GPU too, where another order of additions could change a token. A file is
named by a digest of everything that decides its contents, so a run that samples differently never
reads another run's rollouts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from covey.engines.protocol import Engine, Question, Sampling
from covey.evaluate.evaluate import EVALUATION_STEP
from covey.run.files import write_text
from covey.run.read_files import read_lines
from covey.training.policy import Policy
from covey.types import Rollout

FORMAT = 2
"""Of the stored rows. It is part of a file's name, so files of another format are never read."""


@dataclass(slots=True, kw_only=True)
class SharedEngine:
    """An engine that shares its completions with other runs until the first optimizer step."""

    engine: Engine
    policy: Policy
    folder: Path
    start: str
    """Digest of everything that decides the starting policy: weights, dtype, device, adapter."""
    names_file: Path
    """Receives the names of the shared rollouts of the first step."""
    names: list[str] = field(default_factory=list)
    """These names."""

    @property
    def way(self) -> str:
        """Backend of the wrapped engine."""
        return self.engine.way

    def generate(
        self,
        questions: Sequence[Question],
        *,
        step: int,
        sampling: Sampling,
        version: int = 0,
        finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        """Return stored rollouts if there are any; otherwise generate and store them."""

        def generate() -> list[list[Rollout]]:
            return self.engine.generate(
                questions, step=step, sampling=sampling, version=version, finished=finished
            )

        # Evaluations always pass version 0, so the policy's own version decides.
        if self.policy.version > 0:
            return generate()
        file = self.folder / f"{self._name(questions, step, sampling)}.jsonl"
        if step != EVALUATION_STEP and file.stem not in self.names:
            self.names.append(file.stem)
            write_text(self.names_file, json.dumps(self.names) + "\n")
        with _locked(file):
            if not file.exists():
                groups = generate()
                _write(file, groups)
                return groups
        groups = _read(file, len(questions))
        if finished is not None:
            for number, rollouts in enumerate(groups):
                for rollout in rollouts:
                    finished(number, rollout)
        return groups

    def _name(self, questions: Sequence[Question], step: int, sampling: Sampling) -> str:
        settings = asdict(sampling)
        del settings["slots"]  # concurrency changes no completion
        evaluation, greedy = step == EVALUATION_STEP, sampling.distribution.temperature == 0.0
        if greedy:
            settings["seed"] = None  # nothing is drawn
        prompts = [(question.prompt.id, question.tokens) for question in questions]
        decisive = json.dumps([FORMAT, self.start, prompts, step, settings], sort_keys=True)
        digest = hashlib.sha256(decisive.encode()).hexdigest()[:16]
        name = "evaluation" if evaluation else f"step-{step}"
        return f"{name}{'' if greedy else f'-seed-{sampling.seed}'}-{digest}"


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Let one process at a time check for a file and write it. A dead process holds no lock."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / f".{file.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(file: Path, groups: Sequence[Sequence[Rollout]]) -> None:
    rows = ({"group": n, **asdict(r)} for n, rollouts in enumerate(groups) for r in rollouts)
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def _read(file: Path, count: int) -> list[list[Rollout]]:
    groups: list[list[Rollout]] = [[] for _ in range(count)]
    for row in read_lines(file):
        number = row.pop("group")
        for name in ("prompt_tokens", "tokens", "trained", "sampler_logp"):
            row[name] = tuple(row[name])
        groups[number].append(Rollout(**row))
    return groups
