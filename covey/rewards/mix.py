"""Several rewards as one: a weighted mean, a gate, a schedule, and factors against gaming."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from covey.errors import ConfigError
from covey.rewards.citations import without_addresses
from covey.rewards.coherence import coherence
from covey.rewards.robust import robust_factor
from covey.rewards.score import Reward, Score, longest
from covey.rewards.text import after_thinking
from covey.types import Prompt

ACCURACY, FORMAT = "accuracy", "format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The weighted mean of parts: r = sum_k w_k r_k, with weights that sum to 1.

    One part is called `accuracy`: whether an answer is right is for it to say. `gated`: if there is
    a part called `format`, then accuracy counts only where the format holds; otherwise it counts
    for the least that it can give, and that is 0, or what it gave below 0, where it has no
    bounds. Without the gate both simply add up.

    `early` are weights for the beginning of a run; they change in a straight line into `weights`
    over the first `early_until` of its steps. `robust` multiplies what lies above the least
    reward by `robust_factor`.

    `correct_first`: a correct completion has more than any incorrect one, whatever the weights. The
    upper half of the range is for correct ones: half of it plus half of the weighted mean; with a
    closed gate only the format counts there. The lower half is for incorrect ones: half of the
    weighted mean of accuracy, of judges and, if `gated`, of the format; all other parts count for
    nothing. No answer, or text that is no language, has the least reward.
    """

    parts: Mapping[str, Reward]
    weights: Mapping[str, float]
    gated: bool = True
    robust: bool = False
    early: Mapping[str, float] = field(default_factory=dict)
    early_until: float = 0.2
    correct_first: bool = False

    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if ACCURACY not in self.parts:
            raise ConfigError(
                f"reward: one part must be called {ACCURACY!r}: it says whether an answer is "
                f"right; there are {', '.join(self.parts) or 'no parts'}"
            )
        _check_weights("weights", self.weights, self.parts)
        if self.early:
            _check_weights("early", self.early, self.parts)
        if not 0 < self.early_until <= 1:
            raise ConfigError(
                f"reward: early_until = {self.early_until} must lie above 0 and not above 1"
            )
        self._check_company()
        if self.correct_first and not all(map(math.isfinite, self.bounds)):
            raise ConfigError(
                "reward: correct_first needs parts with bounds; a function of your own has none: "
                "make it a class with bounds, or leave correct_first out"
            )

    def _judges(self) -> list[str]:
        return [n for n, p in self.parts.items() if getattr(p, "needs_company", False)]

    def _check_company(self) -> None:
        """A model that judges can be talked round; rules hold at least half of the weight."""
        judges = self._judges()
        for weights in filter(None, (self.weights, self.early)):
            total = sum(weights[name] for name in judges)
            if total > 0.5 or ACCURACY in judges:
                raise ConfigError(
                    f"reward: {', '.join(judges)} may hold at most half of the weight, not "
                    f"{total:g}, and may not be the part {ACCURACY!r}: a judge never decides alone"
                )

    @property
    def quick(self) -> bool:
        """As quick as the slowest part."""
        return all(part.quick for part in self.parts.values())

    @property
    def longest(self) -> float:
        """Seconds: parts judge one after the other."""
        return sum(longest(part) for part in self.parts.values())

    @property
    def bounds(self) -> tuple[float, float]:
        """The weighted means of the parts' bounds, at any time of the run."""
        ends = [self._ends(w) for w in (self.weights, self.early or self.weights)]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _ends(self, weights: Mapping[str, float]) -> tuple[float, float]:
        # 0 times infinity is no number: a part without weight has no bounds here.
        counted = [(w, self.parts[name].bounds) for name, w in weights.items() if w]
        return sum(w * low for w, (low, _) in counted), sum(w * high for w, (_, high) in counted)

    def at(self, share: float) -> Mix:
        """Return the mix, and mixes within it, with the weights for this share of the run."""
        left = max(0.0, 1.0 - share / self.early_until)
        early = self.early or self.weights
        weights = {k: w + (early[k] - w) * left for k, w in self.weights.items()}
        return replace(self, parts=_all_at(self.parts, share), weights=weights, early={})

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge one answer by every part."""
        scores = {name: part(prompt, text) for name, part in self.parts.items()}
        holds = not (self.gated and FORMAT in scores) or scores[FORMAT].success
        logged = {**{name: score.reward for name, score in scores.items()}, **_inner(scores)}
        factor = 1.0
        if self.robust:
            factor = logged["robust"] = robust_factor(text)
        total = self._halves if self.correct_first else self._mean
        low, high = self._ends(self.weights)
        return Score(
            # sums of products stray by a last digit
            reward=min(max(total(scores, holds, factor, text), low), high),
            success=scores[ACCURACY].success and holds,
            parts=logged,
            attempted=scores[ACCURACY].attempted,
        )

    def _mean(self, scores: Mapping[str, Score], holds: bool, factor: float, text: str) -> float:
        """Return the weighted mean of the parts."""
        values = {name: score.reward for name, score in scores.items()}
        if not holds:
            values[ACCURACY] = _least(self.parts[ACCURACY].bounds[0], values[ACCURACY])
        total = sum(self.weights[name] * value for name, value in values.items())
        least = _least(self._ends(self.weights)[0], total)
        return least + (total - least) * factor

    def _halves(self, scores: Mapping[str, Score], holds: bool, factor: float, text: str) -> float:
        """Return a reward in the upper half of the range if the completion is correct."""
        low, high = self._ends(self.weights)
        if scores[ACCURACY].success:
            counted = list(scores) if holds else [FORMAT]
            share = 0.5 + 0.5 * factor * self._share(scores, counted)
        elif not scores[ACCURACY].attempted or _is_noise(text, self.robust and factor == 1.0):
            share = 0.0
        else:
            counted = [ACCURACY, *self._judges(), *((FORMAT,) if self.gated else ())]
            counted = [name for name in counted if name in scores]
            most = sum(self.weights[name] for name in counted)
            share = 0.5 * factor * self._share(scores, counted) / most if most else 0.0
        return low + (high - low) * share

    def _share(self, scores: Mapping[str, Score], counted: Iterable[str]) -> float:
        """Return the weighted mean of these parts, each from 0 for its least to 1 for its most."""
        total = 0.0
        for name in counted:
            low, high = self.parts[name].bounds
            if self.weights[name]:
                total += self.weights[name] * (scores[name].reward - low) / (high - low)
        return total


def _is_noise(text: str, robust: bool) -> bool:
    """Whether thinking or answer is no language; links, which anyone can invent, aside.

    Where the `robust_factor` is 1 the thinking has been looked at.
    """
    answer = after_thinking(text)
    if coherence(without_addresses(answer)) < 0.5:
        return True
    thinking = "" if robust else without_addresses(text.removesuffix(answer))
    return bool(thinking.strip()) and coherence(thinking) < 0.5


def _least(bound: float, given: float) -> float:
    """Return the least reward that there is; a user's function does not say, and counts from 0."""
    return bound if math.isfinite(bound) else min(given, 0.0)


def _all_at(rewards: Mapping[str, Reward], share: float) -> dict[str, Reward]:
    return {k: r.at(share) if hasattr(r, "at") else r for k, r in rewards.items()}


def _inner(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return the parts of the parts, where there are several."""
    return {
        f"{name}/{inner}": value
        for name, score in scores.items()
        if len(score.parts) > 1
        for inner, value in score.parts.items()
    }


def _check_weights(what: str, weights: Mapping[str, float], parts: Mapping[str, Reward]) -> None:
    if set(weights) != set(parts):
        names = ", ".join(sorted(set(weights) ^ set(parts)))
        raise ConfigError(
            f"reward: {what} and parts must have the same names; they differ in {names}"
        )
    total = sum(weights.values())
    if min(weights.values()) < 0 or abs(total - 1) > 1e-6:
        listed = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        raise ConfigError(
            f"reward: {what} must not be negative and must sum to 1, not {total:g} ({listed})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTask:
    """A reward for each task, for prompts of several tasks."""

    tasks: Mapping[str, Reward]

    version: ClassVar[int] = 1

    @property
    def quick(self) -> bool:
        """As quick as the slowest."""
        return all(reward.quick for reward in self.tasks.values())

    @property
    def longest(self) -> float:
        """Seconds: those of the slowest."""
        return max(longest(reward) for reward in self.tasks.values())

    @property
    def bounds(self) -> tuple[float, float]:
        """The widest."""
        ends = [reward.bounds for reward in self.tasks.values()]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def at(self, share: float) -> ByTask:
        """Return the rewards with their weights for this share of the run."""
        return ByTask(tasks=_all_at(self.tasks, share))

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Judge by the reward of the prompt's task."""
        if prompt.task not in self.tasks:
            raise ValueError(f"reward.tasks has none for task {prompt.task!r}")
        return self.tasks[prompt.task](prompt, text)
