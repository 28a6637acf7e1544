"""Rollout sources, which provide the groups of each step to the training loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from covey.errors import RewardError
from covey.rollout.collect import Collected, Collector, check_failures
from covey.rollout.episode import encode_prompts
from covey.rollout.filter import Selected, select
from covey.rollout.prompts import refill_prompts, step_prompts
from covey.types import Group, Prompt

if TYPE_CHECKING:
    from covey.engines.protocol import WeightSource
    from covey.records.trackers import Tracker
    from covey.rewards import LengthPenalty
    from covey.training.build import Parts


class Ticket(NamedTuple):
    """A request for the rollouts of one training step."""

    step: int
    """Number of the step, from 1."""
    version: int
    """Version of the weights that generate the rollouts, counted in optimizer steps."""
    share: float
    """The completed fraction of the run, from 0 to 1. Reward weights may depend on `share`."""
    picks: tuple[int, ...] = ()
    """Indices of the prompts that a curriculum drew; empty without a curriculum. The prompts of
    refill rounds come last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of a training step."""

    ticket: Ticket
    collected: Collected = field(default_factory=Collected)
    """All sampled rollouts."""
    selected: Selected = field(default_factory=Selected)
    """The groups to train on."""
    rounds: int = 0
    """Number of sampling rounds; dynamic sampling may need more than one round."""
    notes: tuple[str, ...] = ()
    """Notes for the user, shown when the training step begins."""
    engine_waited: float = 0.0
    """Seconds that the engine waited for the trainer before it generated the rollouts."""

    @property
    def used_picks(self) -> tuple[int, ...]:
        """The indices of the prompts that a curriculum drew, in the order of the groups."""
        return self.ticket.picks[: len(self.collected.groups)]


class RolloutSource(Protocol):
    """Provides the groups of each step to the training loop.

    In each step, the training loop calls the following methods:

        start(tickets up to k steps ahead, weights, version) -> take(step) -> train

    If the source works k steps ahead of training, the weights after step s - 1 generate the groups
    of step s + k. The training loop takes the rollouts of every step once, in the order of the
    steps.
    """

    def start(self, tickets: Sequence[Ticket], weights: WeightSource, version: int) -> None:
        """Request rollouts of the given steps with the trainer's current weights.

        This method does not wait for the rollouts. After `start` returns, the trainer may change
        its weights.
        """

    def take(self, step: int) -> StepRollouts:
        """Return the rollouts of a requested step, once they are generated and scored."""

    def pending(self, after: int) -> list[StepRollouts]:
        """Wait for the rollouts of all requested steps later than `after`, and return them.

        The checkpoint of step `after` saves the returned rollouts. A resumed run cannot generate
        the saved rollouts again, because the weights that generated them no longer exist.
        """

    def close(self) -> None:
        """End background work, but do not close the engine."""


@dataclass(slots=True)
class SynchronousSource:
    """Generates rollouts only when the training loop needs them, with the current weights.

    One engine call generates the rollouts of all requested steps.
    """

    parts: Parts
    reporter: Tracker
    started: list[Ticket] = field(init=False, default_factory=list)
    done: dict[int, StepRollouts] = field(init=False, default_factory=dict)
    """Collected rollouts that the training loop has not taken yet, by step."""

    def start(self, tickets: Sequence[Ticket], weights: WeightSource, version: int) -> None:
        """Load the weights into the engine, and store the requests for rollouts."""
        if tickets:
            self.parts.engine.load_weights(weights, version)
        self.started = [*tickets]

    def take(self, step: int) -> StepRollouts:
        """Return the groups of a step.

        If the groups of the step are not collected yet, collect the groups of all requested steps.
        """
        if step not in self.done:
            found = collect_steps(self.parts, self.reporter, self.started)
            self.done |= {one.ticket.step: one for one in found}
        return self.done.pop(step)

    def pending(self, after: int) -> list[StepRollouts]:
        """Return the collected rollouts that the training loop has not taken yet."""
        return [self.done[step] for step in sorted(self.done) if step > after]

    def close(self) -> None:
        """Do nothing."""

    def groups(self, step: int, *, share: float | None = None) -> StepRollouts:
        """Collect a step's groups with the policy's current weights, and log notes for the user."""
        policy = self.parts.policy
        share = (step - 1) / self.parts.config.train.steps if share is None else share
        self.start([Ticket(step, policy.version, share)], policy.weights, policy.version)
        rollouts = self.take(step)
        for note in rollouts.notes:
            self.reporter.note(note)
        return rollouts


def collect_steps(parts: Parts, reporter: Tracker, tickets: Sequence[Ticket]) -> list[StepRollouts]:
    """Sample, score and filter the groups of the given steps, and apply the length penalty.

    One engine call generates the completions for the prompts of all steps. With dynamic sampling,
    each refill round is one engine call for all steps that still need groups.
    """
    steps = [StepRollouts(ticket=ticket) for ticket in tickets]
    while asked := {
        place: prompts for place, one in enumerate(steps) if (prompts := _next_prompts(parts, one))
    }:
        found = _round(parts, reporter, [(steps[n].ticket, p) for n, p in asked.items()])
        for place, collected in zip(asked, found, strict=True):
            steps[place] = _with_round(parts, steps[place], collected)
    return [_checked(one) for one in steps]


def _next_prompts(parts: Parts, rollouts: StepRollouts) -> list[Prompt]:
    """Return the prompts of a step's next sampling round; [] if the step needs no further round.

    The prompts of a refill round depend only on the seed, the step and the round number. Refill
    rounds do not change the prompts of later steps.
    """
    config, prompts, ticket = parts.config, parts.train_prompts, rollouts.ticket
    count = wanted = config.rollout.prompts_per_step
    done, rounds = rollouts.collected.groups, rollouts.rounds
    if rounds:
        usable = len(rollouts.selected.groups)
        if usable == wanted or rounds >= config.filter.rounds:
            return []
        if usable:  # as if the same fraction of the new groups will be usable
            count = min(wanted, math.ceil((wanted - usable) / (usable / len(done))))
    if ticket.picks:
        return [prompts[pick] for pick in ticket.picks[len(done) : len(done) + count]]
    if not rounds:
        return step_prompts(prompts, seed=config.seed, step=ticket.step - 1, count=count)
    return refill_prompts(
        prompts,
        used={group.prompt.id for group in done},
        seed=config.seed,
        step=ticket.step,
        round_number=rounds,
        count=count,
    )


def _round(
    parts: Parts, reporter: Tracker, asked: Sequence[tuple[Ticket, Sequence[Prompt]]]
) -> list[Collected]:
    """Sample and score one round of groups for each step, and apply the length penalty."""
    model, train = parts.policy.model, parts.config.train
    collector = Collector(
        engine=parts.engine,
        model=model,
        scorer=parts.scorer,
        progress=reporter.sampled,
        ranks=parts.world,
        interaction=parts.interaction,
        updates=train.optimizer_steps,
        max_steps=train.total_optimizer_steps,
    )
    encoded = [
        replace(prompt, step=ticket.step)
        for ticket, prompts in asked
        for prompt in encode_prompts(model, prompts, parts.interaction)
    ]
    first = asked[0][0]
    collected = collector.collect(
        encoded, sampling=parts.sampling, step=first.step, share=first.share
    )
    groups = collected.groups
    if parts.config.length_penalty.name != "none":
        groups = tuple(penalized(group, parts.length_penalty) for group in groups)
    if parts.privileged is not None:
        groups = tuple(parts.privileged.extended(group) for group in groups)
    return replace(collected, groups=groups).split([len(prompts) for _, prompts in asked])


def _with_round(parts: Parts, rollouts: StepRollouts, found: Collected) -> StepRollouts:
    """Add a sampling round's groups to a step, and select the groups to train on."""
    config, ticket = parts.config, rollouts.ticket
    notes = parts.interaction.notes(found.rollouts) if parts.interaction else []
    if found.failures:
        notes = [*notes, f"{len(found.failures)} unscored, {found.failures[0]}"]
    collected = rollouts.collected.joined(found)
    check_failures(collected, config.scoring.max_unscored)
    selected = select(
        collected.groups,
        dynamic=config.filter.dynamic_sampling,
        drop_flat=config.filter.drop_flat,
        most=config.rollout.prompts_per_step,
        fewest=min(2, config.rollout.group_size),
    )
    return StepRollouts(
        ticket=ticket,
        collected=collected,
        selected=selected,
        rounds=rollouts.rounds + 1,
        notes=(*rollouts.notes, *(f"step {ticket.step}: {note}" for note in notes)),
    )


def _checked(rollouts: StepRollouts) -> StepRollouts:
    """Add a note if a step has no group to train on; raise RewardError if no group was scored."""
    selected, step = rollouts.selected, rollouts.ticket.step
    if selected.groups:
        return rollouts
    if not selected.uniform:
        raise RewardError(
            f"step {step}: no group has two scored completions, so there is no group to train on; "
            "check the errors of the reward function"
        )
    note = (
        f"step {step}: no group to train on after {rollouts.rounds} sampling rounds: "
        f"{selected.uniform} groups have equal results"
    )
    return replace(rollouts, notes=(*rollouts.notes, note))


def penalized(group: Group, penalty: LengthPenalty) -> Group:
    """Add a length penalty to the rewards of a group, as a separate part of the reward."""
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
