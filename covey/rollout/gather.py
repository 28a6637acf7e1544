"""The groups of a step: collected, punished for length, filtered, and filled up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from covey.errors import RewardError
from covey.rewards import LengthPenalty
from covey.rollout.collect import (
    Collected,
    Moment,
    ask,
    check_failures,
    collect,
    draw_prompts,
    draw_refill,
)
from covey.rollout.filter import Selected, select
from covey.training.build import Parts
from covey.training.report import Reporter
from covey.types import Group, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """All that was collected for a step, and what of it the update learns from."""

    collected: Collected
    selected: Selected
    rounds: int
    """How often answers were sampled; more than once only with dynamic sampling."""


def gather(parts: Parts, reporter: Reporter, step: int, *, share: float | None = None) -> Gathered:
    """Collect groups for a step. With dynamic sampling, again until enough of them are mixed.

    What a refill asks is addressed by (seed, step, round) like everything random, and leaves the
    prompts of later steps as they are. `share` is how much of the run is done,
    which a budget tells where steps do not.
    """
    config = parts.config
    share = (step - 1) / config.train.steps if share is None else share
    moment = Moment(step=step, version=parts.policy.version, share=share)
    wanted = config.rollout.prompts_per_step
    prompts = draw_prompts(parts.train_prompts, seed=config.seed, step=step - 1, count=wanted)
    collected = _collect(parts, reporter, moment, prompts)
    rounds = 1
    while True:
        check_failures(collected, config.scoring.max_unscored)
        selected = select(
            collected.groups,
            version=parts.policy.version,
            dynamic=config.filter.dynamic_sampling,
            max_age=config.overlap.max_staleness,
            most=wanted,
        )
        missing = wanted - len(selected.groups)
        if not (config.filter.dynamic_sampling and missing and rounds < config.filter.max_rounds):
            break
        prompts = draw_refill(
            parts.train_prompts,
            asked={group.prompt.id for group in collected.groups},
            seed=config.seed,
            step=step,
            round_number=rounds,
            count=_refill_size(missing, wanted, collected, selected),
        )
        if not prompts:
            break
        collected = collected.joined(_collect(parts, reporter, moment, prompts))
        rounds += 1
    if not selected.groups:
        _nothing_to_learn(selected, reporter, step, rounds)
    return Gathered(collected=collected, selected=selected, rounds=rounds)


def _nothing_to_learn(selected: Selected, reporter: Reporter, step: int, rounds: int) -> None:
    if not selected.uniform and not selected.stale:
        raise RewardError(f"step {step}: no group has two scored answers")
    reporter.note(
        f"step {step}: nothing to learn, {selected.uniform} groups all right or all wrong and "
        f"{selected.stale} too old after sampling {rounds} times"
    )


def _refill_size(missing: int, wanted: int, collected: Collected, selected: Selected) -> int:
    """Ask for as many more as should fill the step at the rate seen so far, but no more than it."""
    rate = len(selected.groups) / len(collected.groups)
    return wanted if rate == 0 else min(wanted, math.ceil(missing / rate))


def _collect(parts: Parts, reporter: Reporter, moment: Moment, prompts: list[Prompt]) -> Collected:
    """Sample and judge answers to some prompts."""
    collected = collect(
        ask(parts.policy.model, prompts),
        sampler=parts.sampler,
        scorer=parts.scorer,
        sampling=parts.sampling,
        moment=moment,
        progress=reporter.sampled,
    )
    if collected.failures:
        reporter.note(
            f"step {moment.step}: {len(collected.failures)} unscored, {collected.failures[0]}"
        )
    if parts.config.length_penalty.name == "none":
        return collected
    groups = tuple(punished(group, parts.length_penalty) for group in collected.groups)
    return replace(collected, groups=groups)


def punished(group: Group, penalty: LengthPenalty) -> Group:
    """Add a length penalty to the rewards of a group, as a part of its own."""
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
