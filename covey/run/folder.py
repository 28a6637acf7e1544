"""The run folder: everything that is known of a run, in files that any program can read.

    config.toml             the resolved configuration
    environment.json        versions, machine, git commit, command, seed, config.toml at the start
    steps.jsonl             one line of metrics a step; docs/metrics.md says what each means
    eval.jsonl              one line an evaluation
    evaluations/000050.jsonl   what became of every held-out prompt at the evaluation of step 50
    rollouts/000012.jsonl   every answer of step 12, its text and reward first
    review/000100.md        the highest and lowest answers of step 100, for a person to read
    checkpoints/000050/     a Hugging Face folder with optimizer state; written whole or not at all
    checkpoints.jsonl       one line a checkpoint that was saved, whether or not it is still there
    superseded/1/           records that a resume did again or left behind: resume.py

No torch here: the dashboard reads runs on machines that have none.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import DiskError, RunError
from covey.run.digests import write_digests
from covey.run.files import append_line, check_free, whole_folder, write_text
from covey.run.metrics import current_name
from covey.run.read_files import Note, by_step, read_lines, read_object, to_stderr, usable_lines
from covey.run.record_shapes import ENVIRONMENT, EVALUATION, ITEM, ROLLOUT, SAVED, STEP
from covey.types import Group


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run on disk."""

    path: Path

    @staticmethod
    def create(path: Path, config_toml: str, environment: dict[str, Any]) -> RunFolder:
        """Start a new run. The folder must not exist yet, or be empty."""
        check_new_run(path)
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (path / "rollouts").mkdir(exist_ok=True)
        except OSError as error:
            raise DiskError(f"cannot make {path}: {error.strerror}") from None
        about = {**environment, "config": config_toml}
        write_text(path / "environment.json", json.dumps(about, indent=2) + "\n")
        write_text(path / "checkpoints.jsonl", "")
        write_text(path / "config.toml", config_toml)
        return RunFolder(path)

    @staticmethod
    def open(path: Path) -> RunFolder:
        """Open a run that exists."""
        if not (path / "config.toml").is_file():
            files = ("config.toml", "environment.json")
            whole = [p for p in path.parents if all((p / name).is_file() for name in files)]
            if whole and path.exists():
                raise RunError(f"{path} is a part of a run; give the run itself: {whole[0]}")
            raise RunError(f"{path} is not a run: it has no config.toml")
        return RunFolder(path)

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    def environment(self, note: Note = to_stderr) -> dict[str, Any]:
        """Return where and how the run was started; nothing, and a note, if that is damaged."""
        try:
            return read_object(self.path / "environment.json", ENVIRONMENT)
        except RunError as error:
            note(str(error))
            return {}

    def log_step(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of a step. JSON has no NaN: what is not finite is null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        append_line(self.path / "steps.jsonl", finite)

    def log_evaluation(self, result: dict[str, Any]) -> None:
        """Append an evaluation."""
        append_line(self.path / "eval.jsonl", result)

    def write_table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of a step to name/000012.jsonl; what JSON does not know becomes text."""
        (self.path / name).mkdir(exist_ok=True)
        text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
        write_text(self.path / name / f"{step:06d}.jsonl", text)

    def items(self, step: int, note: Note = to_stderr) -> list[dict[str, Any]]:
        """Return what became of every held-out prompt at the evaluation after a step."""
        return usable_lines(self.path / "evaluations" / f"{step:06d}.jsonl", ITEM, note)

    def steps(self, note: Note = to_stderr) -> list[dict[str, Any]]:
        """Return the metrics of every step that can be read, under their names of today."""
        path = self.path / "steps.jsonl"
        rows = by_step(path, usable_lines(path, STEP, note), note)
        return [{current_name(name): value for name, value in row.items()} for row in rows]

    def evaluations(self, note: Note = to_stderr) -> list[dict[str, Any]]:
        """Return every evaluation that can be read."""
        path = self.path / "eval.jsonl"
        return by_step(path, usable_lines(path, EVALUATION, note), note)

    def write_rollouts(
        self, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]
    ) -> None:
        """Write the rollouts of a step."""
        self.write_table("rollouts", step, self.rollout_rows(groups, advantages))

    @staticmethod
    def rollout_rows(
        groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]
    ) -> list[dict[str, Any]]:
        """Return the rollouts of a step as rows, with what a person reads first."""
        rows = []
        for group, values in zip(groups, advantages, strict=True):
            for rollout, advantage in zip(group.rollouts, values, strict=True):
                row = {name: getattr(rollout, name) for name in rollout.__slots__}
                lead = {
                    "prompt": group.prompt.text,
                    "target": group.prompt.target,
                    "text": row.pop("text"),
                    "reward": row.pop("reward"),
                    "success": row.pop("success"),
                    "parts": dict(row.pop("parts")),
                    "advantage": advantage,
                    "finish": row.pop("finish"),
                }
                if all(row["trained"]):
                    row["trained"] = True
                # With this the rollouts of a file can be scored again.
                row |= {"task": group.prompt.task, "info": dict(group.prompt.info)}
                rows.append({**lead, **row})
        return rows

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the rollouts of a step; none: they were not kept. RunError if one is damaged."""
        rows = read_lines(self.path / "rollouts" / f"{step:06d}.jsonl", ROLLOUT)
        return [_current(row) for row in rows]

    def usable_rollouts(self, step: int, note: Note = to_stderr) -> list[dict[str, Any]]:
        """Return the rollouts of a step that can be read, or say why there are none."""
        rows = usable_lines(self.path / "rollouts" / f"{step:06d}.jsonl", ROLLOUT, note)
        return [_current(row) for row in rows] or self.answers(step)

    def answers(self, step: int) -> list[dict[str, Any]]:
        """Return the answers of a step, or say why there are none and of which steps there are."""
        rows = self.rollouts(step)
        if rows:
            return rows
        if self.environment().get("kind") in ("sft", "warmup"):
            raise RunError(
                f"{self.path} is a warm-up: it learns from solutions, samples no answers"
            )
        steps = sorted(number for number, _ in self.numbered("rollouts", ".jsonl"))
        kept = (
            f"it has steps {steps[0]} to {steps[-1]}"
            if steps
            else "it has none (save.rollouts = false keeps none)"
        )
        raise RunError(f"{self.path} has no answers of step {step}; {kept}")

    def numbered(self, folder: str, suffix: str) -> list[tuple[int, Path]]:
        """Return what a folder holds of each step, oldest first; files of others are let be."""
        try:
            found = list((self.path / folder).iterdir())
        except OSError:  # none, or something else of that name
            return []
        ours = re.compile(rf"([0-9]{{6,}}){re.escape(suffix)}")
        matches = ((ours.fullmatch(path.name), path) for path in found)
        return sorted((int(match[1]), path) for match, path in matches if match)

    def write_review(self, step: int, page: str) -> None:
        """Write the page of a step's best and worst answers."""
        (self.path / "review").mkdir(exist_ok=True)
        write_text(self.path / "review" / f"{step:06d}.md", page)

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """Give a folder to fill, which becomes the checkpoint of `step` once it is complete."""
        with whole_folder(self.path / "checkpoints" / f"{step:06d}") as folder:
            yield folder
            write_digests(folder)
        # Last: what is written down as saved has been there, and if it is not, it was taken away.
        append_line(self.path / "checkpoints.jsonl", {"step": step})

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return the complete checkpoints, oldest first; whether they are well is not looked at."""
        return self.numbered("checkpoints", "")

    def saved_steps(self, note: Note = to_stderr) -> list[int] | None:
        """Return of which steps checkpoints were saved; None: the run does not say.

        That is so of a run of an older version, and of one whose list is damaged.
        """
        told: list[str] = []
        path = self.path / "checkpoints.jsonl"
        rows = usable_lines(path, SAVED, told.append)
        for text in told:
            note(text)
        return None if told or not path.exists() else [row["step"] for row in rows]

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all but the newest `keep`."""
        for _, folder in self.checkpoints()[:-keep]:
            shutil.rmtree(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process alone. The lock goes with the process, however it ends."""
        path = self.path / ".lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            why = f"{path} cannot be locked: {error.strerror}"
            raise RunError(f"{why}; remove it if no other process uses the run") from None
        with os.fdopen(handle, "rb", closefd=True) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"{self.path} is in use by another process") from None
            yield


def _current(row: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded rollout under its names of today: 0.1 called the target "answer"."""
    return {"target" if name == "answer" else name: value for name, value in row.items()}


def check_new_run(path: Path) -> None:
    """Refuse a folder that a run cannot be made in; commands ask before they load anything."""
    check_free(path, f"choose another --run, or --resume {path}")


def next_run_path(parent: Path, label: str) -> Path:
    """Return the first of `label-1`, `label-2`, ... that does not exist."""
    numbered = (parent / f"{label}-{number}" for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


def list_runs(parent: Path) -> list[RunFolder]:
    """Return the runs in a folder, by name."""
    return [RunFolder(p.parent) for p in sorted(parent.glob("*/config.toml"))]
