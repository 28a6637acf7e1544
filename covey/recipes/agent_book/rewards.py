"""Ready-made reward mixes for math, code, tool use and retrieval.

A correct completion scores higher than any incorrect completion; see `correct_first` in `Mix`.

The option `without_target` sets the score of `accuracy` for a prompt without a target, as in
`TargetReward`. The option `early_format`, if above 0, is the weight of `format` at the start of a
run. The increase of the weight of `format` is subtracted from the weight of `accuracy`. During the
first fifth of a run, the weights of `format` and `accuracy` change to their normal values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.config.resolve_options import resolve_options
from covey.config.schema import Named
from covey.recipes.agent_book.citations import Citations
from covey.recipes.agent_book.safety import Safety
from covey.rewards.code import CodeTests
from covey.rewards.coherence import Efficiency
from covey.rewards.format import ThinkToolForm
from covey.rewards.judge import Judge
from covey.rewards.math_answer import MathAnswer
from covey.rewards.mix import Mix
from covey.rewards.score import Reward, WithoutTarget
from covey.rewards.text_match import FuzzyText
from covey.rewards.tool_call import ToolCall

WEIGHTED = ("accuracy", "format", "efficiency", "safety")


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
    without_target: WithoutTarget = "error",
) -> Mix:
    """Reward mix for math answers. More than 3 tool calls or 400 words are penalized.

    `tolerance` is relative, and applies only to targets that are not whole numbers.
    """
    answer = MathAnswer(tolerance=tolerance, symbolic=symbolic, without_target=without_target)
    parts = _parts(answer, ThinkToolForm(), max_words=400)
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
    expected_edits: int = 3,
    max_rounds: int = 5,
    without_target: WithoutTarget = "error",
) -> Mix:
    """Reward mix for programs. Accuracy is the fraction of tests that the program passes.

    With `unsafe`, programs run without the sandbox. In an environment, the reward part `efficiency`
    penalizes more than `expected_edits` edits or `max_rounds` turns.
    """
    tests = CodeTests(unsafe=unsafe, without_target=without_target)
    parts = _parts(tests, ThinkToolForm())
    parts["efficiency"] = Efficiency(expected_edits=expected_edits, max_rounds=max_rounds)
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
    without_target: WithoutTarget = "error",
) -> Mix:
    """Reward mix for tool calls. Accuracy depends on the called tool and its arguments."""
    parts = _parts(ToolCall(without_target=without_target), ThinkToolForm())
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
    without_target: WithoutTarget = "error",
) -> Mix:
    """Reward mix for answers that cite sources.

    Accuracy is the similarity of the answer to the target, and `format` requires at least `sources`
    citations. `judge` (a table with `base_url` and `model`) adds an LLM judge, whose weight is half
    the weight of `accuracy`. By default, `gated` is false, so a correct answer with too few sources
    still earns a reward.
    """
    accurate = FuzzyText(without_target=without_target)
    parts = _parts(accurate, Citations(minimum=sources))
    if judge is not None:
        section = Named.model_validate({"name": "judge", **judge})
        parts["judge"] = Judge(**resolve_options(Judge, section, "reward.judge"))
    return _mix(parts, (accuracy, format, efficiency, safety), gated, robust, early_format)


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
    weights = dict(zip(WEIGHTED, given, strict=True))
    early: dict[str, float] = {}
    if early_format > 0:
        moved = early_format - weights["format"]
        early = {**weights, "format": early_format, "accuracy": weights["accuracy"] - moved}
    if "judge" in parts:  # the judge gets half of the weight of accuracy
        for each in filter(None, (weights, early)):
            each["accuracy"] = each["judge"] = each["accuracy"] / 2
    return Mix(
        parts=parts, weights=weights, gated=gated, robust=robust, early=early, correct_first=True
    )
