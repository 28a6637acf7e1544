"""Rollouts in flight in a checkpoint: generated, and not yet trained on.

The weights that generated them are gone when a run resumes, so they are saved as they are. A line
is a training step. Prompts are saved by id: the data has the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from covey.errors import RunError
from covey.rollout.collect import Collected
from covey.rollout.filter import Selected
from covey.rollout.source import StepRollouts, Ticket
from covey.types import Group, Prompt, Rollout

FILE = "in_flight.jsonl"
_ROLLOUTS: TypeAdapter[tuple[Rollout, ...]] = TypeAdapter(tuple[Rollout, ...])
_COUNTS = [f.name for f in fields(Selected) if f.name != "groups"]


def write_in_flight(folder: Path, steps: Sequence[StepRollouts]) -> None:
    """Write the rollouts of some steps into a checkpoint; no file if there are none."""
    if steps:
        text = "".join(json.dumps(_row(step)) + "\n" for step in steps)
        (folder / FILE).write_text(text, encoding="utf-8")


def read_in_flight(folder: Path, prompts: Sequence[Prompt]) -> list[StepRollouts]:
    """Read the rollouts in a checkpoint. They are of these prompts."""
    file = folder / FILE
    if not file.exists():
        return []
    known = {prompt.id: prompt for prompt in prompts}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [_step(json.loads(line), known) for line in lines]
    except KeyError as error:
        why = f"it has rollouts of prompt {error}, which the data does not have"
    except (OSError, ValueError, TypeError, ValidationError) as error:
        why = str(error)
    raise RunError(f"checkpoint {folder} cannot be read: {FILE}: {why}")


def _row(step: StepRollouts) -> dict[str, Any]:
    collected, selected = step.collected, step.selected
    places = {id(group): place for place, group in enumerate(collected.groups)}
    return {
        "ticket": step.ticket,
        "rounds": step.rounds,
        "notes": step.notes,
        "engine_waited": step.engine_waited,
        "seconds": [collected.rollout_seconds, collected.score_seconds],
        "errors": collected.errors,
        "selected": [places[id(group)] for group in selected.groups],
        "dropped": {name: getattr(selected, name) for name in _COUNTS},
        "prompts": [group.prompt.id for group in collected.groups],
        "groups": [[asdict(rollout) for rollout in group.rollouts] for group in collected.groups],
    }


def _step(row: Mapping[str, Any], known: Mapping[str, Prompt]) -> StepRollouts:
    groups = [
        Group(prompt=known[prompt], rollouts=_ROLLOUTS.validate_python(rollouts))
        for prompt, rollouts in zip(row["prompts"], row["groups"], strict=True)
    ]
    rollout_seconds, score_seconds = row["seconds"]
    return StepRollouts(
        ticket=Ticket(*row["ticket"]),
        collected=Collected(
            groups=tuple(groups),
            errors=tuple(tuple(lines) for lines in row["errors"]),
            rollout_seconds=rollout_seconds,
            score_seconds=score_seconds,
        ),
        selected=Selected(groups=tuple(groups[n] for n in row["selected"]), **row["dropped"]),
        rounds=row["rounds"],
        notes=tuple(row["notes"]),
        engine_waited=row["engine_waited"],
    )
