"""Overlapped generation: generates rollouts up to a fixed number of steps ahead of training.

Let k be the staleness, the number of steps by which generation runs ahead of training. Overlap has
two modes:

    ahead   the trainer's weights generate the rollouts of k + 1 steps in one call: steps s to s + k
            with the weights of step s - 1. A large call decodes more tokens per second.
    copy    an engine with a copy of the weights generates in the background: step s with the
            weights of step s - 1 - k, while the trainer trains on step s - k.

The step number alone, not timing, determines which weights generate a step's rollouts. Without
`overlap.in_flight`, repeated and resumed runs are bit-identical. Timing matters only with
`overlap.in_flight`, because this setting makes the engine load new weights immediately, even during
generation.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from covey.errors import ConfigError, RunError
from covey.rollout.collect import Collected
from covey.rollout.filter import Selected, without_stale
from covey.rollout.prompts import prompts_by_id
from covey.rollout.source import RolloutSource, StepRollouts, Ticket, collect_steps
from covey.run.records import MOST_DATA, read_text
from covey.stopping import may_be_given_up
from covey.types import Group, Prompt, Rollout

if TYPE_CHECKING:
    import torch

    from covey.engines.protocol import WeightSource
    from covey.rollout.prompts import PromptChoice
    from covey.run.trackers import Tracker
    from covey.training.build import Parts

    Snapshot = dict[str, torch.Tensor]


CLOSE_SECONDS = 10.0
"""Seconds to wait for the rollout thread to finish when a run ends."""


class CopySource:
    """Collects groups in a thread, with an engine that has its own copy of the weights.

    The thread processes requests for rollouts, called tickets, one by one. A ticket requests the
    rollouts of one step. A step's rollouts are generated with the trainer's weights at the time
    when the step's ticket was queued. A snapshot is a copy of the trainer's weights, which is kept
    until the engine loads it. At most `overlap.staleness` + 1 snapshots exist at a time.
    """

    def __init__(self, parts: Parts, reporter: Tracker) -> None:
        self.parts, self.reporter = parts, reporter
        self.in_flight = parts.config.overlap.in_flight
        if self.in_flight and not parts.engine.info.loads_in_flight:
            raise ConfigError(
                f"config: overlap.in_flight = true does not work with engine.kind = "
                f"{parts.config.engine.kind!r}, because this engine cannot load weights while it "
                "generates"
            )
        self.queue: SimpleQueue[tuple[Ticket, Snapshot] | None] = SimpleQueue()
        self.started: dict[int, Future[StepRollouts]] = {}
        """Maps each requested step to its rollouts, until the training loop takes the rollouts."""
        self.closed = False
        self.thread = threading.Thread(target=self._produce, name="rollouts", daemon=True)
        self.thread.start()

    def start(self, tickets: Sequence[Ticket], weights: WeightSource, version: int) -> None:
        """Queue requests for rollouts; all requests use one copy of the current weights.

        With `in_flight`, the engine loads the weights immediately, even during generation.
        """
        snapshot: Snapshot = {}
        if self.in_flight:
            self.parts.engine.load_weights(weights, version)
        elif tickets:
            snapshot = {name: weight.clone() for name, weight in weights()}
        for ticket in tickets:
            self.started[ticket.step] = Future()
            self.queue.put((ticket, snapshot))

    def take(self, step: int) -> StepRollouts:
        """Wait for the rollouts of a step."""
        with may_be_given_up():
            found = self.started[step].result()
        del self.started[step]
        return found

    def pending(self, after: int) -> list[StepRollouts]:
        """Wait for and return the rollouts of all requested steps later than `after`, except failed
        steps.

        A resumed run generates the rollouts of failed steps again.
        """
        later = [self.started[step] for step in sorted(self.started) if step > after]
        return [found.result() for found in later if found.exception() is None]

    def close(self) -> None:
        """Let the rollout thread end after its current request."""
        self.closed = True
        self.queue.put(None)
        self.thread.join(CLOSE_SECONDS)

    def _produce(self) -> None:
        """Process queued requests for rollouts until the source is closed.

        After a request has failed, all later requests fail with the same error.
        """
        idle, failure = time.perf_counter(), None
        while (asked := self.queue.get()) is not None and not self.closed:
            ticket, snapshot = asked
            waited = time.perf_counter() - idle
            try:
                if failure is not None:
                    raise failure
                found = replace(self._collect(ticket, snapshot), engine_waited=waited)
            except BaseException as error:  # `take` raises this error in the trainer
                failure = error
                self.started[ticket.step].set_exception(error)
                continue
            self.started[ticket.step].set_result(found)
            idle = time.perf_counter()

    def _collect(self, ticket: Ticket, snapshot: Snapshot) -> StepRollouts:
        # An evaluation may use the engine in between, with other weights.
        with self.parts.engine_lock:
            if not self.in_flight:
                self.parts.engine.load_weights(snapshot.items, ticket.version)
            (found,) = collect_steps(self.parts, self.reporter, [ticket])
        return found


@dataclass(slots=True, kw_only=True)
class RolloutQueue:
    """Decides when to start generating a step's rollouts, and which rollouts a checkpoint saves."""

    parts: Parts
    source: RolloutSource
    choice: PromptChoice
    """Chooses prompts by a curriculum, if the run has a curriculum."""
    held: dict[int, StepRollouts] = field(default_factory=dict)
    """Rollouts of the current step, and rollouts restored from a checkpoint, by step."""
    newest: int = 0
    """The last step whose rollouts were requested."""

    def take(self, step: int, share: float) -> StepRollouts:
        """Request rollouts of `step` and perhaps of later steps; return the rollouts of `step`.

        Groups that are too old for the current policy are dropped.
        """
        policy, config = self.parts.policy, self.parts.config
        self.newest = max(self.newest, step - 1, *self.held)
        count = config.rollout.prompts_per_step * config.filter.rounds
        tickets = [
            Ticket(each, policy.version, share, self.choice.picks(each, count))
            for each in self._to_start(step)
        ]
        self.source.start(tickets, policy.weights, policy.version)
        self.newest += len(tickets)
        found = self.held.get(step) or self.source.take(step)
        self.held = {n: one for n, one in self.held.items() if n > step} | {step: found}
        most = config.overlap.max_staleness
        selected = without_stale(found.selected, version=policy.version, max_age=most)
        notes = found.notes
        if selected.stale and not selected.groups:
            notes += (
                f"step {step}: no group to train on: all groups were sampled more than "
                f"overlap.max_staleness = {most} optimizer steps ago",
            )
        return replace(found, selected=selected, notes=notes)

    def _to_start(self, step: int) -> range:
        """Return the steps whose rollouts are generated with the weights at the start of `step`."""
        overlap, train = self.parts.config.overlap, self.parts.config.train
        last = step + overlap.staleness
        if train.budget == "steps":
            last = min(last, train.steps)
        if overlap.mode == "ahead" and step <= self.newest:
            return range(0)  # the last call has generated this step already
        return range(self.newest + 1, last + 1)

    def in_flight(self, after: int) -> list[StepRollouts]:
        """Return rollouts of requested steps later than `after`, to save in a checkpoint."""
        held = [one for step, one in sorted(self.held.items()) if step > after]
        taken = {one.ticket.step for one in held}
        return held + [p for p in self.source.pending(after) if p.ticket.step not in taken]


# Save rollouts in flight, which are generated but not yet trained on, in a checkpoint.
#
# A resumed run cannot generate rollouts in flight again, because the weights that generated them
# no longer exist. Each line of the file contains the rollouts of one training step. Only the ids
# of prompts are saved, because the task has their text.

FILE = "in_flight.jsonl"
_ROLLOUTS: TypeAdapter[tuple[Rollout, ...]] = TypeAdapter(tuple[Rollout, ...])
_COUNTS = [f.name for f in fields(Selected) if f.name != "groups"]


def write_in_flight(folder: Path, steps: Sequence[StepRollouts]) -> None:
    """Write the rollouts of `steps` into a checkpoint; if `steps` is empty, write no file."""
    if steps:
        text = "".join(json.dumps(_row(step)) + "\n" for step in steps)
        (folder / FILE).write_text(text, encoding="utf-8")


def read_in_flight(
    folder: Path, prompts: Sequence[Prompt], *, seed: int, count: int
) -> list[StepRollouts]:
    """Read rollouts from a checkpoint; `seed` and `count` determine each step's prompts."""
    file = folder / FILE
    if not file.exists():
        return []
    try:
        rows = [json.loads(line) for line in read_text(file, MOST_DATA).splitlines()]
        return [_step(row, prompts, seed, count) for row in rows]
    except KeyError as error:
        why = f"its step has no prompt {error}, so the data or the seed have changed"
    except (RunError, ValueError, TypeError, OverflowError, ValidationError) as error:
        why = str(error)
    except RecursionError:
        why = "it is nested too deeply"
    raise RunError(f"checkpoint {folder} cannot be read, because {FILE} is invalid: {why}")


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
