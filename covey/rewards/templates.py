"""Mixes that serve a kind of task, with the weights of the chapter on reward design.

A correct completion has more than any incorrect one: see `correct_first` in `Mix`.

`early_format`, if above 0, is the weight of `format` at the beginning of a run; it is taken from
`accuracy` and given back over the first fifth of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from covey.config.options import resolve_options
from covey.config.schema import Named
from covey.rewards.answer import FuzzyText, MathAnswer
from covey.rewards.citations import Citations
from covey.rewards.code import CodeTests
from covey.rewards.efficiency import Efficiency
from covey.rewards.form import ThinkToolForm
from covey.rewards.judge import Judge
from covey.rewards.mix import Mix
from covey.rewards.safety import Safety
from covey.rewards.score import Reward
from covey.rewards.tool_call import ToolCall


def math(
    *,
    accuracy: float = 0.60,
    format: float = 0.15,
    efficiency: float = 0.15,
    safety: float = 0.10,
    gated: bool = True,
    robust: bool = True,
    early_format: float = 0.0,
    tolerance: float = 0.01,
    symbolic: bool = True,
) -> Mix:
    """Sums and formulas: correctness first. At most 3 steps and 400 words are expected.

    A number that is not whole may be off by `tolerance` of its size; a whole one may not.
    """
    right = MathAnswer(tolerance=tolerance, symbolic=symbolic)
    parts = _parts(right, ThinkToolForm(), max_words=400)
    return _mix(parts, (accuracy, format, efficiency, safety), gated, robust, early_format)


def code(
    *,
    accuracy: float = 0.50,
    format: float = 0.10,
    efficiency: float = 0.25,
    safety: float = 0.15,
    gated: bool = True,
    robust: bool = True,
    early_format: float = 0.0,
    unsafe: bool = False,
) -> Mix:
    """Programs: the share of tests passed, in a sandbox; short, and safe. `unsafe`: no sandbox."""
    parts = _parts(CodeTests(unsafe=unsafe), ThinkToolForm())
    return _mix(parts, (accuracy, format, efficiency, safety), gated, robust, early_format)


def agent(
    *,
    accuracy: float = 0.50,
    format: float = 0.20,
    efficiency: float = 0.15,
    safety: float = 0.15,
    gated: bool = True,
    robust: bool = True,
    early_format: float = 0.0,
) -> Mix:
    """Tool calls: the right tool and the right arguments."""
    parts = _parts(ToolCall(), ThinkToolForm())
    return _mix(parts, (accuracy, format, efficiency, safety), gated, robust, early_format)


def retrieval(
    *,
    accuracy: float = 0.40,
    format: float = 0.20,
    efficiency: float = 0.20,
    safety: float = 0.20,
    gated: bool = False,
    robust: bool = True,
    early_format: float = 0.0,
    sources: int = 2,
    judge: Mapping[str, Any] | None = None,
) -> Mix:
    """Questions answered from sources: `format` is the citations, at least `sources` of them.

    Accuracy is the likeness to the expected text. `judge`, a table with `base_url` and `model`,
    hands half of its weight to a language model. Additive: a right answer with one source is
    worth something.
    """
    parts = _parts(FuzzyText(), Citations(minimum=sources))
    mixed = _mix(parts, (accuracy, format, efficiency, safety), gated, robust, early_format)
    if judge is None:
        return mixed
    section = Named.model_validate({"name": "judge", **judge})
    return _with_judge(mixed, Judge(**resolve_options(Judge, section, "reward.judge")))


def _parts(accuracy: Reward, form: Reward, max_words: int = 512) -> dict[str, Reward]:
    efficiency = Efficiency(max_words=max_words)
    return {"accuracy": accuracy, "format": form, "efficiency": efficiency, "safety": Safety()}


def _mix(
    parts: Mapping[str, Reward],
    given: tuple[float, float, float, float],
    gated: bool,
    robust: bool,
    early_format: float,
) -> Mix:
    weights = dict(zip(parts, given, strict=True))
    early: dict[str, float] = {}
    if early_format > 0:
        moved = early_format - weights["format"]
        early = {**weights, "format": early_format, "accuracy": weights["accuracy"] - moved}
    return Mix(
        parts=parts,
        weights=weights,
        gated=gated,
        robust=robust,
        early=early,
        correct_first=True,
    )


def _with_judge(mix: Mix, judge: Judge) -> Mix:
    """Give the judge half of the weight of accuracy, at any time."""

    def shared(weights: Mapping[str, float]) -> dict[str, float]:
        half = weights["accuracy"] / 2
        return {**weights, "accuracy": half, "judge": half}

    return replace(
        mix,
        parts={**mix.parts, "judge": judge},
        weights=shared(mix.weights),
        early=shared(mix.early) if mix.early else {},
    )
