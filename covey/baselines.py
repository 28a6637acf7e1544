"""Baselines of a task: scores of a constant answer, an empty completion and a copied prompt.

A policy that learns only the best constant answer reaches the accuracy of this answer. The reward
of a policy also rises if the policy only learns to give one constant answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from covey.config import Config
from covey.config.resolve import evaluation_config, reward_of
from covey.environments.registry import NONE
from covey.rewards.format import FORMATS, THINKING, Format
from covey.rewards.judge import Judge
from covey.rewards.score import Reward
from covey.rewards.user import UserFunction, WeightedFunctions
from covey.scoring import Job, Scorer, scorer_of
from covey.types import Prompt

FLAGGED = 0.2
"""Success rate above which Covey warns that a policy could learn the baseline as a shortcut."""
FEWEST = 16
"""Minimum number of scored prompts for a warning about a baseline. On fewer prompts, a baseline may
succeed by chance."""
LONGEST_TARGET = 64
"""Maximum length, in characters, of a target that is treated as a short answer."""
CANDIDATES = 3
"""Number of constant answers to score, taken from the most frequent targets."""
FORMAT_PROMPTS = 4
"""Number of prompts used to find the answer format that scores best."""
MOST_PROBED, FEW_PROBED = 512, 16
"""Baselines are scored on at most MOST_PROBED held-out prompts if the reward is quick to compute,
and otherwise on at most FEW_PROBED prompts."""
REMEDY = (
    "balance the targets of the data, leave out prompts with the most frequent one, or choose "
    "other sizes of the task; judge a policy by its gain above this baseline"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The mean score of one baseline, such as the empty completion, over all prompts."""

    success: float
    reward: float | None = None
    """Mean reward, or None if the success rate was computed from the targets without scoring."""
    answer: str = ""
    """The answer of the constant-answer baseline, or an empty string for other baselines."""
    prompts: int
    """Number of prompts on which the baseline was scored."""

    def text(self) -> str:
        """Return the success rate and the mean reward of the baseline as text."""
        mean = "" if self.reward is None else f" (mean reward {self.reward:.3g})"
        return f"{self.success:.1%} correct{mean}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The scores of simple baselines, which a policy can reach without learning the task.

    A baseline is None if it could not be scored.
    """

    constant: Baseline | None = None
    """The baseline that always gives the same answer. Of the most frequent targets, the answer is
    the one with the highest score."""
    empty: Baseline | None = None
    copy: Baseline | None = None
    """The baseline that copies the prompt's text as its completion."""

    def row(self) -> dict[str, Any]:
        """Return the baselines as nested dictionaries, for JSON."""
        return asdict(self, dict_factory=lambda pairs: {k: v for k, v in pairs if v is not None})

    def named(self) -> dict[str, Baseline]:
        """Return {description: baseline} for every baseline that is not None."""
        answer = self.constant.answer if self.constant else ""
        named = {
            f"always answering {answer!r}": self.constant,
            "an empty completion": self.empty,
            "a copy of the prompt": self.copy,
        }
        return {name: found for name, found in named.items() if found is not None}

    def text(self) -> str:
        """Return the results of all baselines as one line of text."""
        return ", ".join(f"{name} {found.text()}" for name, found in self.named().items())

    def flagged(self) -> list[str]:
        """Return a warning text for each baseline whose success rate is too high."""
        return [
            f"{name} is correct on {found.success:.1%} of the prompts"
            for name, found in self.named().items()
            if found.success > FLAGGED and found.prompts >= FEWEST
        ]


def may_probe(reward: Reward) -> bool:
    """Return whether Covey may score baselines, because the reward uses no user code and no judge.

    A call of user code or of a judge may cost money or have side effects.
    """
    return all(
        type(part).__module__.startswith("covey.")
        and not isinstance(part, Judge | UserFunction | WeightedFunctions)
        for part in _all(reward)
    )


def _all(reward: Any) -> Iterator[Any]:
    """Yield a reward and all rewards that it contains."""
    yield reward
    for inside in ("parts", "tasks"):
        parts = getattr(reward, inside, None)
        if isinstance(parts, dict):
            for part in parts.values():
                yield from _all(part)


def baselines(prompts: Sequence[Prompt], scorer: Scorer, most: int | None = None) -> Baselines:
    """Score the baselines of a task. `most` limits the number of scored prompts."""
    some = prompts if most is None else prompts[:: math.ceil(len(prompts) / most)]
    return Baselines(
        constant=_best_constant(prompts, scorer) if most is None else constant_by_targets(prompts),
        empty=_scored(scorer, some, [""] * len(some)),
        copy=_scored(scorer, some, [prompt.text for prompt in some]),
    )


def constant_by_targets(prompts: Sequence[Prompt]) -> Baseline | None:
    """Return, without scoring, the baseline that always answers with the most frequent target.

    The success rate of this baseline is the frequency of the most frequent target. Return None if
    the targets are not short answers.
    """
    frequent = _frequent(prompts)
    if not frequent:
        return None
    answer, count = frequent[0]
    return Baseline(success=count / len(prompts), answer=answer, prompts=len(prompts))


def _frequent(prompts: Sequence[Prompt]) -> list[tuple[str, int]]:
    counts = Counter(prompt.target.strip() for prompt in prompts)
    short = all(0 < len(target) <= LONGEST_TARGET for target in counts)
    return counts.most_common(CANDIDATES) if short else []


def _best_constant(prompts: Sequence[Prompt], scorer: Scorer) -> Baseline | None:
    frequent = _frequent(prompts)
    if not frequent:
        return None
    form = _format(prompts[:FORMAT_PROMPTS], scorer)
    tried = [
        _scored(scorer, prompts, [form.render(THINKING, answer)] * len(prompts), answer)
        for answer, _ in frequent
    ]
    scored = [each for each in tried if each is not None]
    return max(scored, key=lambda each: (each.success, each.reward or 0.0), default=None)


def _format(prompts: Sequence[Prompt], scorer: Scorer) -> Format:
    """Return the answer format in which correct answers get the highest score."""

    def score(form: Format) -> tuple[float, float]:
        texts = [form.render(THINKING, str(p.info.get("solution", p.target))) for p in prompts]
        found = _scored(scorer, prompts, texts)
        return (-1.0, 0.0) if found is None else (found.success, found.reward or 0.0)

    return max(FORMATS.values(), key=score)


def _scored(
    scorer: Scorer, prompts: Sequence[Prompt], texts: Sequence[str], answer: str = ""
) -> Baseline | None:
    """Score one text for each prompt, and return the mean scores, or None if nothing is scored."""
    pending = [
        scorer.submit(Job(prompt=prompt, texts=(text,), progress=1.0))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    scores = [result.score for each in pending for result in each.result()]
    known = [score for score in scores if score is not None]
    if not known:
        return None
    # An unscored completion counts as incorrect, as in evaluations.
    return Baseline(
        success=sum(score.success for score in known) / len(scores),
        reward=sum(score.reward for score in known) / len(known),
        answer=answer,
        prompts=len(scores),
    )


class Scorers(TypedDict):
    """The scorers of a run and the scores of simple baselines, as fields of `Run`."""

    scorer: Scorer
    eval_scorer: Scorer
    baselines: Baselines


def scorers_of(
    config: Config, held_out: Sequence[Prompt], ranks: int, reward: Reward | None = None
) -> Scorers:
    """Build one scorer for training and one for evaluations; `evaluate.reward` makes them
    different."""
    scorer, apart = scorer_of(config, reward, ranks), evaluation_config(config)
    eval_scorer = scorer if apart is config else scorer_of(apart, ranks=ranks)
    known = baselines_of(config, eval_scorer, held_out, reward)
    return {"scorer": scorer, "eval_scorer": eval_scorer, "baselines": known}


def baselines_of(
    config: Config, scorer: Scorer, held_out: Sequence[Prompt], passed: Reward | None = None
) -> Baselines:
    """Return the scores of simple baselines on the held-out prompts.

    If the run has an environment, or if the reward calls an LLM or user code, the only baseline is
    a constant answer, the most frequent target. The success rate of a constant answer follows from
    the targets, without scoring. `scorer` scores the completions of evaluations, and `passed` is
    the reward object that was passed from Python, if any.
    """
    if not held_out:
        return Baselines()
    own = passed if not config.evaluate.reward.name else None
    reward = reward_of(evaluation_config(config)) if own is None else own
    if config.environment.name != NONE or not may_probe(reward):
        return Baselines(constant=constant_by_targets(held_out))
    stride = math.ceil(len(held_out) / MOST_PROBED)
    return baselines(held_out[::stride], scorer, None if reward.quick else FEW_PROBED)
