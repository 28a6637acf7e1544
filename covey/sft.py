"""Supervised training on worked solutions (SFT):

    draw solutions -> encode -> loss -> backward -> optimizer step -> log

The training loop is in loop.py. The seed and the step number determine the solutions that a step
trains on. The loss is the mean cross-entropy over all tokens of an optimizer step. SFT uses the
forward and backward passes of RL (step.py), with an objective whose advantages are all 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from covey.baselines import scorers_of
from covey.collate import collate
from covey.config import Config
from covey.config.check import check_start
from covey.config.resolve import held_out_of, sampling_of, task_of
from covey.config.schema import Train
from covey.engines.make import native_engine
from covey.errors import DataError
from covey.objective import Objective, with_advantage, with_weight
from covey.objective.surrogate import log_likelihood
from covey.objective.weights import token_mean
from covey.parallel.world import ALONE, World
from covey.policy.policy import Policy, load_model, policy_of
from covey.policy.schedule import Budget, Schedule, sft_schedule
from covey.rng import sft_indices
from covey.rollout.prompt_limit import fitting_prompts
from covey.solutions import Solutions, encode_example, solutions_of
from covey.step import StepSettings, backward_passes
from covey.tasks.task import bad_rows_of
from covey.types import Batch, Group, Prompt, Rollout

if TYPE_CHECKING:
    from covey.run import Made, Run


def build_sft(config: Config, world: World = ALONE) -> Run:
    """Build an SFT run from a resolved configuration."""
    from covey.run import Run

    check_start(config, world.size, sft=True)
    task = task_of(config)
    solutions, held_out = solutions_of(config, task), held_out_of(config, task)
    model = load_model(config, world.device(config.model.device))
    held_out, notes = fitting_prompts(config, model, held_out, "held-out")
    policy = policy_of(config, model, world)
    # Cross-entropy uses temperature 1, whatever the sampling temperature is.
    policy.temperature = 1.0
    steps = sft_steps(config, solutions)
    run = Run(
        config=config,
        solutions=solutions,
        budget=Budget(settings=Train(steps=steps)),
        settings=StepSettings(
            micro_batch_tokens=config.train.micro_batch_tokens,
            learning_rate=sft_schedule(config, steps),
        ),
        objective=cross_entropy(),
        held_out=held_out,
        bad_rows=tuple(bad_rows_of(task)),
        notes=tuple(notes),
        **scorers_of(config, held_out, world.local_size),
        policy=policy,
        engine=native_engine(policy),
        sampling=sampling_of(config),
        world=world,
    )
    try:  # before the run folder is created
        examples, left_out = step_examples(run, 1)
        if not examples:
            raise DataError(
                f"sft: all {len(left_out)} solutions of step 1 are longer than sft.max_tokens = "
                f"{_max_tokens(config)}; raise sft.max_tokens (the shortest solution has "
                f"{min(left_out)} tokens)"
            )
    except BaseException:
        run.close()
        raise
    return run


def policy_run(policy: Policy, schedule: Schedule, *, micro_batch_tokens: int) -> Run:
    """Return a run that only learns: `learn` trains its policy on batches of solutions."""
    from covey.run import Run

    settings = StepSettings(micro_batch_tokens=micro_batch_tokens, learning_rate=schedule)
    return Run(policy=policy, objective=cross_entropy(), settings=settings)


def sft_total(config: Config, solutions: Solutions) -> int:
    """Return how many solutions a run trains on; a repeated solution counts each time."""
    settings = config.sft
    if settings.steps:
        return settings.steps * settings.solutions
    return settings.epochs * len(solutions)


def sft_steps(config: Config, solutions: Solutions) -> int:
    """Return the number of optimizer steps, of which the last may have fewer solutions."""
    return math.ceil(sft_total(config, solutions) / config.sft.solutions)


def _max_tokens(config: Config) -> int:
    """Return the maximum length of a solution in tokens; longer solutions are left out."""
    return config.sft.max_tokens or config.rollout.max_tokens


def sft_step(run: Run) -> Made:
    """Train on the solutions of the next step."""
    from covey.run import Made

    assert run.solutions is not None
    config, step, before, started = run.config, run.step + 1, run.used, time.perf_counter()
    examples, left_out = step_examples(run, step)
    metrics: dict[str, Any] = {"step": step}
    if examples:
        metrics |= learn(run, stack(examples, run.policy.model.device))
        taken = time.perf_counter() - started
        metrics["time/tokens_per_second"] = metrics["sft/tokens"] / taken
    seen = min(step * config.sft.solutions, sft_total(config, run.solutions))
    metrics |= {
        "sft/epoch": seen / len(run.solutions),
        "sft/examples": len(examples),
        "sft/left_out": len(left_out),
        "time/total": time.perf_counter() - started,
    }
    return Made(step=step, before=before, metrics=metrics)


def step_examples(run: Run, step: int) -> tuple[list[Rollout], list[int]]:
    """Return the SFT examples of a step, and the token counts of the solutions left out.

    Solutions that are too long are left out, so a step may have no examples.
    """
    assert run.solutions is not None
    config, model, most = run.config, run.policy.model, _max_tokens(run.config)
    start, count = (step - 1) * config.sft.solutions, sft_total(config, run.solutions)
    picks = sft_indices(
        seed=config.seed,
        start=start,
        stop=min(start + config.sft.solutions, count),
        size=len(run.solutions),
    )
    examples, left_out = [], []
    for solution in (run.solutions[index] for index in picks):
        example = encode_example(model, solution.prompt.messages, solution.text)
        whole = len(example.prompt_tokens) + len(example.tokens)
        if len(example.tokens) <= most and whole <= model.context:
            examples.append(example)
        else:
            left_out.append(len(example.tokens))
    return examples, left_out


def stack(examples: Sequence[Rollout], device: torch.device | str = "cpu") -> Batch:
    """Collate solutions into a batch, with one group per solution."""
    blank = Prompt(id="", task="", messages=(), target="")
    # A solution is right; without a reward it would count nowhere in the loss.
    right = [replace(rollout, reward=1.0) for rollout in examples]
    return collate([Group(prompt=blank, rollouts=(rollout,)) for rollout in right], device)


def cross_entropy() -> Objective:
    """Return the objective of SFT: the mean log-prob of all tokens, each with advantage 1."""
    return Objective(
        advantage=lambda batch: torch.ones_like(batch.sampler_logp),
        surrogate=log_likelihood,
        weights=token_mean,
        reads=frozenset(),
    )


def learn(run: Run, batch: Batch) -> dict[str, float]:
    """Take one optimizer step on a batch, of which each rank processes some rows.

    Return metrics. Loss and entropy are means over the solution tokens, computed before the
    optimizer step.
    """
    policy, objective = run.policy, run.objective
    policy.model.model.train()
    batch = with_weight(objective, with_advantage(objective, batch))
    sums = []
    for _, micro, output, now in backward_passes(run, batch):
        assert micro.weight is not None, "weights come from the whole step"
        entropy = (now.entropy * micro.weight.to(now.entropy.dtype)).sum()
        sums.append(torch.stack([output.loss, entropy]))
    rate = run.settings.learning_rate(policy.version, run.used)
    stepped = policy.step(rate)
    # These values are read last, because the read waits until the device has finished its work.
    mine = torch.stack(sums).tolist() if sums else [[0.0, 0.0]]
    found = run.world.gather([sum(column) for column in zip(*mine, strict=True)])
    loss, entropy = (sum(column) for column in zip(*found, strict=True))
    return {
        "loss/cross_entropy": loss,
        "policy/entropy_avg": entropy,
        "lr": rate,
        "optim/grad_norm": stepped.grad_norm,
        "optim/skipped": int(stepped.skipped),
        "sft/tokens": int(batch.mask.sum()),
    }
