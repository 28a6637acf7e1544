"""Causes of differences between the log-probs of engine and trainer, and their remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covey.analysis.numerics.gap import Gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The title of a cause, its description, and advice."""

    title: str
    what: str
    advice: str


TOTAL = "total"
CAUSES: Mapping[str, Words] = MappingProxyType(
    {
        TOTAL: Words(
            title="engine against trainer",
            what="the trainer's logp minus sampler_logp, before any update: a run logs it as "
            "debug/sampler_logp_diff_* and debug/rho_*",
            advice="see the causes below; objective.correction corrects for all of them at once",
        ),
        "precision": Words(
            title="precision",
            what="the trainer's forward pass, against the same weights in float32",
            advice='model.dtype = "float32" removes it, at twice the memory of weights and '
            "activations",
        ),
        "micro_batch": Words(
            title="batch shape, trainer",
            what="completions in their micro-batch, against each alone: matrix products of other "
            "shapes sum in another order",
            advice="rounding without bias; train.micro_batch_tokens changes it, "
            'model.dtype = "float32" makes it about 1e-6',
        ),
        "slots": Words(
            title="batch shape, engine",
            what="completions generated one at a time, against engine.max_concurrent at a time; up "
            "to the token where rounding makes them diverge",
            advice="rounding without bias; many slots do no harm",
        ),
        "float8": Words(
            title="float8",
            what="the engine in the model's precision, against the engine with float8 numbers; up "
            "to the token where rounding makes them diverge",
            advice='objective.correction corrects for it; engine.dtype = "model" removes it',
        ),
        "truncation": Words(
            title="truncation",
            what="the distribution truncated by top-k, top-p and min-p, against the whole one",
            advice="rollout.top_p = 1, top_k = 0 and min_p = 0 remove it; higher precision does "
            "not. It is a bias: the engine never generates what was cut off",
        ),
        "kernel": Words(
            title="kernel",
            what="the engine's decoder against the trainer's forward pass: one completion, the "
            "same precision, no truncation",
            advice="in bfloat16 about as large as precision, because each rounds at other places; "
            'model.dtype = "float32" makes it about 1e-6. Above 1e-4 in float32 the two compute '
            "different things: please report this as a bug",
        ),
        "staleness": Words(
            title="staleness",
            what="log-probs after optimizer steps on these completions, against before",
            advice="the effect of training, which the clip limits; fewer train.mini_batches and "
            "train.epochs or a lower optimizer.learning_rate reduce it",
        ),
    }
)
"""The causes, in the order of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A line of the report: a cause of differences, and the size of the differences."""

    name: str
    gap: Gap
    updates: int = 0
    """The number of optimizer steps taken, if the cause is staleness."""

    @property
    def title(self) -> str:
        """The title of the cause in the report."""
        words = CAUSES[self.name].title
        if self.name != "staleness":
            return words
        return f"{words}, {self.updates} update{'' if self.updates == 1 else 's'}"

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        numbers = {name: getattr(self.gap, name) for name in Gap.__slots__}
        words = CAUSES[self.name]
        return {
            "cause": self.name, "title": self.title, "updates": self.updates, **numbers,
            "severity": self.gap.severity, "what": words.what, "advice": words.advice,
        }  # fmt: skip
