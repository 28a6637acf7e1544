"""Whether a run's config.toml is still the one that the run was started with."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from covey.run.folder import RunFolder

MOST_NAMED = 8
"""Settings that a line names; the rest are counted."""
NOT_SET = "not set"


def edited_settings(run: RunFolder, environment: Mapping[str, Any]) -> str | None:
    """Name the settings that were edited since the run was started, or None if none were.

    A run of an older version does not say what it was started with.
    """
    before = environment.get("config")
    if before is None:
        return None
    try:
        then = dict(_flat(tomllib.loads(before)))
        now = dict(_flat(tomllib.loads(run.config_file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, RecursionError):
        return None  # who needs the configuration says what is wrong with it
    changed = [
        f"{key} was {then.get(key, NOT_SET)!s} and is {now.get(key, NOT_SET)!s}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key, NOT_SET) != now.get(key, NOT_SET)
    ]
    if not changed:
        return None
    more = f", and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
    named = ", ".join(changed[:MOST_NAMED])
    return f"{run.config_file} was edited since the run was started: {named}{more}"


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting under its dotted name, as text that tells values apart."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", repr(value)
