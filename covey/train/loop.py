"""The whole algorithm, one step after the other:

    collect -> select -> collate -> update -> log -> evaluate -> save

Everything random is addressed by (seed, step), so the loop carries little state but the policy, and
saves it with the policy: a run that is stopped and resumed goes on as if it had not been.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from covey.garbage import old_objects_left_alone
from covey.run.folder import RunFolder
from covey.run.metrics import meaning
from covey.run.review import review
from covey.train.assemble import Parts
from covey.train.budget import Budget, Used
from covey.train.gather import gather
from covey.train.learn import learn
from covey.train.measure import measure
from covey.train.report import (
    FLAT_STEPS,
    Reporter,
    flat_rewards,
    mean_advantages,
    rollout_metrics,
    selection_metrics,
    skipped_steps,
)
from covey.train.state import State, restore, save, used_by


@dataclass(slots=True)
class StopSignal:
    """Ctrl-C or SIGTERM: the step in progress is finished and saved, then the loop ends."""

    received: str | None = None


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Turn the first SIGINT or SIGTERM into a flag; the second ends the process at once."""
    stop = StopSignal()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.received is not None:
            raise KeyboardInterrupt
        stop.received = signal.Signals(number).name

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@old_objects_left_alone()
def train(parts: Parts, run: RunFolder, reporter: Reporter, stop: StopSignal) -> int:
    """Train until the budget is spent, or a signal. Return the last step done."""
    config = parts.config
    state = restore(parts, run)
    budget = Budget(settings=config.train)
    reporter.started(
        steps=config.train.steps,
        done=state.step,
        answers=config.rollout.prompts * config.rollout.samples,
    )
    if state.step == 0 and config.evaluate.every:
        measure(parts, run, reporter, step=0)
    saved = state.step
    while not budget.over(used := used_by(parts, state)) and stop.received is None:
        state.step += 1
        _step(parts, run, reporter, state, budget, used)
        now = used_by(parts, state)
        last = budget.over(now)
        every = config.evaluate.every
        if every and (budget.passed(every, used, now) or last):
            measure(parts, run, reporter, state.step)
        if last or (config.save.every and state.step % config.save.every == 0):
            save(parts, run, state)
            saved = state.step
    if saved < state.step:
        save(parts, run, state)
    return state.step


def _step(
    parts: Parts, run: RunFolder, reporter: Reporter, state: State, budget: Budget, before: Used
) -> None:
    started = time.perf_counter()
    gathered = gather(parts, reporter, state.step, share=budget.spent(before))
    collected, selected = gathered.collected, gathered.selected
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
        **selection_metrics(gathered),
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
    review_every = parts.config.save.review_every
    if review_every and state.step % review_every == 0:
        page = review(state.step, collected.groups, parts.config.save.review_answers)
        run.write_review(state.step, page)
    run.log_step(metrics)
    reporter.step(metrics)
    if skipped := skipped_steps(metrics):
        reporter.note(f"step {state.step}: {skipped}")
    state.flat = [*state.flat, metrics["val/zero_variance_groups"]][-FLAT_STEPS:]
    if state.step % FLAT_STEPS == 0 and (warning := flat_rewards(state.flat, metrics)):
        reporter.note(f"step {state.step}: {warning}")
