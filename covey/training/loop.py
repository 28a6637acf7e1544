"""The whole algorithm, one step after the other:

    collect -> select -> collate -> update -> log -> evaluate -> save

Everything random is addressed by (seed, step), so the loop carries little state but the policy, and
saves it with the policy: a run that is stopped and resumed goes on as if it had not been.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from covey.rollout.metrics import rollout_metrics, selection_metrics
from covey.rollout.source import SynchronousSource
from covey.run.folder import RunFolder
from covey.run.metrics import meaning
from covey.run.resume import Start, start_of
from covey.run.samples import samples_page
from covey.stopping import GivenUp, StopSignal
from covey.training.budget import Budget, Used
from covey.training.build import Parts
from covey.training.garbage import freeze_garbage_collector
from covey.training.learn import learn
from covey.training.measure import measure
from covey.training.report import (
    FLAT_STEPS,
    Reporter,
    flat_rewards,
    mean_advantages,
    skipped_steps,
)
from covey.training.state import State, restore, save, used_by


@freeze_garbage_collector()
def train(
    parts: Parts, run: RunFolder, reporter: Reporter, stop: StopSignal, start: Start | None = None
) -> int:
    """Train until the budget is spent, or a signal. Return the last step that is saved.

    A run goes on from `start`, or else from its newest checkpoint.
    """
    config = parts.config
    if start is None:
        start = start_of(run, save_every=config.save.every)
    state = restore(parts, run, start, reporter.note)
    reporter.started(
        steps=config.train.steps,
        done=state.step,
        answers=config.rollout.prompts_per_step * config.rollout.group_size,
    )
    progress = _Progress(state=state, saved=state.step)
    try:
        if state.step == 0 and config.evaluate.every:
            measure(parts, run, reporter, step=0)
        _steps(parts, run, reporter, stop, progress)
    except GivenUp:
        reporter.note(f"step {state.step} waited for others, and was given up")
    if progress.good is not None and progress.saved < progress.good.step:
        save(parts, run, progress.good)
        progress.saved = progress.good.step
    return progress.saved


@dataclass(slots=True, kw_only=True)
class _Progress:
    """How far a run is."""

    state: State
    saved: int
    """The step of the newest checkpoint."""
    good: State | None = None
    """What can be saved as it is: a step is done with all that belongs to it, and no other begun
    to change the policy."""


def _steps(
    parts: Parts, run: RunFolder, reporter: Reporter, stop: StopSignal, progress: _Progress
) -> None:
    config, state = parts.config, progress.state
    budget = Budget(settings=config.train)
    while not budget.over(used := used_by(parts, state)) and stop.received is None:
        state.step += 1
        try:
            _step(parts, run, reporter, state, budget, used)
        except GivenUp:
            if parts.policy.version != used.updates:
                progress.good = None
            raise
        progress.good = None
        now = used_by(parts, state)
        last = budget.over(now)
        every = config.evaluate.every
        if every and (budget.passed(every, used, now) or last):
            measure(parts, run, reporter, state.step)
        progress.good = replace(state)
        if last or (config.save.every and state.step % config.save.every == 0):
            save(parts, run, state)
            progress.saved = state.step


def _step(
    parts: Parts, run: RunFolder, reporter: Reporter, state: State, budget: Budget, before: Used
) -> None:
    started = time.perf_counter()
    rollouts = SynchronousSource(parts, reporter).groups(state.step, share=budget.spent(before))
    collected, selected = rollouts.collected, rollouts.selected
    state.episode += len(collected.rollouts)
    state.tokens += collected.tokens
    updating = time.perf_counter()
    settings = budget.paced(parts.update_settings, before)
    batch, learned = learn(parts, selected.groups, state, settings)
    ended = time.perf_counter()

    metrics: dict[str, Any] = {
        "step": state.step,
        "episode": state.episode,
        "tokens": state.tokens,
        "updates": parts.policy.version,
        "reward_id": parts.scorer.identity,
        **rollout_metrics(collected),
        **selection_metrics(rollouts),
        **learned,
        "time/rollout": collected.rollout_seconds,
        "time/score": collected.score_seconds,
        "time/update": ended - updating,
        "time/total": ended - started,
        "time/tokens_per_second": collected.tokens / (ended - started),
    }
    assert all(meaning(name) for name in metrics), "every metric has a meaning"
    if parts.config.save.rollouts:
        advantages = mean_advantages(collected, selected, batch)
        run.write_rollouts(state.step, collected.groups, advantages)
    samples_every = parts.config.save.samples_every
    if samples_every and state.step % samples_every == 0:
        page = samples_page(state.step, collected.groups, parts.config.save.samples_shown)
        run.write_samples(state.step, page)
    run.log_step(metrics)
    reporter.step(metrics)
    if skipped := skipped_steps(metrics):
        reporter.note(f"step {state.step}: {skipped}")
    state.flat = [*state.flat, metrics["rollout/zero_variance_groups"]][-FLAT_STEPS:]
    if state.step % FLAT_STEPS == 0 and (warning := flat_rewards(state.flat, metrics)):
        reporter.note(f"step {state.step}: {warning}")
