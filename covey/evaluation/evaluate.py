"""Evaluation of a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.baselines import Baselines, constant_by_targets
from covey.engines.draw import Distribution
from covey.engines.protocol import Sampling
from covey.evaluation.intervals import Estimate
from covey.evaluation.items import PART, Item, ItemCompletion, estimates, is_graded
from covey.notebook import html_table, short_repr
from covey.records.metric_registry import estimate_text
from covey.rollout.collect import Collected, Collector
from covey.rollout.episode import encode_prompts
from covey.rollout.metrics import final_answer
from covey.types import Prompt

EVALUATION_STEP = 2**62
"""The step number that seeds the random numbers of every evaluation, so all evaluations use the
same random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evaluation:
    """The evaluation results of one policy."""

    prompts: int
    estimates: Mapping[str, Estimate]
    """Maps the name of each metric to its estimate. The metrics `greedy` (accuracy), `reward` and
    `parts/NAME` are means over the greedy completions. With k sampled completions per prompt, the
    other metrics are `mean@k` and `pass@2`, `pass@4`, and so on up to `pass@k`.
    """
    parts: Mapping[str, float]
    """Mean of each named part of the reward, over the greedy completions."""
    mean_tokens: float
    unscored: int
    first_failure: str | None = None
    """Error message of the first completion that could not be scored."""
    best_constant: float | None = None
    """Accuracy of a policy that gives the best constant answer to every prompt. If no constant
    answer was scored, `best_constant` is the fraction of prompts that have the most frequent
    target. If no constant answer was scored and a target is empty or too long to be an answer,
    `best_constant` is None."""
    baselines: Baselines | None = None
    """Scores of a constant answer, an empty completion and a copied prompt, if measured."""
    distinct_answers: int = 0
    """Number of different final answers among the greedy completions."""
    items: tuple[Item, ...] = ()
    """The completions of each prompt, with their scores."""
    reward_bounds: tuple[float, float] | None = None
    """The lowest and the highest reward that a completion can get, infinite if unknown."""

    @property
    def graded(self) -> bool:
        """Whether any reward differs from the usual 1 for a success and 0 for a failure."""
        return is_graded((item.greedy.reward, item.greedy.success) for item in self.items)

    def __repr__(self) -> str:
        return short_repr("Evaluation", self._summary())

    def _repr_html_(self) -> str:
        return html_table("Evaluation", self._summary())

    def _summary(self) -> dict[str, object]:
        """Return the values that a notebook shows; the completions are not among them."""
        estimated = {
            name: estimate_text(name, each.row())
            for name, each in self.estimates.items()
            if not name.startswith(PART)
        }
        found: dict[str, object] = {"prompts": self.prompts, **estimated}
        found |= {"mean_tokens": f"{self.mean_tokens:.1f}", "unscored": self.unscored}
        best = self.best_constant
        return found | ({} if best is None else {"best_constant": f"{best:.1%}"})

    def row(self) -> dict[str, Any]:
        """Return the evaluation as plain data for a line of eval.jsonl."""
        return {
            "prompts": self.prompts,
            **{name: estimate.row() for name, estimate in self.estimates.items()},
            "parts": dict(self.parts),
            "mean_tokens": self.mean_tokens,
            "unscored": self.unscored,
            "distinct_answers": self.distinct_answers,
            **({} if self.best_constant is None else {"best_constant": self.best_constant}),
            **({} if self.baselines is None else {"baselines": self.baselines.row()}),
        }


def evaluate(
    prompts: Sequence[Prompt],
    collector: Collector,
    *,
    sampling: Sampling,
    samples: int = 0,
    temperature: float = 1.0,
    baselines: Baselines | None = None,
) -> Evaluation:
    """Evaluate a policy on one greedy and `samples` sampled completions of each prompt."""
    encoded = encode_prompts(collector.model, prompts, collector.interaction)

    def complete(distribution: Distribution, group_size: int) -> Collected:
        settings = replace(sampling, group_size=group_size, distribution=distribution)
        return collector.collect(encoded, sampling=settings, step=EVALUATION_STEP)

    greedy, sampled = complete(Distribution(temperature=0.0), 1), Collected()
    if samples:
        sampled = complete(replace(sampling.distribution, temperature=temperature), samples)
    more = [group.rollouts for group in sampled.groups] or [()] * len(prompts)
    items = tuple(
        Item(
            prompt=group.prompt,
            greedy=ItemCompletion.of(group.rollouts[0]),
            samples=tuple(ItemCompletion.of(rollout) for rollout in rollouts),
        )
        for group, rollouts in zip(greedy.groups, more, strict=True)
    )
    constant = (baselines and baselines.constant) or constant_by_targets(prompts)
    failures = [*greedy.failures, *sampled.failures]
    rollouts = greedy.rollouts
    names = sorted({name for r in rollouts for name in r.parts})
    return Evaluation(
        prompts=len(items),
        estimates=estimates(items, collector.scorer.bounds),
        reward_bounds=collector.scorer.bounds,
        parts={n: _mean([r.parts[n] for r in rollouts if n in r.parts]) for n in names},
        mean_tokens=greedy.tokens / len(rollouts),
        unscored=len(failures),
        first_failure=failures[0] if failures else None,
        best_constant=constant.success if constant else None,
        baselines=baselines,
        distinct_answers=len({final_answer(rollout.text) for rollout in rollouts}),
        items=items,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
