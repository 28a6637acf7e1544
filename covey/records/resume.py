"""Chooses the checkpoint from which a run resumes, and moves aside the files of later steps.

By default, a run resumes from the newest checkpoint that it saved. If the newest checkpoint is
missing or damaged, Covey stops and prints the command that resumes from an older checkpoint.
Resuming deletes no logs and no complete checkpoints, but moves files of later steps to the folder
superseded/1. The second resume moves files to superseded/2, and so on. This module does not import
torch.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from covey.errors import DiskError, RunError
from covey.records.files import damage, write_bytes
from covey.records.folder import RunFolder
from covey.records.records import (
    EVALUATION,
    SAVED,
    STEP,
    Note,
    Shape,
    is_missing,
    read_bytes,
    scan_lines,
)
from covey.records.watch import best_step

RECORDS = {"steps.jsonl": STEP, "eval.jsonl": EVALUATION, "checkpoints.jsonl": SAVED}
"""JSON Lines files in which each line belongs to a step. A resume trims checkpoints.jsonl last,
because this file determines the step to resume from."""
KEPT_BY_STEP = {"checkpoints": "", "rollouts": ".jsonl", "evaluations": ".jsonl", "samples": ".md"}
"""Maps folder names to file suffixes. Each of these folders has one file or subfolder per step."""


@dataclass(frozen=True, slots=True)
class Start:
    """The step and checkpoint from which a run starts or resumes."""

    step: int = 0
    checkpoint: Path | None = None
    """The checkpoint to load; None means that the run starts from its initial model."""


def start_of(run: RunFolder, step: int | None = None, *, save_every: int = 0) -> Start:
    """Return the checkpoint to resume from: the checkpoint of `step`, or the newest checkpoint.

    If the checkpoint is missing or damaged, raise RunError with advice on what to do. `save_every`
    is the number of steps between checkpoints. Only runs of older Covey versions, which have no
    checkpoints.jsonl, need `save_every`.
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
            raise RunError(
                f"--step {step}: the run {run.path} has no checkpoint of this step; it has "
                f"checkpoints of these steps: {have}"
            )
    if step == 0:
        return Start()
    if problem := damage(found[step]):
        raise RunError(f"{asked}{problem}; {offer(run, before=step)}")
    return Start(step, found[step])


def _missing(run: RunFolder, newest: int, save_every: int) -> str | None:
    """Return a message if the last saved checkpoint is missing, otherwise None.

    A checkpoint listed in checkpoints.jsonl may be missing because a disk is not mounted. For a run
    without checkpoints.jsonl, the logged steps and rollouts show which checkpoints the run saved.
    """
    saved = run.saved_steps()
    logged = [row["step"] for row in run.steps()]
    recorded = max([*logged, *(n for n, _ in run.numbered("rollouts", ".jsonl"))], default=0)
    last = max(saved or [], default=0)
    if last > newest:
        what = f"{run.path} saved a checkpoint of step {last}"
    elif (saved is None and newest == 0 and recorded > 0) or (
        # A run that was killed while saving lacks at most one checkpoint.
        0 < save_every < recorded - newest
    ):
        what = f"{run.path} has records up to step {recorded}"
    else:
        return None
    there = f"no checkpoint after step {newest}" if newest else "no checkpoint"
    where = run.path / "checkpoints"
    return f"{what}, but {where} contains {there}; mount the folder's disk, or restore the folder"


def last_good(run: RunFolder, before: int | None = None, note: Note | None = None) -> Start:
    """Return the newest undamaged checkpoint.

    If `before` is not None, only checkpoints of steps before `before` are considered. `note` is
    called with a message about each damaged checkpoint.
    """
    for step, folder in reversed(run.checkpoints()):
        if before is None or step < before:
            problem = damage(folder)
            if problem is None:
                return Start(step, folder)
            if note is not None:
                note(f"{problem}; the previous checkpoint is used")
    return Start()


def offer(run: RunFolder, before: int | None = None) -> str:
    """Return a message with the command that resumes from the newest undamaged checkpoint."""
    good = last_good(run, before)
    what = (
        "there is no other checkpoint; to start again"
        if good.checkpoint is None
        else f"the last good checkpoint is of step {good.step}; to resume from it"
    )
    command = f"{resume_command(run)} --step {good.step}"
    return f"{what} (later records are kept in superseded/): {command}"


def resume_command(run: RunFolder) -> str:
    return f"covey {'sft' if run.is_sft else 'train'} --resume {shlex.quote(str(run.path))}"


def put_aside_after(run: RunFolder, start: Start) -> Path | None:
    """Move the logs and checkpoints of steps after `start` to a new folder superseded/N.

    Return the new folder, or None if no files had to be moved. If the run restarts at step 0, the
    evaluation of step 0 is moved too, because the run repeats this evaluation.
    """
    keep = start.step if start.checkpoint is not None else -1
    numbered = (run.path / "superseded" / str(number) for number in itertools.count(1))
    aside = next(path for path in numbered if is_missing(path))
    # All files are read first, so that nothing is moved if one of them cannot be read.
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
        raise DiskError(
            f"cannot move the records of later steps to {aside}: {error.strerror}"
        ) from None
    return aside if aside.exists() else None


def _trimmed(path: Path, shape: Shape, keep: int) -> tuple[bytes, bytes, bytes]:
    """Return the content of a file as three byte strings: all lines, lines to keep, lines to move.

    The lines to move are the lines of steps after `keep`, and an unfinished last line. Unreadable
    lines are kept.
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


# Chooses which checkpoint of a run to load, without importing torch.


ONLY_FOR_TRAINING = ("optimizer.safetensors", "reference.safetensors", "covey.json")
"""Files of a checkpoint that only training needs."""


def run_around(path: Path) -> Path | None:
    """Return the run folder that `path` is or belongs to; None if `path` is neither a run nor a
    checkpoint."""
    return next((p for p in (path, path.parent.parent) if (p / "config.toml").is_file()), None)


def weights_of(target: Path, command: str, step: str | None = None) -> Path:
    """Return the checkpoint to load; `target` is a checkpoint or a run folder.

    For a run folder, return the checkpoint of `step`, which is a number or "best", or the newest
    checkpoint if `step` is None. A checkpoint as target has no other steps.

    Raises RunError if the checkpoint is damaged. `command` is a command line with a placeholder
    `{}` for the checkpoint. The error message suggests this command line with an intact checkpoint.
    """
    found = run_around(target)
    assert found is not None, "callers check run_around first"
    run = RunFolder(found)
    if found != target:
        check_no_step(target, step)
    chosen = target if found != target else _checkpoint(run, step)
    problem = damage(chosen, but=ONLY_FOR_TRAINING)
    if problem is None:
        return chosen
    others = [folder for _, folder in reversed(run.checkpoints()) if folder != chosen]
    good = next((folder for folder in others if not damage(folder, but=ONLY_FOR_TRAINING)), None)
    if good is None:
        raise RunError(f"{problem}; the run has no other checkpoint to use instead")
    instead = command.format(shlex.quote(str(good)))
    raise RunError(f"{problem}; to use the last good checkpoint, run: {instead}")


def check_no_step(target: object, step: str | None) -> None:
    if step is not None:
        raise RunError(
            f"--step {step} chooses a checkpoint of a run, but {target} is not a run folder; leave "
            "out --step"
        )


def _checkpoint(run: RunFolder, step: str | None) -> Path:
    checkpoints = dict(run.checkpoints())
    if not checkpoints:
        saved = max(run.saved_steps() or [], default=None)
        if saved is None:
            raise RunError(f"the run {run.path} has no checkpoint yet")
        folder = run.path / "checkpoints"
        raise RunError(
            f"the run {run.path} saved a checkpoint of step {saved}, but the folder {folder} has "
            "no checkpoints; mount the disk of this folder, or restore the folder"
        )
    kept = ", ".join(str(s) for s in checkpoints)
    if step is None:
        return checkpoints[max(checkpoints)]
    wanted = best_step(run) if step == "best" else int(step) if step.isdecimal() else None
    if wanted is None and step == "best":
        raise RunError(
            f"--step best: the run {run.path} has no best checkpoint, because save.best names no "
            f"metric that was measured; it has checkpoints of steps {kept}"
        )
    if wanted not in checkpoints:
        raise RunError(
            f"--step {step}: the run {run.path} has no checkpoint of this step; it has checkpoints "
            f"of steps {kept}"
        )
    return checkpoints[wanted]
