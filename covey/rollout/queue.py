"""Who samples when: the rollouts that are asked for, sampled, and not yet trained on.

`take(step)` gives the loop a step's rollouts. Let k be `overlap.staleness`, the number of steps by
which generation runs ahead of training:

    k = 0   a step's rollouts are sampled when the loop takes them, with the current weights.
    ahead   the trainer's weights sample k + 1 steps in one call: steps s to s + k with the weights
            of step s - 1. A large call decodes more tokens per second.
    copy    an engine with a copy of the weights samples in the background: step s with the weights
            of step s - 1 - k, while the trainer trains on step s - k.

The step number alone, not timing, decides which weights sample a step, so repeated and resumed runs
are bit-identical. Only `overlap.in_flight` makes timing matter: the engine then loads new weights
at once, even during generation.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from covey.errors import ConfigError, RunError
from covey.policy.preferences import collect_pairs
from covey.records.records import MOST_DATA, read_text
from covey.rollout.collect import Collected, StepRollouts, Ticket, collect_steps
from covey.rollout.filter import Selected, without_stale
from covey.rollout.prompts import prompts_by_id
from covey.stopping import may_be_given_up
from covey.types import Group, Prompt, Rollout

if TYPE_CHECKING:
    import torch

    from covey.records.trackers import Tracker
    from covey.run import Run

    Snapshot = dict[str, torch.Tensor]


CLOSE_SECONDS = 10.0
"""Seconds to wait for the rollout thread to finish when a run ends."""


class RolloutQueue:
    """The rollouts of steps that were asked for; what is not yet trained on is saved."""

    def __init__(self, run: Run, log: Tracker, held: Sequence[StepRollouts] = ()) -> None:
        """Start with the rollouts `held` by a checkpoint."""
        self.run, self.log = run, log
        self.held = {one.ticket.step: one for one in held}
        """Sampled rollouts of the current step and later ones, by step."""
        self.newest = 0
        """The last step whose rollouts were asked for."""
        self.asked: list[Ticket] = []
        """Tickets that are sampled together when the first of them is taken."""
        self.background: _Background | None = None
        if run.config.overlap.mode == "copy" and not run.config.preferences.file:
            self.background = _Background(run, log)

    def take(self, step: int, share: float) -> StepRollouts:
        """Ask for the rollouts of `step`, and perhaps of later steps; return those of `step`.

        `share` is the completed fraction of the run. Groups that are too old for the current policy
        are dropped.
        """
        policy, config, most = (
            self.run.policy,
            self.run.config,
            self.run.config.overlap.max_staleness,
        )
        self.newest = max(self.newest, step - 1, *self.held)
        count = config.rollout.prompts_per_step * config.filter.rounds
        tickets = [
            Ticket(each, policy.version, share, self.run.choice.picks(each, count))
            for each in self._due(step)
        ]
        self._submit(tickets)
        self.newest += len(tickets)
        found = self.held.get(step)
        if found is None and self.background is not None:
            found = self.background.take(step)
        elif found is None:
            collect = collect_pairs if config.preferences.file else collect_steps
            self.held |= {one.ticket.step: one for one in collect(self.run, self.log, self.asked)}
            found = self.held[step]
        # The step's own rollouts stay until the next step: an interrupted step is taken again.
        self.held = {n: one for n, one in self.held.items() if n > step} | {step: found}
        selected = without_stale(found.selected, version=policy.version, max_age=most)
        notes = found.notes
        if selected.stale and not selected.groups:
            notes += (
                f"step {step}: no group to train on: all groups were sampled more than "
                f"overlap.max_staleness = {most} optimizer steps ago",
            )
        return replace(found, selected=selected, notes=notes)

    def _due(self, step: int) -> range:
        """Return the steps whose rollouts are sampled with the weights at the start of `step`."""
        overlap, train = self.run.config.overlap, self.run.config.train
        last = step + overlap.staleness
        if train.budget == "steps":
            last = min(last, train.steps)
        if overlap.mode == "ahead" and step <= self.newest:
            return range(0)  # the last call has sampled this step already
        return range(self.newest + 1, last + 1)

    def _submit(self, tickets: Sequence[Ticket]) -> None:
        policy = self.run.policy
        if self.background is not None:
            self.background.submit(tickets)
            return
        if tickets and not self.run.config.preferences.file:
            self.run.engine.load_weights(policy.weights, policy.version)
        self.asked = [*tickets]

    def in_flight(self, after: int) -> list[StepRollouts]:
        """Return the rollouts of all asked steps later than `after`, once they are sampled.

        The checkpoint of step `after` keeps them: a resumed run cannot sample them again, because
        the weights that sampled them no longer exist.
        """
        if self.run.config.preferences.file:
            return []  # pairs are read again
        held = [one for step, one in sorted(self.held.items()) if step > after]
        taken = {one.ticket.step for one in held}
        more = self.background.pending(after) if self.background is not None else []
        return held + [one for one in more if one.ticket.step not in taken]

    def close(self) -> None:
        """End background work; the engine stays open."""
        if self.background is not None:
            self.background.close()


class _Background:
    """A thread that samples ticket by ticket, with an engine that has its own copy of the weights.

    A ticket is sampled with the weights at the time of `submit`: a snapshot is kept until the
    engine loads it, at most `overlap.staleness` + 1 at a time.
    """

    def __init__(self, run: Run, log: Tracker) -> None:
        self.run, self.log = run, log
        self.in_flight = run.config.overlap.in_flight
        if self.in_flight and not run.engine.info.loads_in_flight:
            raise ConfigError(
                f"config: overlap.in_flight = true does not work with engine.kind = "
                f"{run.config.engine.kind!r}, because this engine cannot load weights while it "
                "generates"
            )
        self.queue: SimpleQueue[tuple[Ticket, Snapshot] | None] = SimpleQueue()
        self.started: dict[int, Future[StepRollouts]] = {}
        self.closed = False
        # A daemon: a stuck engine must not keep the process from ending.
        self.thread = threading.Thread(target=self._produce, name="rollouts", daemon=True)
        self.thread.start()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue tickets, which share one snapshot of the current weights."""
        policy, snapshot = self.run.policy, dict[str, "torch.Tensor"]()
        if self.in_flight:
            self.run.engine.load_weights(policy.weights, policy.version)
        elif tickets:
            snapshot = {name: weight.clone() for name, weight in policy.weights()}
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
        """Wait for all steps later than `after`; a resumed run samples failed ones again."""
        later = [self.started[step] for step in sorted(self.started) if step > after]
        return [found.result() for found in later if found.exception() is None]

    def close(self) -> None:
        """Let the thread end after its current ticket."""
        self.closed = True
        self.queue.put(None)
        self.thread.join(CLOSE_SECONDS)

    def _produce(self) -> None:
        """Sample ticket by ticket; after a failure, all later tickets fail with the same error."""
        idle, failure = time.perf_counter(), None
        while (asked := self.queue.get()) is not None and not self.closed:
            ticket, snapshot = asked
            waited = time.perf_counter() - idle
            try:
                if failure is not None:
                    raise failure
                with self.run.engine_lock:  # an evaluation may use the engine with other weights
                    if not self.in_flight:
                        self.run.engine.load_weights(snapshot.items, ticket.version)
                    (found,) = collect_steps(self.run, self.log, [ticket])
            except BaseException as error:  # `take` raises this error in the trainer
                failure = error
                self.started[ticket.step].set_exception(error)
                continue
            self.started[ticket.step].set_result(replace(found, engine_waited=waited))
            idle = time.perf_counter()


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
