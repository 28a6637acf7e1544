"""The folder of a new run. A run that failed before its first step is renamed, so that a new run
can use its folder.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from covey.run.files import check_free
from covey.run.folder import FAILURE, RunFolder


def check_new_run(path: Path, instead: str = "") -> None:
    """Raise an error if the folder of a new run has files; called before a model is loaded.

    The text `instead` is the advice in the error message.

    A run that failed before its first step may be replaced.
    """
    if _failed_early(path):
        return
    instead = instead or f"choose another --run, or --resume {path}"
    if _has_no_step(path):
        instead += "; the run there has finished no step: delete the folder if the run has ended"
    check_free(path, instead)


def set_aside_failed(path: Path) -> str:
    """Rename the folder of a run that failed before its first step; return a note about it."""
    if not _failed_early(path):
        return ""
    aside = path.rename(next_run_path(path.parent, f"{path.name}-failed"))
    return f"the run in {path} had failed before its first step; its files are now in {aside}"


def _failed_early(path: Path) -> bool:
    """Whether the run in a folder failed before it finished a step or saved a checkpoint."""
    run = RunFolder(path)
    failed = _has_no_step(path) and (path / FAILURE).is_file()
    return failed and not any((path / "checkpoints").glob("*")) and not run.in_use()


def _has_no_step(path: Path) -> bool:
    return (path / "config.toml").is_file() and not RunFolder(path).steps(lambda text: None)


def next_run_path(parent: Path, label: str) -> Path:
    """Return the first of `label-1`, `label-2`, ... that does not exist."""
    numbered = (parent / f"{label}-{number}" for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())
