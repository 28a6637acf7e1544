"""Measuring a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.collect import Collected, Moment, collect
from covey.evaluate.statistics import Estimate, mean_over_prompts, pass_at_k, proportion
from covey.sampler.pick import Distribution
from covey.sampler.protocol import Question, Sampler, Sampling
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

    def row(self) -> dict[str, Any]:
        """Return plain data, for eval.jsonl."""
        return {
            "prompts": self.prompts,
            **{
                name: {"value": e.value, "low": e.low, "high": e.high}
                for name, e in self.estimates.items()
            },
            "parts": dict(self.parts),
            "mean_tokens": self.mean_tokens,
            "unscored": self.unscored,
        }


def evaluate(
    questions: Sequence[Question],
    *,
    sampler: Sampler,
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
    answers = [group.rollouts[0] for group in greedy.groups]
    right = sum(bool(r.success) for r in answers)
    estimates = {"greedy": proportion(right, len(answers))}
    unscored = len(greedy.failures)
    if samples:
        sampled = answer(replace(sampling.distribution, temperature=temperature), samples)
        estimates |= _sampled_estimates(sampled, samples)
        unscored += len(sampled.failures)
    names = sorted({name for r in answers for name in r.parts})
    return Evaluation(
        prompts=len(answers),
        estimates=estimates,
        parts={n: _mean([r.parts[n] for r in answers if n in r.parts]) for n in names},
        mean_tokens=sum(len(r.tokens) for r in answers) / len(answers),
        unscored=unscored,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sampled_estimates(sampled: Collected, samples: int) -> dict[str, Estimate]:
    # An answer that could not be scored counts as wrong here: a measurement has no group to spare.
    right = [sum(bool(r.success) for r in group.rollouts) for group in sampled.groups]
    estimates = {f"mean@{samples}": mean_over_prompts([c / samples for c in right])}
    ks = [k for k in (2**power for power in range(samples.bit_length())) if 1 < k <= samples]
    for k in ks:
        chances = [pass_at_k(samples, correct, k) for correct in right]
        estimates[f"pass@{k}"] = mean_over_prompts(chances)
    return estimates
