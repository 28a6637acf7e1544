"""Where a run goes on, and what becomes of its records after that point.

The rule: a resume goes on from the newest checkpoint that the run has saved, and deletes nothing.
If that checkpoint is missing or damaged it stops, and says which step it can go on from when told
to. Records of later steps are done again; those of before are moved to superseded/1, superseded/2,
and so on, where they keep their names.

No torch here.
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
from covey.run.read_files import Note, Shape, is_missing, read_bytes, scan_lines
from covey.run.record_shapes import EVALUATION, SAVED, STEP

RECORDS = {"steps.jsonl": STEP, "eval.jsonl": EVALUATION, "checkpoints.jsonl": SAVED}
"""Files with a line for each step. The last decides where a run goes on, and is trimmed last."""
KEPT_BY_STEP = (("checkpoints", ""), ("rollouts", ".jsonl"), ("evaluations", ".jsonl"),
                ("review", ".md"))  # fmt: skip
"""Folders with a file or a folder for each step."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins or goes on."""

    step: int = 0
    checkpoint: Path | None = None
    """None: the model that the run was started with."""


def start_of(run: RunFolder, step: int | None = None, *, save_every: int = 0) -> Start:
    """Return where a run goes on: after the step asked for, or after its newest checkpoint.

    RunError if that is not there or not well; it says what can be done. `save_every` tells where a
    run of an older version should have checkpoints.
    """
    found = dict(run.checkpoints())
    if step is not None:
        return _asked_for(run, found, step)
    newest = max(found, default=None)
    missing = _missing(run, newest, save_every)
    if missing:
        raise RunError(f"{missing}; {offer(run)}")
    if newest is None:
        return Start()
    problem = damage(found[newest])
    if problem is not None:
        raise RunError(f"{problem}; {offer(run, before=newest)}")
    return Start(newest, found[newest])


def _asked_for(run: RunFolder, found: dict[int, Path], step: int) -> Start:
    if step == 0:
        return Start()
    if step not in found:
        have = ", ".join(str(each) for each in found) or "none"
        raise RunError(f"--step {step}: {run.path} has no such checkpoint; it has: {have}")
    problem = damage(found[step])
    if problem is not None:
        raise RunError(f"--step {step}: {problem}; {offer(run, before=step)}")
    return Start(step, found[step])


def _missing(run: RunFolder, newest: int | None, save_every: int) -> str | None:
    """Say what should be there and is not: a disk may not be mounted.

    The run says itself what it has saved; where it does not, its records tell.
    """
    saved, recorded = run.saved_steps(), _last_recorded(run)
    last = max(saved or [], default=0)
    if last > (newest or 0):
        what = f"{run.path} has saved a checkpoint of step {last}"
    elif (saved is None and newest is None and recorded > 0) or (
        # Killed while it saved, a run is as far behind as this, and no farther.
        0 < save_every < recorded - (newest or 0)
    ):
        what = f"{run.path} has records up to step {recorded}"
    else:
        return None
    there = "no checkpoint" if newest is None else f"none after step {newest}"
    return f"{what}, but {run.path / 'checkpoints'} holds {there}: mount its disk or put it back"


def _last_recorded(run: RunFolder) -> int:
    steps = [row["step"] for row in run.steps()]
    return max([*steps, *(number for number, _ in run.numbered("rollouts", ".jsonl"))], default=0)


def last_good(run: RunFolder, before: int | None = None, note: Note | None = None) -> Start:
    """Return the newest checkpoint, of those before a step, that is as it was saved.

    Commands that only look give a `note`, which tells what is damaged, and go on with that one.
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
    """Name the command that goes on from the last good checkpoint, or from the start."""
    good = last_good(run, before)
    command = "warmup" if run.environment(lambda text: None).get("kind") == "warmup" else "train"
    what = (
        "there is no other checkpoint; to start again"
        if good.checkpoint is None
        else f"the last good checkpoint is of step {good.step}; to go on from it"
    )
    path = shlex.quote(str(run.path))
    return (
        f"{what} (later records are kept in superseded/): "
        f"covey {command} --resume {path} --step {good.step}"
    )


def put_aside_after(run: RunFolder, start: Start) -> Path | None:
    """Move all that was recorded after the start out of the way; return where to, if there is any.

    From the start on, the evaluation of step 0 comes again as well.
    """
    keep = start.step if start.checkpoint is not None else -1
    aside = _next_aside(run)
    # All are read first: if one of them cannot be, nothing has been moved.
    trimmed = [_trimmed(run.path / name, shape, keep) for name, shape in RECORDS.items()]
    try:
        for folder, suffix in KEPT_BY_STEP:
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
        # What a killed process had not finished is of no use to anyone.
        for leftover in (run.path / "checkpoints").glob(".*.partial"):
            shutil.rmtree(leftover)
    except OSError as error:
        raise DiskError(f"cannot put records aside in {aside}: {error.strerror}") from None
    return aside if aside.exists() else None


def _next_aside(run: RunFolder) -> Path:
    numbered = (run.path / "superseded" / str(number) for number in itertools.count(1))
    return next(path for path in numbered if is_missing(path))


def _trimmed(path: Path, shape: Shape, keep: int) -> tuple[bytes, bytes, bytes]:
    """Return a file, what stays of it, and the rest, which ends with what was never finished.

    Lines up to a step stay, and those that cannot be read.
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
