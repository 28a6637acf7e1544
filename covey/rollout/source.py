"""Rollout sources: where the training loop gets the groups of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from covey.errors import RewardError
from covey.rollout.collect import Collected, Collector, check_failures
from covey.rollout.episode import encode_prompts
from covey.rollout.filter import Selected, select
from covey.rollout.prompts import refill_prompts, step_prompts
from covey.types import Group, Prompt

if TYPE_CHECKING:
    from covey.rewards import LengthPenalty
    from covey.run.trackers import Tracker
    from covey.training.build import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of a training step."""

    collected: Collected
    """All that were sampled."""
    selected: Selected
    """The groups to train on."""
    rounds: int
    """How often completions were sampled; more than once only with dynamic sampling."""


class RolloutSource(Protocol):
    """Gives the training loop the groups of each step."""

    def groups(self, step: int, *, share: float | None = None) -> StepRollouts:
        """Return the groups of a step, counted from 1.

        `share` is the share of the run that is done, if it does not follow from the steps.
        """


@dataclass(frozen=True, slots=True)
class SynchronousSource:
    """Collects the groups of a step when the loop asks, with the weights of that moment."""

    parts: Parts
    reporter: Tracker

    def groups(self, step: int, *, share: float | None = None) -> StepRollouts:
        """Sample, score, penalize and filter; with dynamic sampling, until the step is full.

        The prompts of a refill have the address (seed, step, round), and leave the prompts of later
        steps as they are.
        """
        config, policy = self.parts.config, self.parts.policy
        share = (step - 1) / config.train.steps if share is None else share
        wanted, train_prompts = config.rollout.prompts_per_step, self.parts.train_prompts
        most_rounds = config.filter.max_rounds if config.filter.dynamic_sampling else 1
        self.parts.engine.load_weights(policy.model.model.named_parameters, policy.version)
        prompts = step_prompts(train_prompts, seed=config.seed, step=step - 1, count=wanted)
        collected, rounds = Collected(), 0
        while True:
            collected = collected.joined(self._round(prompts, step, share))
            rounds += 1
            check_failures(collected, config.scoring.max_unscored)
            selected = select(
                collected.groups,
                version=policy.version,
                dynamic=config.filter.dynamic_sampling,
                drop_flat=config.filter.drop_flat,
                max_age=config.overlap.max_staleness,
                most=wanted,
            )
            missing = wanted - len(selected.groups)
            if not missing or rounds == most_rounds:
                break
            prompts = refill_prompts(
                train_prompts,
                used={group.prompt.id for group in collected.groups},
                seed=config.seed,
                step=step,
                round_number=rounds,
                count=_refill_size(missing, wanted, len(collected.groups)),
            )
            if not prompts:
                break
        if not selected.groups:
            self._note_empty(selected, step, rounds)
        return StepRollouts(collected=collected, selected=selected, rounds=rounds)

    def _round(self, prompts: list[Prompt], step: int, share: float) -> Collected:
        """Sample and score one round of prompts, and apply the length penalty."""
        parts = self.parts
        collector = Collector(
            engine=parts.engine,
            model=parts.policy.model,
            scorer=parts.scorer,
            progress=self.reporter.sampled,
        )
        encoded = encode_prompts(parts.policy.model, prompts)
        collected = collector.collect(encoded, sampling=parts.sampling, step=step, share=share)
        if collected.failures:
            count, first = len(collected.failures), collected.failures[0]
            self.reporter.note(f"step {step}: {count} unscored, {first}")
        if parts.config.length_penalty.name == "none":
            return collected
        groups = tuple(penalized(group, parts.length_penalty) for group in collected.groups)
        return replace(collected, groups=groups)

    def _note_empty(self, selected: Selected, step: int, rounds: int) -> None:
        if not selected.uniform and not selected.stale:
            raise RewardError(f"step {step}: no group has two scored completions")
        self.reporter.note(
            f"step {step}: nothing to learn, {selected.uniform} groups without a difference "
            f"and {selected.stale} too old after sampling {rounds} times"
        )


def _refill_size(missing: int, wanted: int, collected: int) -> int:
    """Return how many prompts should fill the step at the rate so far, at most a whole step."""
    rate = (wanted - missing) / collected
    return wanted if rate == 0 else min(wanted, math.ceil(missing / rate))


def penalized(group: Group, penalty: LengthPenalty) -> Group:
    """Add a length penalty to the rewards of a group, as a separate part."""
    rollouts = [
        rollout
        if rollout.reward is None
        else replace(
            rollout,
            reward=rollout.reward + amount,
            parts={**rollout.parts, "length_penalty": amount},
        )
        for rollout, amount in zip(group.rollouts, penalty(group.rollouts), strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))
