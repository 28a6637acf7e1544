"""Collecting a step's experience: draw prompts, sample answers, judge them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from covey.engines.protocol import Engine, Question, Sampling
from covey.errors import DataError, RewardError
from covey.models.language_model import LanguageModel
from covey.rng import prompt_indices, refill_order
from covey.scoring import Job, Pending, Scorer, ScoreResult
from covey.stopping import may_be_given_up
from covey.types import Group, Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When answers are sampled."""

    step: int
    """Part of the address of their random numbers."""
    version: int = 0
    """How many optimizer steps the policy has taken."""
    share: float = 1.0
    """How much of the run is done, 0 to 1: the weights of a reward may depend on it."""


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
    opening = model.opening
    return [Question(prompt=p, tokens=model.encode(p.messages), opening=opening) for p in prompts]


def prompt_notes(model: LanguageModel, prompts: Sequence[Prompt]) -> list[str]:
    """Return what a user should know of how these prompts are put to the model."""
    first = prompts[0].messages[0]["role"]
    if first == "system" and model.renderer is not None and model.renderer.folds_system:
        return [
            "the model's chat template has no place for a system message: it opens the first "
            "question instead"
        ]
    return []


def draw_prompts(prompts: Sequence[Prompt], *, seed: int, step: int, count: int) -> list[Prompt]:
    """Return the prompts of a step: a function of seed and step alone."""
    # A task smaller than a step would ask a prompt twice, with the same random numbers.
    if len(prompts) < count:
        raise DataError(
            f"task: {len(prompts)} training prompts cannot fill a step of {count}; "
            f"lower rollout.prompts_per_step to at most {len(prompts)}"
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


@dataclass(slots=True)
class _Judging:
    """Answers on their way through the scorer, in the order of the questions."""

    questions: Sequence[Question]
    samples: int
    scorer: Scorer
    share: float
    rollouts: dict[tuple[int, int], Rollout] = field(default_factory=dict)
    futures: dict[tuple[int, int], Pending] = field(default_factory=dict)
    """By question and sample; -1 in place of a sample stands for the whole group."""

    def add(self, question: int, rollout: Rollout) -> None:
        """Hand over an answer as soon as it is finished, or a group as soon as it is complete."""
        self.rollouts[question, rollout.sample] = rollout
        if not self.scorer.whole_groups:
            self._submit(question, rollout.sample, (rollout.text,))
            return
        group = [self.rollouts.get((question, sample)) for sample in range(self.samples)]
        if None not in group:
            self._submit(question, -1, tuple(r.text for r in group if r is not None))

    def _submit(self, question: int, sample: int, texts: tuple[str, ...]) -> None:
        prompt = self.questions[question].prompt
        job = Job(prompt=prompt, texts=texts, progress=self.share)
        self.futures[question, sample] = self.scorer.submit(job)

    def group(self, question: int) -> list[ScoreResult]:
        """Wait for the verdicts on all answers to a question."""
        if self.scorer.whole_groups:
            futures = [self.futures[question, -1]]
        else:
            futures = [self.futures[question, sample] for sample in range(self.samples)]
        with may_be_given_up():
            return [verdict for future in futures for verdict in future.result()]


def collect(
    questions: Sequence[Question],
    *,
    sampler: Engine,
    scorer: Scorer,
    sampling: Sampling,
    moment: Moment,
    progress: Callable[[int], None] | None = None,
) -> Collected:
    """Sample and judge `sampling.samples` answers to every question.

    Answers are handed to the scorer as they end, so that judging goes on beside sampling; what is
    returned is in the order of the questions whatever was done first.
    """
    judging = _Judging(questions, sampling.samples, scorer, moment.share)

    def finished(question: int, rollout: Rollout) -> None:
        judging.add(question, _opened(questions[question], rollout))
        if progress is not None:
            progress(1)

    started = time.perf_counter()
    answers = sampler.generate(
        questions,
        step=moment.step,
        sampling=sampling,
        version=moment.version,
        finished=finished,
    )
    sampled = time.perf_counter()
    groups, failures = [], []
    for number, (question, rollouts) in enumerate(zip(questions, answers, strict=True)):
        opened = [_opened(question, rollout) for rollout in rollouts]
        judged = list(zip(opened, judging.group(number), strict=True))
        scored = tuple(_scored(rollout, verdict, scorer.identity) for rollout, verdict in judged)
        groups.append(Group(prompt=question.prompt, rollouts=scored))
        failures += [
            f"{question.prompt.id} sample {rollout.sample}: {verdict.error}"
            for rollout, verdict in judged
            if verdict.score is None
        ]
    return Collected(
        groups=tuple(groups),
        failures=tuple(failures),
        rollout_seconds=sampled - started,
        score_seconds=time.perf_counter() - sampled,
    )


def _opened(question: Question, rollout: Rollout) -> Rollout:
    """Put the opening in front of the text; the tokens stay what the model wrote."""
    return replace(rollout, text=question.opening + rollout.text) if question.opening else rollout


def _scored(rollout: Rollout, verdict: ScoreResult, identity: str) -> Rollout:
    """Fill in the judgement. What could not be judged keeps reward None."""
    if verdict.score is None:
        return replace(rollout, reward_id=identity)
    return replace(
        rollout,
        reward_id=identity,
        reward=float(verdict.score.reward),
        success=bool(verdict.score.success),
        parts=dict(verdict.score.parts),
    )


def check_failures(collected: Collected, limit: float) -> None:
    """Stop when too many answers could not be scored."""
    total = sum(len(group.rollouts) for group in collected.groups)
    if len(collected.failures) > limit * total:
        raise RewardError(
            f"reward: {len(collected.failures)} of {total} answers could not be scored, more than "
            f"scoring.max_unscored = {limit} allows; the first: {collected.failures[0]}"
        )
