"""Collecting a step's experience: draw prompts, sample answers, judge them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from covey.errors import DataError, RewardError
from covey.policy.model import LanguageModel
from covey.rewards import Reward
from covey.sampler.protocol import Question, Sampler, Sampling
from covey.sampler.random import prompt_indices, refill_order
from covey.types import Group, Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The groups of a step, and how collecting them went."""

    groups: tuple[Group, ...]
    failures: tuple[str, ...]
    """One line for every answer that could not be scored."""
    rollout_seconds: float
    score_seconds: float

    @property
    def rollouts(self) -> list[Rollout]:
        """All answers."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def tokens(self) -> int:
        """How many tokens were sampled."""
        return sum(len(rollout.tokens) for rollout in self.rollouts)

    def joined(self, more: Collected) -> Collected:
        """Put two rounds of the same step together."""
        return Collected(
            groups=self.groups + more.groups,
            failures=self.failures + more.failures,
            rollout_seconds=self.rollout_seconds + more.rollout_seconds,
            score_seconds=self.score_seconds + more.score_seconds,
        )


def ask(model: LanguageModel, prompts: Iterable[Prompt]) -> list[Question]:
    """Turn prompts into questions with tokens."""
    return [Question(prompt=p, tokens=model.encode(p.messages)) for p in prompts]


def draw_prompts(prompts: Sequence[Prompt], *, seed: int, step: int, count: int) -> list[Prompt]:
    """Return the prompts of a step: a function of seed and step alone."""
    # A task smaller than a step would ask a prompt twice, with the same random numbers.
    if len(prompts) < count:
        raise DataError(
            f"task: {len(prompts)} training prompts cannot fill a step of {count}; "
            f"lower rollout.prompts to at most {len(prompts)}"
        )
    picks = prompt_indices(seed=seed, step=step, count=count, size=len(prompts))
    return [prompts[i] for i in picks]


def draw_refill(
    prompts: Sequence[Prompt],
    *,
    asked: Collection[str],
    seed: int,
    step: int,
    round_number: int,
    count: int,
) -> list[Prompt]:
    """Return more prompts for a step, none that it has asked already; as many as there are."""
    order = refill_order(seed=seed, step=step, round_number=round_number, size=len(prompts))
    fresh = (prompts[i] for i in order if prompts[i].id not in asked)
    return list(itertools.islice(fresh, count))


def score(prompt: Prompt, rollout: Rollout, reward: Reward) -> tuple[Rollout, str | None]:
    """Judge one answer. What cannot be judged keeps reward None, and the reason is returned."""
    try:
        judged = reward(prompt, rollout.text)
        if not math.isfinite(judged.reward):
            raise ValueError(f"the reward is {judged.reward}")
    except Exception as error:  # a user's function may raise anything; it is counted, not hidden
        reason = f"{type(error).__name__}: {error}"
        return rollout, f"{prompt.id} sample {rollout.sample}: {reason}"
    scored = replace(
        rollout,
        reward=float(judged.reward),
        success=bool(judged.success),
        parts=dict(judged.parts),
    )
    return scored, None


def collect(
    questions: Sequence[Question],
    *,
    sampler: Sampler,
    reward: Reward,
    step: int,
    sampling: Sampling,
    version: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Collected:
    """Sample and judge `sampling.samples` answers to every question."""
    started = time.perf_counter()
    answers = sampler.generate(
        questions,
        step=step,
        sampling=sampling,
        version=version,
        progress=progress,
    )
    sampled = time.perf_counter()
    failures: list[str] = []
    groups = []
    for question, rollouts in zip(questions, answers, strict=True):
        judged = [score(question.prompt, rollout, reward) for rollout in rollouts]
        groups.append(Group(prompt=question.prompt, rollouts=tuple(r for r, _ in judged)))
        failures += [reason for _, reason in judged if reason is not None]
    return Collected(
        groups=tuple(groups),
        failures=tuple(failures),
        rollout_seconds=sampled - started,
        score_seconds=time.perf_counter() - sampled,
    )


def check_failures(collected: Collected, limit: float) -> None:
    """Stop when too many answers could not be scored."""
    total = sum(len(group.rollouts) for group in collected.groups)
    if len(collected.failures) > limit * total:
        raise RewardError(
            f"reward: {len(collected.failures)} of {total} answers could not be scored, more than "
            f"rollout.max_unscored = {limit} allows; the first: {collected.failures[0]}"
        )
