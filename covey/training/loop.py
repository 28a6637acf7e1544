"""The training loop, shared by reinforcement learning and supervised training:

    resume -> evaluate at step 0 -> (step -> evaluate -> save), until the budget or a signal

The step of reinforcement learning is in rl.py, that of supervised training in sft.py. Random
numbers depend only on their address, such as (seed, step), so the loop has little state beside the
policy, and saves both. A resumed run therefore gives the same results as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from covey.errors import CoveyError, RunError
from covey.run.folder import RunFolder
from covey.run.resume import Start, start_of
from covey.run.trackers import JsonlTracker, Tracker, Trackers
from covey.run.trackers.choose import make_trackers
from covey.stopping import GivenUp, StopSignal
from covey.training import checkpoint
from covey.training.budget import Budget
from covey.training.build import Components, Parts
from covey.training.checkpoint import State
from covey.training.garbage import freeze_garbage_collector
from covey.training.measure import measure
from covey.training.rl import Reinforcement
from covey.training.watch import Watch


class Trainer(Protocol):
    """A kind of training, RL or SFT: its step and settings, which the loop calls."""

    @property
    def parts(self) -> Components:
        """The parts of the run."""

    @property
    def budget(self) -> Budget:
        """The length of the run."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts, or of SFT examples, in a step."""

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations; 0 means no evaluations."""

    def fresh(self) -> State:
        """Return the state at the start of a new run."""

    def begin(self, checkpoint: Path | None, log: Tracker) -> None:
        """Prepare for the first step after the given checkpoint, or of a new run if None."""

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Take training step number `state.step`, and log it."""

    def save(self, folder: Path, step: int) -> None:
        """Add files to the checkpoint of a step that a resumed run needs beside the state."""

    def close(self) -> None:
        """End work in the background."""


def train(
    parts: Parts,
    run: RunFolder,
    trackers: Sequence[Tracker],
    stop: StopSignal,
    start: Start | None = None,
) -> int:
    """Train with RL until the budget is used up or a signal comes; return the last saved step."""
    return run_loop(Reinforcement(parts), run, trackers, stop, start)


@freeze_garbage_collector()
def run_loop(
    trainer: Trainer,
    run: RunFolder,
    trackers: Sequence[Tracker],
    stop: StopSignal,
    start: Start | None = None,
) -> int:
    """Train from `start`, or from the newest checkpoint; return the last saved step."""
    parts = trainer.parts
    watch = Watch(parts.config)
    log = Trackers([*(_sinks(parts, run, trackers) if parts.world.is_main else []), watch])
    start = start or start_of(run, save_every=parts.config.save.every)
    try:
        state = checkpoint.resume(
            run,
            parts.policy,
            parts.reference,
            start,
            fresh=trainer.fresh(),
            note=log.note,
            world=parts.world,
        )
        watch.replay(run, state.step)
        trainer.begin(start.checkpoint, log)
        loop = _Loop(trainer=trainer, run=run, log=log, watch=watch, state=state, saved=state.step)
        steps = trainer.budget.settings.steps
        log.started(steps=steps, done=state.step, rollouts=trainer.rollouts)
        try:
            loop.run_steps(stop)
        except GivenUp:
            what = f"step {state.step} waited for another process and was abandoned"
            if parts.world.size > 1:  # other ranks may be in the middle of a step: do not save
                raise RunError(f"{what}; --resume continues from the last checkpoint") from None
            log.note(what)
        if stop.received is not None and not stop.by_signal:
            log.note(f"stopped after step {state.step}: {stop.received}")
        loop.save_last()
    except CoveyError as error:
        run.write_failure(error.details)
        raise
    finally:
        trainer.close()
        log.close()
    return loop.saved


def _sinks(parts: Components, run: RunFolder, trackers: Sequence[Tracker]) -> list[Tracker]:
    """Return all trackers of a run: of its folder, of the caller and of the configuration."""
    config = parts.config
    return [JsonlTracker(run), *trackers, *make_trackers(config.trackers, run, config.model_dump())]


@dataclass(slots=True, kw_only=True)
class _Loop:
    """A run in progress."""

    trainer: Trainer
    run: RunFolder
    log: Tracker
    watch: Watch
    state: State
    saved: int
    """The step of the newest checkpoint."""
    complete: State | None = None
    """The state of the last complete step, with its evaluation and log, as long as the policy has
    not changed since. None if there is nothing to save."""

    def run_steps(self, stop: StopSignal) -> None:
        trainer, parts, state = self.trainer, self.trainer.parts, self.state
        evaluate_every, save_every = trainer.evaluate_every, parts.config.save.every
        if state.step == 0 and evaluate_every:
            measure(parts, self.log, step=0)
        while not (
            trainer.budget.over(used := state.used(parts.policy)) or parts.world.agree(stop)
        ):
            state.step += 1
            try:
                trainer.step(state, self.run, self.log)
            except GivenUp:
                if parts.policy.version != used.updates:
                    self.complete = None
                raise
            self.complete = None
            now = state.used(parts.policy)
            last = trainer.budget.over(now)
            if evaluate_every and (last or trainer.budget.passed(evaluate_every, used, now)):
                measure(parts, self.log, state.step)
            self.complete = replace(state)
            if last or self.watch.is_best or (save_every and state.step % save_every == 0):
                self.save_last()
            self.watch.report(self.log, stop)

    def save_last(self) -> None:
        """Save the last complete step, unless it was saved already."""
        parts, state = self.trainer.parts, self.complete
        if state is None or state.step <= self.saved:
            return
        checkpoint.save(
            self.run,
            parts.policy,
            parts.reference,
            state,
            keep=parts.config.save.keep,
            more=partial(self.trainer.save, step=state.step),
            world=parts.world,
        )
        self.saved = state.step
