"""The training loop, shared by reinforcement learning and supervised training:

    resume -> evaluate at step 0 -> (step -> evaluate -> save), until the budget or a signal

The RL step is in rl.py, and the SFT step is in sft.py. After an error, the loop saves the last
complete step.

A checkpoint consists of the policy and the state of the loop. Random numbers depend only on values
such as the seed and the step, so a checkpoint needs no generator state. A resumed run gives the
same results as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from covey.errors import CoveyError, RunError
from covey.policy import checkpoint
from covey.policy.schedule import Budget
from covey.records.folder import RunFolder
from covey.records.resume import Start, start_of
from covey.records.trackers import JsonlTracker, Tracker, Trackers
from covey.records.trackers.registry import make_trackers
from covey.stopping import GivenUp, StopSignal, may_be_given_up
from covey.training.build import Components
from covey.training.garbage import freeze_garbage_collector
from covey.training.model_evaluation import measure
from covey.training.run_start import resume_hint
from covey.training.state import State, Used
from covey.training.watch import Watch


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Base class of the RL trainer and the SFT trainer, whose steps the training loop calls."""

    parts: Components
    """The policy, engine, scorers and other components of the run."""
    budget: Budget
    """The length of the run in training steps, tokens or optimizer steps."""
    rollouts: int
    """Number of rollouts (RL) or solutions (SFT) per training step, not counting the additional
    rounds of dynamic sampling."""
    evaluate_every: int
    """Number of steps between evaluations; 0 means no evaluations."""
    fresh: State
    """The state at the start of a new run."""

    @property
    def updates(self) -> int:
        """A number that increases with every optimizer step of a trained model."""
        return self.parts.policy.version

    def apply_settings(self, state: State) -> None:
        """Replace values of a checkpoint by settings that changed when the run was resumed."""

    def begin(self, checkpoint: Path | None, log: Tracker) -> None:
        """Prepare the first step after `checkpoint`, which is None in a new run."""

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Run training step number `state.step`, and log its metrics."""
        raise NotImplementedError

    def save(self, folder: Path, step: int) -> None:
        """Add to the checkpoint of a step the files that only a resumed run needs."""

    def close(self) -> None:
        """Stop all background work."""


@freeze_garbage_collector()
def run_loop(
    trainer: Trainer,
    run: RunFolder,
    trackers: Sequence[Tracker],
    stop: StopSignal,
    start: Start | None = None,
) -> int:
    """Train from `start`, or from the newest checkpoint; return the last saved step."""
    parts, config = trainer.parts, trainer.parts.config
    watch, sinks = Watch(config), list[Tracker]()
    if parts.world.is_main:
        named = make_trackers(config.trackers, run, config.model_dump())
        sinks = [JsonlTracker(run), *trackers, *named]
    log = Trackers([*sinks, watch])
    start = start or start_of(run, save_every=config.save.every)
    try:
        state = checkpoint.resume(run, trainer, start, log.note)
        for note in parts.notes:
            log.note(note)
        watch.replay(run, state.step)
        trainer.begin(start.checkpoint, log)
        loop = _Loop(trainer=trainer, run=run, log=log, watch=watch, state=state, saved=state.step)
        steps = trainer.budget.settings.steps
        log.started(steps=steps, done=state.step, rollouts=trainer.rollouts)
        try:
            loop.run_steps(stop)
        except GivenUp:
            if parts.world.size > 1:  # other ranks may be in the middle of a step: do not save
                raise RunError(
                    f"a stop signal interrupted step {state.step}; resume from the last checkpoint"
                ) from None
            log.note(f"a stop signal interrupted step {state.step}")
        except Exception:
            loop.keep_progress()
            raise
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


@dataclass(slots=True, kw_only=True)
class _Loop:
    """The training loop of one run, with its current state."""

    trainer: Trainer
    run: RunFolder
    log: Tracker
    watch: Watch
    state: State
    saved: int
    """Number of the training step that was last saved as a checkpoint."""
    complete: State | None = None
    """The run's state after the last complete step. If the policy or the critic has changed since
    the last complete step, that step can no longer be saved, and `complete` is None.
    """

    def run_steps(self, stop: StopSignal) -> None:
        trainer, parts, state = self.trainer, self.trainer.parts, self.state
        save_every = parts.config.save.every
        if state.evaluation_due or (state.step == 0 and trainer.evaluate_every):
            self._evaluate()
        while not (
            trainer.budget.over(used := state.used(parts.policy)) or parts.world.agree(stop)
        ):
            state.step += 1
            updates = trainer.updates
            try:
                trainer.step(state, self.run, self.log)
            except BaseException:
                if trainer.updates != updates:
                    self.complete = None
                if self.run.has_step(state.step):  # only the report of the step failed
                    self._trained(used)
                raise
            last = self._trained(used)
            if state.evaluation_due:
                self._evaluate()
            if last or self.watch.is_best or (save_every and state.step % save_every == 0):
                self.save_last()
            self.watch.report(self.log, stop)

    def _trained(self, before: Used) -> bool:
        """Mark the current step as complete; return whether it is the last step of the run."""
        budget, every = self.trainer.budget, self.trainer.evaluate_every
        now = self.state.used(self.trainer.parts.policy)
        last = budget.over(now)
        due = every and (last or budget.passed(every, before, now))
        self.state.evaluation_due = bool(due)
        self.complete = replace(self.state)
        return last

    def _evaluate(self) -> None:
        parts = self.trainer.parts
        # With one rank, a signal ends a long evaluation, which a resumed run repeats.
        with may_be_given_up() if parts.world.size == 1 else nullcontext():
            measure(parts, self.log, self.state.step)
        self.state.evaluation_due = False
        self.complete = replace(self.state)

    def keep_progress(self) -> None:
        """Save the last complete step after an error, and print how to resume."""
        try:
            if self.trainer.parts.world.size == 1:  # other ranks may be in the middle of a step
                self.save_last()
        except Exception as error:
            self.log.note(f"the last complete step could not be saved: {error}")
        if self.saved:
            hint = resume_hint(self.run, self.trainer.parts.config)
            self.log.note(f"saved step {self.saved}; resume with: {hint}")

    def save_last(self) -> None:
        """Save the last complete step, unless it was saved already."""
        if self.complete is not None and self.complete.step > self.saved:
            checkpoint.save(self.run, self.trainer, self.complete)
            self.saved = self.complete.step
