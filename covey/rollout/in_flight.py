"""Save rollouts in flight, which are generated but not yet trained on, in a checkpoint.

A resumed run cannot generate rollouts in flight again, because the weights that generated them no
longer exist. Each line of the file contains the rollouts of one training step. Only the ids of
prompts are saved, because the task has their text.
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
from covey.rollout.prompts import prompts_by_id
from covey.rollout.source import StepRollouts, Ticket
from covey.types import Group, Prompt, Rollout

FILE = "in_flight.jsonl"
_ROLLOUTS: TypeAdapter[tuple[Rollout, ...]] = TypeAdapter(tuple[Rollout, ...])
_COUNTS = [f.name for f in fields(Selected) if f.name != "groups"]


def write_in_flight(folder: Path, steps: Sequence[StepRollouts]) -> None:
    """Write the rollouts of some steps into a checkpoint; if there are none, write no file."""
    if steps:
        text = "".join(json.dumps(_row(step)) + "\n" for step in steps)
        (folder / FILE).write_text(text, encoding="utf-8")


def read_in_flight(
    folder: Path, prompts: Sequence[Prompt], *, seed: int, count: int
) -> list[StepRollouts]:
    """Read the rollouts of a checkpoint; `seed` and `count` determine the prompts of each step."""
    file = folder / FILE
    if not file.exists():
        return []
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [_step(row, prompts, seed, count) for row in rows]
    except KeyError as error:
        why = f"its step has no prompt {error}, so the data or the seed have changed"
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


def _step(row: Mapping[str, Any], prompts: Sequence[Prompt], seed: int, count: int) -> StepRollouts:
    step, version, share, *more = row["ticket"]
    picks = tuple(more[0]) if more else ()  # runs of earlier versions lack this field
    ticket, rounds, ids = Ticket(step, version, share, picks), row["rounds"], row["prompts"]
    known = (
        {prompts[pick].id: prompts[pick] for pick in picks}
        if picks
        else prompts_by_id(prompts, ids, seed=seed, step=step, count=count, rounds=rounds)
    )
    groups = [
        Group(prompt=known[prompt], rollouts=_ROLLOUTS.validate_python(rollouts))
        for prompt, rollouts in zip(ids, row["groups"], strict=True)
    ]
    rollout_seconds, score_seconds = row["seconds"]
    return StepRollouts(
        ticket=ticket,
        collected=Collected(
            groups=tuple(groups),
            errors=tuple(tuple(lines) for lines in row["errors"]),
            rollout_seconds=rollout_seconds,
            score_seconds=score_seconds,
        ),
        selected=Selected(groups=tuple(groups[n] for n in row["selected"]), **row["dropped"]),
        rounds=rounds,
        notes=tuple(row["notes"]),
        engine_waited=row["engine_waited"],
    )
