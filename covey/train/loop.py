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
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from covey.objective import next_beta, with_advantage
from covey.run.folder import RunFolder
from covey.run.metrics import meaning
from covey.run.review import review
from covey.train.assemble import Parts
from covey.train.collate import collate
from covey.train.gather import gather
from covey.train.measure import measure
from covey.train.report import (
    FLAT_STEPS,
    Reporter,
    flat_rewards,
    mean_advantages,
    rollout_metrics,
    selection_metrics,
)
from covey.train.select import Selected, without_truncated
from covey.train.state import State, restore, save
from covey.train.update import prepare, update
from covey.types import Batch


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


def train(parts: Parts, run: RunFolder, reporter: Reporter, stop: StopSignal) -> int:
    """Train until the configured number of steps, or a signal. Return the last step done."""
    config = parts.config
    state = restore(parts, run)
    reporter.started(
        steps=config.train.steps,
        done=state.step,
        answers=config.rollout.prompts * config.rollout.samples,
    )
    if state.step == 0 and config.evaluate.every:
        measure(parts, run, reporter, step=0)
    saved = state.step
    while state.step < config.train.steps and stop.received is None:
        state.step += 1
        _step(parts, run, reporter, state)
        last = state.step == config.train.steps
        if config.evaluate.every and (state.step % config.evaluate.every == 0 or last):
            measure(parts, run, reporter, state.step)
        if last or (config.save.every and state.step % config.save.every == 0):
            save(parts, run, state)
            saved = state.step
    if saved < state.step:
        save(parts, run, state)
    return state.step


def _step(parts: Parts, run: RunFolder, reporter: Reporter, state: State) -> None:
    started = time.perf_counter()
    gathered = gather(parts, reporter, state.step)
    collected, selected = gathered.collected, gathered.selected
    state.episode += len(collected.rollouts)
    updating = time.perf_counter()
    batch, learned = _learn(parts, selected, state)
    ended = time.perf_counter()

    metrics: dict[str, Any] = {
        "step": state.step,
        "episode": state.episode,
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
    state.flat = [*state.flat, metrics["val/zero_variance_groups"]][-FLAT_STEPS:]
    if state.step % FLAT_STEPS == 0 and (warning := flat_rewards(state.flat, metrics)):
        reporter.note(f"step {state.step}: {warning}")


def _learn(parts: Parts, selected: Selected, state: State) -> tuple[Batch | None, dict[str, float]]:
    """Take the optimizer steps of a step; return the batch they saw, and their metrics."""
    if not selected.groups:
        return None, {}
    policy, settings = parts.policy, parts.update_settings
    objective = replace(parts.objective, beta=state.beta)
    batch = collate(selected.groups, policy.model.device)
    batch = prepare(
        batch, policy=policy, objective=objective, reference=parts.reference, settings=settings
    )
    batch = with_advantage(objective, batch)
    if parts.config.select.mask_truncated:
        batch = without_truncated(batch)
    metrics = update(
        batch,
        policy=policy,
        objective=objective,
        reference=parts.reference,
        settings=settings,
        step=state.step,
    )
    if objective.needs_reference:
        metrics["objective/beta"] = state.beta
        if "objective/kl_avg" in metrics:  # not if every answer was masked
            state.beta = next_beta(objective, metrics["objective/kl_avg"], answers=len(batch))
    return batch, metrics
