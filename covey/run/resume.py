"""Where a run resumes, and what happens to its later records.

A run resumes from the newest checkpoint it has saved, and deletes nothing. If that checkpoint is
missing or damaged, the resume stops and names the step that `--step` can resume from. Records of
later steps move to superseded/1, superseded/2 and so on, under the same names. No torch here.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from covey.errors import DiskError, RunError
from covey.run.digests import damage
from covey.run.files import write_bytes
from covey.run.folder import RunFolder
from covey.run.records import (
    EVALUATION,
    SAVED,
    STEP,
    Note,
    Shape,
    is_missing,
    read_bytes,
    scan_lines,
)

RECORDS = {"steps.jsonl": STEP, "eval.jsonl": EVALUATION, "checkpoints.jsonl": SAVED}
"""Files with one line per step. checkpoints.jsonl decides where a run resumes: trimmed last."""
KEPT_BY_STEP = {"checkpoints": "", "rollouts": ".jsonl", "evaluations": ".jsonl",
                "samples": ".md", "review": ".md"}  # fmt: skip
"""Folders with one file or folder per step, and its suffix. Version 0.1 had "review"."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts or resumes."""

    step: int = 0
    checkpoint: Path | None = None
    """None: the model that the run was started with."""


def start_of(run: RunFolder, step: int | None = None, *, save_every: int = 0) -> Start:
    """Return where a run resumes: after the given step, or after its newest checkpoint.

    RunError if that checkpoint is missing or damaged; the message says what to do. `save_every`
    is the number of steps between checkpoints, for runs of versions that did not list them.
    """
    found, asked = dict(run.checkpoints()), ""
    if step is None:
        step = max(found, default=0)
        if missing := _missing(run, step, save_every):
            raise RunError(f"{missing}; {offer(run)}")
    else:
        asked = f"--step {step}: "
        if step and step not in found:
            have = ", ".join(str(each) for each in found) or "none"
            raise RunError(f"{asked}{run.path} has no such checkpoint; it has: {have}")
    if step == 0:
        return Start()
    if problem := damage(found[step]):
        raise RunError(f"{asked}{problem}; {offer(run, before=step)}")
    return Start(step, found[step])


def _missing(run: RunFolder, newest: int, save_every: int) -> str | None:
    """Return which checkpoint is missing, as when a disk is not mounted; None if none is.

    The run lists what it has saved. Without that list, its other records show it.
    """
    saved, recorded = run.saved_steps(), _last_recorded(run)
    last = max(saved or [], default=0)
    if last > newest:
        what = f"{run.path} has saved a checkpoint of step {last}"
    elif (saved is None and newest == 0 and recorded > 0) or (
        # A run that was killed while saving lacks at most one checkpoint.
        0 < save_every < recorded - newest
    ):
        what = f"{run.path} has records up to step {recorded}"
    else:
        return None
    there = f"none after step {newest}" if newest else "no checkpoint"
    return f"{what}, but {run.path / 'checkpoints'} holds {there}: mount its disk or put it back"


def _last_recorded(run: RunFolder) -> int:
    steps = [row["step"] for row in run.steps()]
    return max([*steps, *(number for number, _ in run.numbered("rollouts", ".jsonl"))], default=0)


def last_good(run: RunFolder, before: int | None = None, note: Note | None = None) -> Start:
    """Return the newest undamaged checkpoint, of those before a step if one is given.

    Commands that only read a run pass a `note`, which reports the damaged ones.
    """
    for step, folder in reversed(run.checkpoints()):
        if before is None or step < before:
            problem = damage(folder)
            if problem is None:
                return Start(step, folder)
            if note is not None:
                note(f"{problem}; the checkpoint before it is used")
    return Start()


def offer(run: RunFolder, before: int | None = None) -> str:
    """Return the command that resumes from the last good checkpoint, or from the start."""
    good = last_good(run, before)
    what = (
        "there is no other checkpoint; to start again"
        if good.checkpoint is None
        else f"the last good checkpoint is of step {good.step}; to resume from it"
    )
    command = f"{resume_command(run)} --step {good.step}"
    return f"{what} (later records are kept in superseded/): {command}"


def resume_command(run: RunFolder) -> str:
    """Return the command that resumes a run."""
    return f"covey {'sft' if run.is_sft else 'train'} --resume {shlex.quote(str(run.path))}"


def put_aside_after(run: RunFolder, start: Start) -> Path | None:
    """Move all records after the start to superseded/N. Return that folder; None if none moved.

    A run that starts again from step 0 also repeats the evaluation of step 0.
    """
    keep = start.step if start.checkpoint is not None else -1
    numbered = (run.path / "superseded" / str(number) for number in itertools.count(1))
    aside = next(path for path in numbered if is_missing(path))
    # All files are read first: if one cannot be, nothing has been moved.
    trimmed = [_trimmed(run.path / name, shape, keep) for name, shape in RECORDS.items()]
    try:
        for folder, suffix in KEPT_BY_STEP.items():
            for step, path in run.numbered(folder, suffix):
                if step > keep:
                    (aside / folder).mkdir(parents=True, exist_ok=True)
                    shutil.move(path, aside / folder / path.name)
        for name, (before, kept, removed) in zip(RECORDS, trimmed, strict=True):
            if removed.strip():
                aside.mkdir(parents=True, exist_ok=True)
                write_bytes(aside / name, removed)
            if kept != before:
                write_bytes(run.path / name, kept)
        # Checkpoints that a killed process left unfinished are useless.
        for leftover in (run.path / "checkpoints").glob(".*.partial"):
            shutil.rmtree(leftover)
    except OSError as error:
        raise DiskError(f"cannot put records aside in {aside}: {error.strerror}") from None
    return aside if aside.exists() else None


def _trimmed(path: Path, shape: Shape, keep: int) -> tuple[bytes, bytes, bytes]:
    """Return a file, the lines that stay, and the rest with an unfinished last line.

    Lines up to step `keep` stay, and lines that cannot be read.
    """
    lines = scan_lines(path, shape)
    kept: list[bytes] = []
    removed: list[bytes] = []
    for line in lines:
        later = line.row is not None and line.row["step"] > keep
        (removed if later else kept).append(line.raw + b"\n")
    read = sum(len(line.raw) + 1 for line in lines)
    before = b"" if is_missing(path) else read_bytes(path)
    return before, b"".join(kept), b"".join(removed) + before[read:]
