"""Chooses which checkpoint of a run to load, without importing torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from covey.errors import RunError
from covey.records.best import best_step
from covey.records.files import damage
from covey.records.folder import RunFolder

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
    """Raise RunError if --step is given for a target that is not a run folder."""
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
