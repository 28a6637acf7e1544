"""Measuring a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.engines.draw import Distribution
from covey.engines.protocol import Engine, Question, Sampling
from covey.evaluate.intervals import Estimate
from covey.evaluate.items import Answer, Item, estimates
from covey.rollout.collect import Collected, Moment, collect
from covey.scoring import Scorer

EVALUATION_STEP = 2**62
"""Evaluations draw from an address of their own, the same each time, so that they can be paired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Measurements of one policy."""

    prompts: int
    estimates: Mapping[str, Estimate]
    """`greedy`, and with samples `mean@k`, `pass@2`, `pass@4`, ... up to `pass@k`."""
    parts: Mapping[str, float]
    """Means of the reward's parts over the greedy answers."""
    mean_tokens: float
    unscored: int
    first_failure: str | None = None
    """Why the first of the unscored answers has no score."""
    items: tuple[Item, ...] = ()
    """What all this was taken over, prompt by prompt."""

    def row(self) -> dict[str, Any]:
        """Return plain data, for eval.jsonl."""
        return {
            "prompts": self.prompts,
            **{name: estimate.row() for name, estimate in self.estimates.items()},
            "parts": dict(self.parts),
            "mean_tokens": self.mean_tokens,
            "unscored": self.unscored,
        }


def evaluate(
    questions: Sequence[Question],
    *,
    sampler: Engine,
    scorer: Scorer,
    sampling: Sampling,
    samples: int = 0,
    temperature: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Answer every question greedily and, if asked, `samples` times at `temperature`."""

    def answer(distribution: Distribution, samples: int) -> Collected:
        return collect(
            questions,
            sampler=sampler,
            scorer=scorer,
            moment=Moment(step=EVALUATION_STEP),
            sampling=replace(sampling, samples=samples, distribution=distribution),
            progress=progress,
        )

    greedy = answer(Distribution(temperature=0.0), 1)
    sampled = None
    if samples:
        sampled = answer(replace(sampling.distribution, temperature=temperature), samples)
    items = _items(greedy, sampled)
    failures = [*greedy.failures, *(sampled.failures if sampled else ())]
    answers = [group.rollouts[0] for group in greedy.groups]
    names = sorted({name for r in answers for name in r.parts})
    return Evaluation(
        prompts=len(items),
        estimates=estimates(items),
        parts={n: _mean([r.parts[n] for r in answers if n in r.parts]) for n in names},
        mean_tokens=sum(len(r.tokens) for r in answers) / len(answers),
        unscored=len(failures),
        first_failure=failures[0] if failures else None,
        items=items,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _items(greedy: Collected, sampled: Collected | None) -> tuple[Item, ...]:
    more = [group.rollouts for group in sampled.groups] if sampled else [()] * len(greedy.groups)
    return tuple(
        Item(
            prompt=group.prompt,
            greedy=Answer.of(group.rollouts[0]),
            samples=tuple(Answer.of(rollout) for rollout in rollouts),
        )
        for group, rollouts in zip(greedy.groups, more, strict=True)
    )
