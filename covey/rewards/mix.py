"""Composite rewards: a weighted mean of rewards, and a separate reward for each task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from covey.rewards.coherence import coherence, robust_factor
from covey.rewards.score import Reward, Score, at_progress, check_option, max_seconds
from covey.rewards.text import after_thinking, without_addresses
from covey.types import Prompt

ACCURACY, FORMAT = "accuracy", "format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(Reward):
    """The weighted mean `r = sum_k w_k r_k` of reward parts, with weights that sum to 1.

    The part called `accuracy` decides `success`. If `gated` is true and a part is called `format`,
    a wrong format sets the accuracy to its lower bound. If the accuracy has no lower bound, a wrong
    format sets a positive accuracy to 0.

    During the first part of a run, up to the fraction `early_until`, the weights change linearly
    from `early` to `weights`. With `robust`, the difference between the reward and its lower bound
    is multiplied by `robust_factor`.

    With `correct_first` and any weights, a correct completion scores higher than any incorrect
    completion:

    - A correct completion scores in the upper half of the reward range, in proportion to the
      weighted mean of the parts. If a completion has the correct answer in the wrong format, the
      weighted mean includes only the part `format`.
    - An incorrect completion scores in the lower half of the reward range, in proportion to the
      weighted mean of only these parts: the accuracy, the judges and, if `gated`, the format.
    - If the prompt has no target and the accuracy is neutral (`without_target`), the reward is the
      weighted mean of all parts. In a wrong format, the accuracy does not count.
    - A completion without a final answer, or an incorrect completion that is gibberish, gets the
      lowest reward.
    """

    parts: Mapping[str, Reward]
    weights: Mapping[str, float]
    gated: bool = True
    robust: bool = False
    early: Mapping[str, float] = field(default_factory=dict)
    early_until: float = 0.2
    correct_first: bool = False

    version: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_option(
            ACCURACY in self.parts,
            f"one part must be called {ACCURACY!r}: it decides whether a completion is correct; "
            f"there are {', '.join(self.parts) or 'no parts'}",
        )
        _check_weights("weights", self.weights, self.parts)
        if self.early:
            _check_weights("early", self.early, self.parts)
        check_option(
            0 < self.early_until <= 1,
            f"early_until = {self.early_until} must be above 0 and at most 1",
        )
        judges = self._judges()
        for weights in filter(None, (self.weights, self.early)):
            total = sum(weights[name] for name in judges)
            check_option(  # because judges can be manipulated
                total <= 0.5 and ACCURACY not in judges,
                f"{', '.join(judges)} may have at most half of the weight, not {total:g}, and may "
                f"not be the part {ACCURACY!r}: a judge never decides alone",
            )
        check_option(
            not self.correct_first or all(map(math.isfinite, self.bounds)),
            "correct_first needs parts with bounds, which a plain function does not have: make it "
            "a class with bounds, or remove correct_first",
        )

    def _judges(self) -> list[str]:
        return [n for n, p in self.parts.items() if getattr(p, "needs_rule", False)]

    @property
    def quick(self) -> bool:
        return all(part.quick for part in self.parts.values())

    @property
    def max_seconds(self) -> float:
        """The sum of the reward parts' time limits, because the parts run one after the other."""
        return sum(max_seconds(part) for part in self.parts.values())

    @property
    def bounds(self) -> tuple[float, float]:
        ends = [self._ends(w) for w in (self.weights, self.early or self.weights)]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _ends(self, weights: Mapping[str, float]) -> tuple[float, float]:
        # 0 times infinity is NaN, so parts without weight are left out.
        counted = [(w, self.parts[name].bounds) for name, w in weights.items() if w]
        return sum(w * low for w, (low, _) in counted), sum(w * high for w, (_, high) in counted)

    def at(self, share: float) -> Mix:
        """Return this mix with the weights that apply after the fraction `share` of the run.

        If a reward part is itself a mix, its weights change in the same way.
        """
        left = max(0.0, 1.0 - share / self.early_until)
        early = self.early or self.weights
        weights = {k: w + (early[k] - w) * left for k, w in self.weights.items()}
        parts = {name: at_progress(part, share) for name, part in self.parts.items()}
        return replace(self, parts=parts, weights=weights, early={})

    def __call__(self, prompt: Prompt, text: str) -> Score:
        scores = {name: part(prompt, text) for name, part in self.parts.items()}
        holds = not (self.gated and FORMAT in scores) or scores[FORMAT].success
        logged = {name: score.reward for name, score in scores.items()} | {
            f"{name}/{inner}": value
            for name, score in scores.items()
            if len(score.parts) > 1
            for inner, value in score.parts.items()
        }
        factor = 1.0
        if self.robust:
            factor = logged["robust"] = robust_factor(text)
        if self.correct_first:
            reward = self._halves(scores, holds, factor, text)
        else:
            reward = self._mean(scores, holds, factor)
        low, high = self._ends(self.weights)
        return Score(
            # Rounding can move a sum of products slightly out of the bounds.
            reward=min(max(reward, low), high),
            success=scores[ACCURACY].success and holds,
            parts=logged,
            attempted=scores[ACCURACY].attempted,
            neutral=scores[ACCURACY].neutral,
            feedback="\n".join(score.feedback for score in scores.values() if score.feedback),
        )

    def _mean(self, scores: Mapping[str, Score], holds: bool, factor: float) -> float:
        values = {name: score.reward for name, score in scores.items()}
        if not holds:
            values[ACCURACY] = _least(self.parts[ACCURACY].bounds[0], values[ACCURACY])
        total = sum(self.weights[name] * value for name, value in values.items())
        least = _least(self._ends(self.weights)[0], total)
        return least + (total - least) * factor

    def _halves(self, scores: Mapping[str, Score], holds: bool, factor: float, text: str) -> float:
        """Return the reward of a completion if `correct_first` is true.

        A success gets a reward in the upper half of the reward range, and a failure gets a reward
        in the lower half.
        """
        low, high = self._ends(self.weights)
        if scores[ACCURACY].success:
            counted = list(scores) if holds else [FORMAT]
            share = 0.5 + 0.5 * factor * self._share(scores, counted)
        elif not scores[ACCURACY].attempted or _is_noise(text, self.robust and factor == 1.0):
            share = 0.0
        elif scores[ACCURACY].neutral:
            # No completion of this prompt is correct, so the reward has no halves.
            counted = [name for name in scores if holds or name != ACCURACY]
            share = factor * self._share(scores, counted)
        else:
            counted = [ACCURACY, *self._judges(), *((FORMAT,) if self.gated else ())]
            counted = [name for name in counted if name in scores]
            most = sum(self.weights[name] for name in counted)
            share = 0.5 * factor * self._share(scores, counted) / most if most else 0.0
        return low + (high - low) * share

    def _share(self, scores: Mapping[str, Score], counted: Iterable[str]) -> float:
        """Return the weighted mean of the given reward parts, each scaled to [0, 1]."""
        total = 0.0
        for name in counted:
            low, high = self.parts[name].bounds
            if self.weights[name]:
                total += self.weights[name] * (scores[name].reward - low) / (high - low)
        return total


def _is_noise(text: str, robust: bool) -> bool:
    """Return whether the thinking or the answer is gibberish. Links are ignored.

    If `robust` is true, only the answer is tested, because `robust_factor` has already tested the
    thinking.
    """
    answer = after_thinking(text)
    if coherence(without_addresses(answer)) < 0.5:
        return True
    thinking = "" if robust else without_addresses(text.removesuffix(answer))
    return bool(thinking.strip()) and coherence(thinking) < 0.5


def _least(bound: float, reward: float) -> float:
    return bound if math.isfinite(bound) else min(reward, 0.0)


def _check_weights(what: str, weights: Mapping[str, float], parts: Mapping[str, Reward]) -> None:
    names = ", ".join(sorted(set(weights) ^ set(parts)))
    check_option(not names, f"{what} and parts must have the same names; they differ in {names}")
    total = sum(weights.values())
    listed = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    check_option(
        min(weights.values()) >= 0 and abs(total - 1) <= 1e-6,
        f"{what} must not be negative and must sum to 1, not {total:g} ({listed})",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTask(Reward):
    """A reward that chooses the reward function by the prompt's task, or by the value of a data
    column."""

    tasks: Mapping[str, Reward]
    column: str = ""
    default: str = ""

    @property
    def quick(self) -> bool:
        return all(reward.quick for reward in self.tasks.values())

    @property
    def max_seconds(self) -> float:
        return max(max_seconds(reward) for reward in self.tasks.values())

    @property
    def bounds(self) -> tuple[float, float]:
        ends = [reward.bounds for reward in self.tasks.values()]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def at(self, share: float) -> ByTask:
        return replace(self, tasks={k: at_progress(r, share) for k, r in self.tasks.items()})

    def __call__(self, prompt: Prompt, text: str) -> Score:
        key = prompt.info.get(self.column, self.default) if self.column else prompt.task
        if key not in self.tasks:
            raise ValueError(f"reward.tasks has no reward for {self.column or 'task'} {key!r}")
        return self.tasks[key](prompt, text)
