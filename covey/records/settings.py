"""Compares the settings of two runs, and finds settings of a run that were edited after it
started."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from covey.errors import RunError
from covey.notices import notice
from covey.records.folder import CHANGES, RunFolder
from covey.records.records import ANY_OBJECT, Note, read_text, usable_lines

MOST_NAMED = 8
"""Maximum number of edited settings that a message lists by name."""


def edited_settings(run: RunFolder, environment: Mapping[str, Any]) -> str | None:
    """Return a message about settings edited since the run started; None if none were edited.

    Settings that the user changed when resuming the run do not count as edited. Return None for
    runs of older Covey versions, which did not record their settings at the start.
    """
    if environment.get("config") is None:
        return None
    try:
        then = tomllib.loads(environment["config"])
        now = tomllib.loads(read_text(run.config_file))
        resumes = usable_lines(run.path / CHANGES, ANY_OBJECT, notice)
    except (RunError, ValueError, RecursionError):
        return None  # loading the configuration reports the error
    known = {key for resume in resumes for key in resume.get("settings", ())}
    changed = [
        f"{key} was {setting_text(old)} and is {setting_text(new)}"
        for key, (old, new) in changed_settings(then, now).items()
        if key not in known
    ]
    if not changed:
        return None
    more = f", and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
    named = ", ".join(changed[:MOST_NAMED])
    return f"{run.config_file} was edited since the run was started: {named}{more}"


def reward_of_run(run: RunFolder, note: Note = notice) -> str:
    """Return the identity of a run's reward, as of its start or of the last allowed change."""
    changes = usable_lines(run.path / CHANGES, ANY_OBJECT, note)
    changed = [change["reward"][1] for change in changes if change.get("reward")]
    return str(changed[-1] if changed else run.environment(note).get("reward") or "")


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of every setting, such as `train.steps`, and its value."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changed_settings(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of each changed setting, with None for a missing value.

    >>> changed_settings({"train": {"steps": 5, "epochs": 1}}, {"train": {"steps": 7, "epochs": 1}})
    {'train.steps': (5, 7)}
    """
    old, new = dict(flat_settings(before)), dict(flat_settings(after))
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def setting_text(value: Any) -> str:
    """Return the value of a setting as text."""
    return "not set" if value is None else repr(value)
