"""The health checks: how to detect each training problem, and which settings to change.

The functions that detect the problems are in health_symptoms.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covey.run import health_symptoms as symptoms
from covey.run.history import BLOCK, History

Settings = Mapping[str, Any]
"""The configuration of a run as nested dictionaries: each section maps settings to values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A health check."""

    find: Callable[[History], str | None]
    steps: int
    """Number of steps whose metrics the check uses. A finding reports the first of the checked
    steps as the start of the problem."""
    why: str
    change: tuple[tuple[str, Any], ...]
    """Settings to change. Each setting has a new value, or a factor (`Times`) that multiplies its
    current value."""
    also: str = ""
    """Advice that is not a change of settings, such as to use easier prompts."""
    problem: bool = True
    """True if the check detects a problem; False if it only gives information."""


@dataclass(frozen=True, slots=True)
class Times:
    """A factor by which to multiply a setting."""

    factor: float
    instead_of_zero: float = 0.0
    """The suggested value if the setting is now 0, because a factor cannot change 0."""


_SLOWER = ("optimizer.learning_rate", Times(0.5))
_MORE_KL = ("objective.beta", Times(2.0, instead_of_zero=0.01))
_WARMER = ("rollout.temperature", Times(1.25))
_DYNAMIC = ("filter.dynamic_sampling", True)

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "nan": Check(
            find=symptoms.not_finite,
            steps=1,
            why="the step is lost, and weights that are not finite never recover",
            change=(_SLOWER, ("model.dtype", "float32")),
        ),
        "cut_off": Check(
            find=symptoms.cut_off,
            steps=BLOCK,
            why="a completion without its end rarely contains an answer",
            change=(("rollout.max_tokens", Times(2)),),
            also="ask for shorter completions in the prompt",
        ),
        "collapse": Check(
            find=symptoms.collapse,
            steps=2,
            why="one answer for all prompts is only as accurate as the most frequent target",
            change=(_WARMER, _SLOWER),
            also="balance the targets of the data, so that no constant answer gets much reward",
        ),
        "few_answers": Check(
            find=symptoms.few_answers,
            steps=5,
            why="the policy may have found a shortcut to the frequent targets",
            change=(_WARMER,),
            also="balance the targets of the data, and read completions that are correct",
        ),
        "kl_high": Check(
            find=symptoms.kl_high,
            steps=3,
            why="a policy this far from its reference may lose other abilities",
            change=(_MORE_KL, _SLOWER),
        ),
        "clip_fraction": Check(
            find=symptoms.clip_fraction,
            steps=3,
            why="the optimizer steps after the first have hardly any gradient left",
            change=(_SLOWER, ("train.mini_batches", 1), ("train.epochs", 1)),
        ),
        "large_updates": Check(
            find=symptoms.large_updates,
            steps=3,
            why="a policy that changes this much in a step soon loses its abilities",
            change=(_SLOWER, ("optimizer.warmup_steps", 10)),
        ),
        "ratio_drift": Check(
            find=symptoms.ratio_drift,
            steps=5,
            why="old and new policy differ so much that the surrogate loss is no longer valid",
            change=(_SLOWER, ("optimizer.warmup_steps", 10)),
        ),
        "reward_falls": Check(
            find=symptoms.reward_falls,
            steps=BLOCK,
            why="the policy gets worse at what it is rewarded for",
            change=(_SLOWER, _MORE_KL),
            also="resume from an earlier checkpoint",
        ),
        "entropy_collapse": Check(
            find=symptoms.entropy_collapse,
            steps=3,
            why="completions of a group become equal, and equal completions have no gradient",
            change=(_WARMER, ("objective.clip_high", Times(1.4)), _SLOWER),
        ),
        "parts_against": Check(
            find=symptoms.parts_against,
            steps=BLOCK,
            why="the policy may have learned to please the reward instead of the task",
            change=(),
            also="read the completions with the highest rewards (samples/), and test the reward "
            "with `covey rewards lab`",
        ),
        "length_explosion": Check(
            find=symptoms.length_explosion,
            steps=7,
            why="long completions cost time, and truncated completions are scored as failures",
            change=(("length_penalty.name", "soft"), ("filter.mask_truncated", True)),
        ),
        "repetition": Check(
            find=symptoms.repetition,
            steps=3,
            why="repeated text gets reward without solving the task, or reaches the token limit",
            change=(_SLOWER, _MORE_KL),
        ),
        "no_signal": Check(
            find=symptoms.no_signal,
            steps=10,
            why="a group whose rewards are equal has no advantage, and so no gradient",
            change=(_DYNAMIC, _WARMER),
            also="easier prompts if nearly all completions fail, or a reward for partial success",
        ),
        "format_only": Check(
            find=symptoms.format_only,
            steps=10,
            why="the policy gets the reward for the format, but none for correct answers",
            change=(("rollout.group_size", Times(2)),),
            also="easier prompts, or a smaller weight of the format",
        ),
        "reward_flat": Check(
            find=symptoms.reward_flat,
            steps=10,
            why="nothing is learned",
            change=(("optimizer.learning_rate", Times(2.0)), ("rollout.group_size", Times(2))),
            also="check the reward with `covey rewards lab`",
        ),
        "mismatch": Check(
            find=symptoms.mismatch,
            steps=3,
            why="the policy that samples differs from the policy that is trained",
            change=(("objective.correction", "token_truncate"), ("model.dtype", "float32")),
        ),
        "stalled": Check(
            find=symptoms.stalled,
            steps=1,
            why="the step waited for a worker, an engine or the disk",
            change=(("scoring.timeout", Times(0.5)),),
        ),
        "learned": Check(
            find=symptoms.learned,
            steps=10,
            why="nearly all completions are correct: stop, or use harder prompts",
            change=(),
            problem=False,
        ),
    }
)
"""Maps the name of each health check to the check. Reports list findings in the order of this
mapping: causes before consequences."""
