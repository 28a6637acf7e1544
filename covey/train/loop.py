"""The whole algorithm, one step after the other:

    collect -> select -> collate -> update -> log -> evaluate -> save

Everything random is addressed by (seed, step), so the loop carries no state but the policy: a run
that is stopped and resumed goes on exactly as if it had not been.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from covey.collect import Collected, ask, check_failures, collect, draw_prompts
from covey.errors import RewardError, RunError
from covey.evaluate import Evaluation, evaluate
from covey.objective import with_advantage
from covey.policy.checkpoint import load_policy, save_policy
from covey.run.folder import RunFolder
from covey.run.metrics import meaning
from covey.train.assemble import Parts
from covey.train.collate import collate
from covey.train.report import Reporter, mean_advantages, rollout_metrics
from covey.train.select import Selected, select
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
    done = _restore(parts, run)
    reporter.started(
        steps=config.train.steps, done=done, answers=config.rollout.prompts * config.rollout.samples
    )
    if done == 0 and config.evaluate.every:
        _evaluate(parts, run, reporter, step=0)
    saved = done
    while done < config.train.steps and stop.received is None:
        done += 1
        _step(parts, run, reporter, done)
        last = done == config.train.steps
        if config.evaluate.every and (done % config.evaluate.every == 0 or last):
            _evaluate(parts, run, reporter, done)
        if last or (config.save.every and done % config.save.every == 0):
            save(parts, run, done)
            saved = done
    if saved < done:
        save(parts, run, done)
    return done


def _restore(parts: Parts, run: RunFolder) -> int:
    """Load the newest checkpoint, if any, and return its step."""
    checkpoints = run.checkpoints()
    if not checkpoints:
        run.forget_after(-1)  # the evaluation of step 0 comes again as well
        return 0
    step, folder = checkpoints[-1]
    state = load_policy(parts.policy, folder)
    if state["step"] != step:
        raise RunError(f"{folder} holds step {state['step']}")
    run.forget_after(step)
    return step


def _step(parts: Parts, run: RunFolder, reporter: Reporter, step: int) -> None:
    started = time.perf_counter()
    collected = _collect(parts, reporter, step)
    selected = select(collected.groups)
    if not selected.groups:
        raise RewardError(f"step {step}: no group has two scored answers")
    updating = time.perf_counter()
    batch, learned = _learn(parts, selected, step)
    ended = time.perf_counter()

    answers = [rollout for group in collected.groups for rollout in group.rollouts]
    metrics: dict[str, Any] = {
        "step": step,
        "episode": step * len(answers),
        **rollout_metrics(collected, batch),
        "val/dropped_groups": selected.dropped,
        **learned,
        "time/rollout": collected.rollout_seconds,
        "time/score": collected.score_seconds,
        "time/update": ended - updating,
        "time/total": ended - started,
        "time/tokens_per_second": sum(len(r.tokens) for r in answers) / (ended - started),
    }
    assert all(meaning(name) for name in metrics), "every metric has a meaning"
    if parts.config.save.rollouts:
        run.write_rollouts(step, collected.groups, mean_advantages(collected, selected, batch))
    run.log_step(metrics)
    reporter.step(metrics)


def _collect(parts: Parts, reporter: Reporter, step: int) -> Collected:
    """Sample and judge the answers of a step."""
    config, policy = parts.config, parts.policy
    prompts = draw_prompts(
        parts.train_prompts, seed=config.seed, step=step - 1, count=config.rollout.prompts
    )
    collected = collect(
        ask(policy.model, prompts),
        sampler=parts.sampler,
        reward=parts.reward,
        step=step,
        sampling=parts.sampling,
        version=policy.version,
        progress=reporter.sampled,
    )
    if collected.failures:
        reporter.note(f"step {step}: {len(collected.failures)} unscored, {collected.failures[0]}")
    check_failures(collected, config.rollout.max_unscored)
    return collected


def _learn(parts: Parts, selected: Selected, step: int) -> tuple[Batch, dict[str, float]]:
    """Take the optimizer steps of a step; return the batch they saw, and their metrics."""
    policy, objective, settings = parts.policy, parts.objective, parts.update_settings
    batch = collate(selected.groups, policy.model.device)
    batch = prepare(
        batch, policy=policy, objective=objective, reference=parts.reference, settings=settings
    )
    batch = with_advantage(objective, batch)
    return batch, update(batch, policy=policy, objective=objective, settings=settings, step=step)


def _evaluate(parts: Parts, run: RunFolder, reporter: Reporter, step: int) -> Evaluation:
    evaluation = evaluate(
        ask(parts.policy.model, parts.held_out_prompts),
        sampler=parts.sampler,
        reward=parts.reward,
        sampling=parts.sampling,
        samples=parts.config.evaluate.samples,
        temperature=parts.config.evaluate.temperature,
        progress=reporter.sampled,
    )
    run.log_evaluation({"step": step, **evaluation.row()})
    reporter.evaluated(step, evaluation)
    return evaluation


def save(parts: Parts, run: RunFolder, step: int) -> None:
    """Write a checkpoint, whole or not at all, and remove those that are too old."""
    with run.new_checkpoint(step) as folder:
        save_policy(parts.policy, folder, {"step": step})
    run.prune_checkpoints(parts.config.save.keep)
