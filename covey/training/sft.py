"""Supervised training on worked solutions, before reinforcement:

    draw solutions -> encode -> learn -> log -> evaluate -> save

Which solutions a step sees is a function of seed and step, so the policy is all there is to save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from covey.config import Config
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Engine, Sampling
from covey.errors import DataError, RunError
from covey.rng import sft_indices
from covey.run.folder import RunFolder
from covey.run.metrics import meaning
from covey.run.resume import Start, start_of
from covey.scoring import Scorer
from covey.stopping import GivenUp, StopSignal
from covey.tasks import bad_rows_of
from covey.training.build import (
    held_out_of,
    load_model,
    policy_of,
    sampling_of,
    scorer_of,
    task_of,
)
from covey.training.measure import measure
from covey.training.optimizer import learning_rate
from covey.training.policy import Policy
from covey.training.policy_files import load_policy, save_policy
from covey.training.report import Reporter
from covey.training.sft_data import Solutions, solutions_of
from covey.training.sft_step import Example, encode_example, learn, stack
from covey.training.state import offering, put_aside
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SftParts:
    """What a warm-up is made of."""

    config: Config
    solutions: Solutions
    held_out_prompts: Sequence[Prompt]
    bad_rows: tuple[str, ...]
    """One line for every row of the data that was skipped."""
    scorer: Scorer
    policy: Policy
    sampler: Engine
    sampling: Sampling

    @property
    def judge(self) -> Scorer:
        """Who judges evaluations."""
        return self.scorer

    @property
    def total(self) -> int:
        """How many solutions are learned from, repetitions included."""
        settings = self.config.sft
        if settings.steps:
            return settings.steps * settings.solutions
        return settings.epochs * len(self.solutions)

    @property
    def max_tokens(self) -> int:
        """Of the longest solution that is learned from."""
        return self.config.sft.max_tokens or self.config.rollout.max_tokens

    @property
    def steps(self) -> int:
        """How many optimizer steps that takes. The last may be a smaller one."""
        return math.ceil(self.total / self.config.sft.solutions)


def build_sft(config: Config) -> SftParts:
    """Build everything that a resolved configuration names."""
    task = task_of(config)
    solutions, held_out = solutions_of(config, task), held_out_of(config, task)
    model = load_model(config)
    policy = policy_of(config, model)
    # Cross-entropy is that of the model itself, whatever temperature it will be sampled at.
    policy.temperature = 1.0
    parts = SftParts(
        config=config,
        solutions=solutions,
        held_out_prompts=held_out,
        bad_rows=tuple(bad_rows_of(task)),
        scorer=scorer_of(config),
        policy=policy,
        sampler=NativeEngine(model),
        sampling=sampling_of(config),
    )
    try:
        _check_lengths(parts)  # what is wrong with the solutions is found before a run is made
    except BaseException:
        parts.scorer.close()
        raise
    return parts


def _check_lengths(parts: SftParts) -> None:
    examples, left_out = step_examples(parts, 1)
    if not examples:
        raise DataError(
            f"sft: all {len(left_out)} solutions of step 1 are too long, the shortest of "
            f"{min(left_out)} tokens; raise sft.max_tokens = {parts.max_tokens}"
        )


def step_examples(parts: SftParts, step: int) -> tuple[list[Example], list[int]]:
    """Return the solutions of a step, counted from 1, and the lengths of those left out for theirs.

    There may be nothing left of a small step.
    """
    settings, model = parts.config.sft, parts.policy.model
    start = (step - 1) * settings.solutions
    picks = sft_indices(
        seed=parts.config.seed,
        start=start,
        stop=min(start + settings.solutions, parts.total),
        size=len(parts.solutions),
    )
    examples, left_out = [], []
    for solution in (parts.solutions[index] for index in picks):
        example = encode_example(model, solution.prompt.messages, solution.text)
        whole = len(example.prompt_tokens) + len(example.tokens)
        if len(example.tokens) <= parts.max_tokens and whole <= model.context:
            examples.append(example)
        else:
            left_out.append(len(example.tokens))
    return examples, left_out


def run_sft(
    parts: SftParts,
    run: RunFolder,
    reporter: Reporter,
    stop: StopSignal,
    start: Start | None = None,
) -> int:
    """Train until the configured number of steps, or a signal. Return the last step saved."""
    config = parts.config
    if start is None:
        start = start_of(run, save_every=config.save.every)
    step = _restore(parts, run, start, reporter)
    reporter.started(steps=parts.steps, done=step, answers=config.sft.solutions)
    saved, every = step, config.sft.evaluate_every
    try:
        if step == 0 and every:
            measure(parts, run, reporter, step=0)
        while step < parts.steps and stop.received is None:
            step += 1
            _step(parts, run, reporter, step)
            last = step == parts.steps
            if every and (step % every == 0 or last):
                measure(parts, run, reporter, step)
            due = config.save.every and step % config.save.every == 0
            if last or due or stop.received is not None:
                _save(parts, run, step)
                saved = step
    except GivenUp:
        reporter.note(f"the evaluation of step {step} waited for others, and was given up")
    return saved


def _step(parts: SftParts, run: RunFolder, reporter: Reporter, step: int) -> None:
    started = time.perf_counter()
    config = parts.config
    examples, left_out = step_examples(parts, step)
    metrics: dict[str, float] = {"step": step}
    if examples:
        metrics |= _learn(parts, examples, started)
    seen = min(step * config.sft.solutions, parts.total)
    metrics |= {
        "sft/epoch": seen / len(parts.solutions),
        "sft/examples": len(examples),
        "sft/left_out": len(left_out),
        "time/total": time.perf_counter() - started,
    }
    assert all(meaning(name) for name in metrics), "every metric has a meaning"
    run.log_step(metrics)
    reporter.step(metrics)


def _learn(parts: SftParts, examples: Sequence[Example], started: float) -> dict[str, float]:
    """Take an optimizer step, and return its metrics."""
    config, policy = parts.config, parts.policy
    rate = learning_rate(
        policy.version,
        peak=config.sft.learning_rate,
        schedule=config.sft.schedule,
        warmup_steps=config.sft.warmup_steps,
        total_steps=parts.steps,
    )
    learned = learn(
        policy,
        stack(examples, policy.model.device),
        rate=rate,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )
    return {
        "loss/cross_entropy": learned.loss,
        "policy/entropy_avg": learned.entropy,
        "lr": rate,
        "optim/grad_norm": learned.grad_norm,
        "optim/skipped": int(learned.skipped),
        "sft/tokens": learned.tokens,
        "time/tokens_per_second": learned.tokens / (time.perf_counter() - started),
    }


def _restore(parts: SftParts, run: RunFolder, start: Start, reporter: Reporter) -> int:
    """Load the checkpoint that a warm-up goes on from, if any, and return its step."""
    if start.checkpoint is not None:
        with offering(run, start):
            if load_policy(parts.policy, start.checkpoint)["step"] != start.step:
                raise RunError(f"{start.checkpoint} does not hold step {start.step}")
    put_aside(run, start, reporter.note)
    return start.step


def _save(parts: SftParts, run: RunFolder, step: int) -> None:
    with run.new_checkpoint(step) as folder:
        save_policy(parts.policy, folder, {"step": step})
    run.prune_checkpoints(parts.config.save.keep)
