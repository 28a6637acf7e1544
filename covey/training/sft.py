"""Supervised training on worked solutions (SFT):

    draw solutions -> encode -> loss -> backward -> optimizer step -> log

The training loop is in loop.py. The seed and the step number determine the solutions that a step
trains on. The loss is the mean cross-entropy over all tokens of an optimizer step. SFT uses the
forward and backward passes of RL (step.py), with an objective whose advantages are all 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from covey.config import Config
from covey.config.schema import Train
from covey.errors import DataError
from covey.objective import Objective, with_advantage, with_weight
from covey.objective.surrogate import log_likelihood
from covey.objective.weights import token_mean
from covey.rng import sft_indices
from covey.run.folder import RunFolder
from covey.run.metric_registry import meaning
from covey.run.resume import Start
from covey.run.trackers import Tracker
from covey.stopping import StopSignal
from covey.tasks import bad_rows_of
from covey.training.build import Components
from covey.training.collate import collate
from covey.training.loop import Trainer, run_loop
from covey.training.make_engine import native_engine
from covey.training.models import load_model, policy_of
from covey.training.policy import Policy
from covey.training.prompt_limit import fitting_prompts
from covey.training.resolve import held_out_of, sampling_of, task_of
from covey.training.schedule import Budget, Schedule, sft_schedule
from covey.training.scorers import scorers_of
from covey.training.sft_data import Solutions, encode_example, solutions_of
from covey.training.start_checks import check_start
from covey.training.state import State
from covey.training.step import Learner, StepSettings, backward_passes
from covey.types import Batch, Group, Prompt, Rollout
from covey.world import ALONE, World


@dataclass(frozen=True, slots=True, kw_only=True)
class SftParts(Components):
    """The components of an SFT run."""

    solutions: Solutions

    @property
    def facts(self) -> Mapping[str, object]:
        """The kind of the run, which distinguishes an SFT run folder from an RL run folder."""
        return {"kind": "sft"}

    @property
    def total(self) -> int:
        """Number of solutions that the run trains on; a repeated solution counts each time."""
        settings = self.config.sft
        if settings.steps:
            return settings.steps * settings.solutions
        return settings.epochs * len(self.solutions)

    @property
    def max_tokens(self) -> int:
        """Maximum length of a solution in tokens; longer solutions are left out."""
        return self.config.sft.max_tokens or self.config.rollout.max_tokens

    @property
    def steps(self) -> int:
        """Number of optimizer steps, of which the last may train on fewer solutions."""
        return math.ceil(self.total / self.config.sft.solutions)


def build_sft(config: Config, world: World = ALONE) -> SftParts:
    """Build the components of an SFT run from a resolved configuration."""
    check_start(config, world.size, sft=True)
    task = task_of(config)
    solutions, held_out = solutions_of(config, task), held_out_of(config, task)
    model = load_model(config, world.device(config.model.device))
    held_out, notes = fitting_prompts(config, model, held_out, "held-out")
    policy = policy_of(config, model, world)
    # Cross-entropy uses temperature 1, whatever the sampling temperature is.
    policy.temperature = 1.0
    parts = SftParts(
        config=config,
        solutions=solutions,
        held_out_prompts=held_out,
        bad_rows=tuple(bad_rows_of(task)),
        notes=tuple(notes),
        **scorers_of(config, held_out, world.local_size),
        policy=policy,
        engine=native_engine(policy),
        sampling=sampling_of(config),
        world=world,
    )
    try:  # before the run folder is created
        examples, left_out = step_examples(parts, 1)
        if not examples:
            raise DataError(
                f"sft: all {len(left_out)} solutions of step 1 are longer than sft.max_tokens = "
                f"{parts.max_tokens}; raise sft.max_tokens (the shortest solution has "
                f"{min(left_out)} tokens)"
            )
    except BaseException:
        parts.close()
        raise
    return parts


def run_sft(
    parts: SftParts,
    run: RunFolder,
    trackers: Sequence[Tracker],
    stop: StopSignal,
    start: Start | None = None,
) -> int:
    """Run SFT to its last step or until a stop signal; return the last saved step."""
    trainer = Supervised(
        parts=parts,
        budget=Budget(settings=Train(steps=parts.steps)),
        rollouts=parts.config.sft.solutions,
        evaluate_every=parts.config.sft.evaluate_every,
        fresh=State(),
    )
    return run_loop(trainer, run, trackers, stop, start)


@dataclass(slots=True, kw_only=True)
class Supervised(Trainer):
    """The SFT trainer, whose step the training loop calls."""

    parts: SftParts

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Train on the solutions of a step, and log metrics."""
        parts, started = self.parts, time.perf_counter()
        examples, left_out = step_examples(parts, state.step)
        metrics: dict[str, Any] = {"step": state.step}
        if examples:
            learner = sft_learner(
                parts.policy,
                sft_schedule(parts.config, parts.steps),
                micro_batch_tokens=parts.config.train.micro_batch_tokens,
                world=parts.world,
            )
            metrics |= learn(learner, stack(examples, parts.policy.model.device))
            taken = time.perf_counter() - started
            metrics["time/tokens_per_second"] = metrics["sft/tokens"] / taken
        metrics |= {
            "sft/epoch": min(state.step * self.rollouts, parts.total) / len(parts.solutions),
            "sft/examples": len(examples),
            "sft/left_out": len(left_out),
            "time/total": time.perf_counter() - started,
        }
        assert all(meaning(name) for name in metrics), "every metric has a meaning"
        log.step(metrics)


def step_examples(parts: SftParts, step: int) -> tuple[list[Rollout], list[int]]:
    """Return the SFT examples of a step, and the token counts of the solutions left out.

    Solutions that are too long are left out, so a step may have no examples.
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


def stack(examples: Sequence[Rollout], device: torch.device | str = "cpu") -> Batch:
    """Collate solutions into a batch, with one group per solution."""
    blank = Prompt(id="", task="", messages=(), target="")
    return collate([Group(prompt=blank, rollouts=(rollout,)) for rollout in examples], device)


def cross_entropy() -> Objective:
    """Return the objective of SFT: the mean log-prob of all tokens, each with advantage 1."""
    return Objective(
        advantage=lambda batch: torch.ones_like(batch.sampler_logp),
        surrogate=log_likelihood,
        weights=token_mean,
        reads=frozenset(),
    )


def sft_learner(
    policy: Policy, schedule: Schedule, *, micro_batch_tokens: int, world: World = ALONE
) -> Learner:
    """Build the learner of SFT, which takes one optimizer step per training step."""
    settings = StepSettings(micro_batch_tokens=micro_batch_tokens, learning_rate=schedule)
    return Learner(policy=policy, objective=cross_entropy(), settings=settings, world=world)


def learn(learner: Learner, batch: Batch) -> dict[str, float]:
    """Take one optimizer step on a batch, of which each rank processes some rows.

    Return metrics. Loss and entropy are means over the solution tokens, computed before the
    optimizer step.
    """
    policy, objective = learner.policy, learner.objective
    policy.model.model.train()
    batch = with_weight(objective, with_advantage(objective, batch))
    sums = []
    for _, micro, output, now in backward_passes(learner, batch):
        assert micro.weight is not None, "weights come from the whole step"
        entropy = (now.entropy * micro.weight.to(now.entropy.dtype)).sum()
        sums.append(torch.stack([output.loss, entropy]))
    rate = learner.learning_rate
    stepped = policy.step(rate)
    # These values are read last, because the read waits until the device has finished its work.
    mine = torch.stack(sums).tolist() if sums else [[0.0, 0.0]]
    found = learner.world.gather([sum(column) for column in zip(*mine, strict=True)])
    loss, entropy = (sum(column) for column in zip(*found, strict=True))
    return {
        "loss/cross_entropy": loss,
        "policy/entropy_avg": entropy,
        "lr": rate,
        "optim/grad_norm": stepped.grad_norm,
        "optim/skipped": int(stepped.skipped),
        "sft/tokens": int(batch.mask.sum()),
    }
