"""Collects the rollouts of training steps: generate, score, penalize, filter, refill.

`collect_steps` does it for one or several steps at once. `Collector` generates completions and
scores them at the same time, for training and for evaluations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from covey.engines.protocol import Engine, Sampling
from covey.errors import RewardError
from covey.models.language_model import LanguageModel
from covey.parallel.world import ALONE, World
from covey.rewards.score import Call
from covey.rollout.episode import EncodedPrompt, Interaction, encode_prompts, generate, step_of
from covey.rollout.filter import Selected, select
from covey.rollout.prompts import refill_prompts, step_prompts
from covey.scoring import Job, Pending, Scorer, ScoreResult
from covey.stopping import may_be_given_up
from covey.types import Group, Prompt, Rollout

if TYPE_CHECKING:
    from covey.records.trackers import Tracker
    from covey.rewards import LengthPenalty
    from covey.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Scored groups, with scoring errors and the durations of sampling and scoring in seconds."""

    groups: tuple[Group, ...] = ()
    errors: tuple[tuple[str, ...], ...] = ()
    """For each group, one error message for every rollout that could not be scored."""
    trace: str = ""
    """The first traceback of a scoring error; empty if no exception was raised."""
    rollout_seconds: float = 0.0
    score_seconds: float = 0.0

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of all groups."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def failures(self) -> list[str]:
        """One error message for every rollout that could not be scored."""
        return [line for lines in self.errors for line in lines]

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(rollout.sampled for rollout in self.rollouts)

    def joined(self, more: Collected) -> Collected:
        """Append the groups of another sampling round of the same step."""
        return Collected(
            groups=self.groups + more.groups,
            errors=self.errors + more.errors,
            trace=self.trace or more.trace,
            rollout_seconds=self.rollout_seconds + more.rollout_seconds,
            score_seconds=self.score_seconds + more.score_seconds,
        )

    def of_all(self, ranks: World) -> Collected:
        """Return the groups that all ranks collected, in the order of the prompts."""
        seconds = ranks.gather((self.rollout_seconds, self.score_seconds))
        traces = ranks.gather(self.trace)
        return Collected(
            groups=tuple(ranks.unshare(self.groups)),
            errors=tuple(ranks.unshare(self.errors)),
            trace=next(filter(None, traces), ""),
            rollout_seconds=max(rollout for rollout, _ in seconds),
            score_seconds=max(score for _, score in seconds),
        )

    def split(self, counts: Sequence[int]) -> list[Collected]:
        """Split the groups into lists of the given sizes.

        Divide the measured seconds among the lists, in proportion to their sizes.
        """
        parts, start = [], 0
        for count in counts:
            share, here = count / len(self.groups), slice(start, start + count)
            part = replace(
                self,
                groups=self.groups[here],
                errors=self.errors[here],
                rollout_seconds=self.rollout_seconds * share,
                score_seconds=self.score_seconds * share,
            )
            parts.append(part)
            start += count
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Generates groups of rollouts with an engine, and scores them."""

    engine: Engine
    model: LanguageModel
    """The model whose tokenizer decodes completions."""
    scorer: Scorer
    progress: Callable[[int], None] = field(default=lambda count: None)
    """A function that is called with the number of completions that have just ended."""
    interaction: Interaction | None = None
    """The environment and its limits; None for single-turn rollouts without an environment."""
    ranks: World = ALONE
    """The ranks that share generation and scoring. Each rank collects some groups, and then
    receives the groups of all ranks."""
    updates: int = 0
    """Number of optimizer steps per training step; 0 in evaluations. Covey computes `global_step`,
    which some reward functions read, from `updates`."""
    max_steps: int = 0
    """Number of optimizer steps of the whole run; 0 if there is no training run."""

    def collect(
        self,
        prompts: Sequence[EncodedPrompt],
        *,
        sampling: Sampling,
        step: int,
        share: float = 1.0,
    ) -> Collected:
        """Generate and score `sampling.group_size` rollouts of every prompt.

        Each rollout is scored as soon as it ends, so scoring and generation overlap. The returned
        groups are in the order of the prompts, not in the order in which generation ends. `share`
        is the completed fraction of the run, from 0 to 1. Reward weights may depend on `share`.
        """
        mine = self.ranks.share(prompts)
        scoring = _Scoring(self, mine, sampling.group_size, step, share)

        def finished(number: int, rollout: Rollout) -> None:
            scoring.add(number, rollout)
            # The other ranks have probably finished about as many completions.
            self.progress(self.ranks.size)

        started = time.perf_counter()
        generated = generate(
            mine,
            engine=self.engine,
            model=self.model,
            sampling=sampling,
            step=step,
            finished=finished,
            interaction=self.interaction,
        )
        sampled = time.perf_counter()
        collected = replace(
            scoring.collected(generated),
            rollout_seconds=sampled - started,
            score_seconds=time.perf_counter() - sampled,
        )
        return collected if self.ranks.size == 1 else collected.of_all(self.ranks)


@dataclass(slots=True)
class _Scoring:
    """Submits the rollouts of one call of `collect` for scoring, and collects their scores."""

    collector: Collector
    prompts: Sequence[EncodedPrompt]
    group_size: int
    step: int
    share: float
    ended: dict[int, dict[int, Rollout]] = field(default_factory=dict)
    """Finished rollouts by prompt index and sample index, if the reward scores whole groups."""
    jobs: dict[int, dict[int, Pending]] = field(default_factory=dict)
    """Submitted scoring jobs, keyed by prompt index and by the sample index of the first
    rollout."""
    errors: dict[tuple[int, int], str] = field(default_factory=dict)
    """Errors of environments; the key is (prompt index, sample index). A rollout with an error is
    not scored."""

    def add(self, number: int, rollout: Rollout) -> None:
        """Submit a finished rollout for scoring, or its whole group when the group is complete."""
        if rollout.finish == "error":
            why = "" if rollout.episode is None else rollout.episode.error
            self.errors[number, rollout.sample] = f"environment: {why}"
        ready = {rollout.sample: rollout}
        if self.collector.scorer.whole_groups:
            ready = self.ended.setdefault(number, {})
            ready[rollout.sample] = rollout
            if len(ready) < self.group_size:
                return
        scored = [ready[s] for s in sorted(ready) if (number, s) not in self.errors]
        if scored:
            job = self._job(self.prompts[number], scored)
            jobs = self.jobs.setdefault(number, {})
            jobs[scored[0].sample] = self.collector.scorer.submit(job)

    def _job(self, prompt: EncodedPrompt, rollouts: Sequence[Rollout]) -> Job:
        updates = self.collector.updates
        call = Call(
            completion_ids=tuple(rollout.tokens for rollout in rollouts),
            global_step=updates * (step_of(prompt, self.step) - 1) if updates else None,
            max_steps=self.collector.max_steps,
        )
        texts = tuple(rollout.text for rollout in rollouts)
        return Job(prompt=prompt.prompt, texts=texts, progress=self.share, call=call)

    def collected(self, generated: Sequence[Group]) -> Collected:
        """Wait for the scores of all groups, and return the scored groups."""
        groups, errors, trace = [], [], ""
        for number, group in enumerate(generated):
            pairs = list(zip(group.rollouts, self._results(number), strict=True))
            identity = self.collector.scorer.identity
            scored = tuple(_scored(rollout, result, identity) for rollout, result in pairs)
            groups.append(replace(group, rollouts=scored))
            failed = (
                f"{rollout.prompt_id} sample {rollout.sample}: {result.error}"
                for rollout, result in pairs
                if result.score is None and result.error
            )
            errors.append(tuple(failed))
            trace = trace or next((result.trace for _, result in pairs if result.trace), "")
        return Collected(groups=tuple(groups), errors=tuple(errors), trace=trace)

    def _results(self, number: int) -> list[ScoreResult]:
        """Wait for the scores of a group."""
        jobs, samples = self.jobs.get(number, {}), range(self.group_size)
        with may_be_given_up():
            scores = [result for sample in sorted(jobs) for result in jobs[sample].result()]
        scored = (sample for sample in samples if (number, sample) not in self.errors)
        found = dict(zip(scored, scores, strict=True))
        return [
            found.get(sample) or ScoreResult(error=self.errors[number, sample])
            for sample in samples
        ]


def _scored(rollout: Rollout, result: ScoreResult, identity: str) -> Rollout:
    """Return a rollout with its score. If scoring failed, the rollout's reward stays None."""
    score = result.score
    if score is None:
        return replace(rollout, reward_id=identity)
    return replace(
        rollout,
        reward_id=identity,
        reward=float(score.reward),
        success=bool(score.success),
        parts=dict(score.parts),
        feedback=score.feedback,
    )


def check_failures(collected: Collected, limit: float) -> None:
    """Raise an error if too many completions could not be scored."""
    total = len(collected.rollouts)
    if len(collected.failures) > limit * total:
        error = RewardError(
            f"reward: {len(collected.failures)} of {total} completions could not be scored, more "
            f"than scoring.max_unscored = {limit} allows; the first error: "
            f"{collected.failures[0]}"
            + "; its traceback is in failure.txt in the run folder"
            * bool(collected.trace)
        )
        error.details = collected.trace
        raise error


# The rollouts of training steps, with dynamic sampling.


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


def collect_steps(run: Run, log: Tracker, tickets: Sequence[Ticket]) -> list[StepRollouts]:
    """Sample, score and filter the groups of the given steps, and apply the length penalty.

    One engine call generates the completions for the prompts of all steps. With dynamic sampling,
    each refill round is one engine call for all steps that still need groups.
    """
    steps = [StepRollouts(ticket=ticket) for ticket in tickets]
    while asked := {
        place: prompts for place, one in enumerate(steps) if (prompts := _next_prompts(run, one))
    }:
        found = _round(run, log, [(steps[n].ticket, p) for n, p in asked.items()])
        for place, collected in zip(asked, found, strict=True):
            steps[place] = _with_round(run, steps[place], collected)
    return [_checked(one) for one in steps]


def _next_prompts(run: Run, rollouts: StepRollouts) -> list[Prompt]:
    """Return the prompts of a step's next sampling round; [] if the step needs no further round.

    The prompts of a refill round depend only on the seed, the step and the round number. Refill
    rounds do not change the prompts of later steps.
    """
    config, prompts, ticket = run.config, run.prompts, rollouts.ticket
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
    run: Run, log: Tracker, asked: Sequence[tuple[Ticket, Sequence[Prompt]]]
) -> list[Collected]:
    """Sample and score one round of groups for each step, and apply the length penalty."""
    model, train = run.policy.model, run.config.train
    collector = Collector(
        engine=run.engine,
        model=model,
        scorer=run.scorer,
        progress=log.sampled,
        ranks=run.world,
        interaction=run.interaction,
        updates=train.optimizer_steps,
        max_steps=train.total_optimizer_steps,
    )
    encoded = [
        replace(prompt, step=ticket.step)
        for ticket, prompts in asked
        for prompt in encode_prompts(model, prompts, run.interaction)
    ]
    first = asked[0][0]
    collected = collector.collect(
        encoded, sampling=run.sampling, step=first.step, share=first.share
    )
    groups = collected.groups
    if run.config.length_penalty.name != "none":
        groups = tuple(penalized(group, run.length_penalty) for group in groups)
    if run.privileged is not None:
        groups = tuple(run.privileged.extended(group) for group in groups)
    return replace(collected, groups=groups).split([len(prompts) for _, prompts in asked])


def _with_round(run: Run, rollouts: StepRollouts, found: Collected) -> StepRollouts:
    """Add a sampling round's groups to a step, and select the groups to train on."""
    config, ticket = run.config, rollouts.ticket
    notes = run.interaction.notes(found.rollouts) if run.interaction else []
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


def collect_step(run: Run, step: int, log: Tracker, share: float | None = None) -> StepRollouts:
    """Load the current weights into the engine, collect a step's groups, and log its notes."""
    share = (step - 1) / run.config.train.steps if share is None else share
    run.engine.load_weights(run.policy.weights, run.policy.version)
    (found,) = collect_steps(run, log, [Ticket(step, run.policy.version, share)])
    for note in found.notes:
        log.note(note)
    return found
