"""Why sampler and trainer differ: each cause in words, with what removes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from covey.analysis.numerics.gap import Gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a line of the report is about."""

    title: str
    what: str
    advice: str


TOTAL = "total"
CAUSES: Mapping[str, Words] = MappingProxyType(
    {
        TOTAL: Words(
            title="sampler against trainer",
            what="the trainer's logp less sampler_logp, before any update: what a run logs as "
            "debug/sampler_logp_diff_* and debug/rho_*",
            advice="look below for where it comes from; objective.correction corrects for all of "
            "it at once",
        ),
        "precision": Words(
            title="precision",
            what="the trainer's pass as it is, against the same weights in float32",
            advice='model.dtype = "float32" removes it, for twice the memory of weights and '
            "activations",
        ),
        "micro_batch": Words(
            title="batch shape, trainer",
            what="answers in their micro-batch, against each alone: matrix products of other "
            "shapes add up in another order",
            advice='rounding and no bias; train.micro_batch_tokens moves it, model.dtype = "float32" '
            "makes it about 1e-6",
        ),
        "slots": Words(
            title="batch shape, sampler",
            what="answers written one at a time, against engine.max_concurrent at a time; up to the token "
            "where rounding makes two of them part",
            advice="rounding and no bias; nothing is lost by many slots",
        ),
        "truncation": Words(
            title="truncation",
            what="the distribution that top-k, top-p and min-p leave, against the whole one",
            advice="rollout.top_p = 1, top_k = 0 and min_p = 0 remove it; no precision does, and "
            "it is a bias: the sampler never shows what was cut",
        ),
        "kernel": Words(
            title="kernel",
            what="the sampler's decoder against the trainer's pass: the same answer alone, the "
            "same precision, truncation taken out",
            advice="in bfloat16 about as large as precision, since each rounds in places of its "
            'own, and model.dtype = "float32" makes it about 1e-6; above 1e-4 in float32 the two '
            "compute different things, which is a bug worth reporting",
        ),
        "staleness": Words(
            title="staleness",
            what="log-probabilities after optimizer steps on these very answers, against before",
            advice="learning itself, and what the clip is for; fewer train.mini_batches and "
            "train.epochs or a lower optimizer.learning_rate make it less",
        ),
    }
)
"""In the order of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A line of the report."""

    name: str
    gap: Gap
    updates: int = 0
    """Of staleness: how many optimizer steps were taken."""

    @property
    def title(self) -> str:
        """What the line is called."""
        words = CAUSES[self.name].title
        if self.name != "staleness":
            return words
        return f"{words}, {self.updates} update{'' if self.updates == 1 else 's'}"

    def row(self) -> dict[str, Any]:
        """Return it as plain data."""
        numbers = {name: getattr(self.gap, name) for name in Gap.__slots__}
        words = CAUSES[self.name]
        return {
            "cause": self.name, "title": self.title, "updates": self.updates, **numbers,
            "verdict": self.gap.verdict, "what": words.what, "advice": words.advice,
        }  # fmt: skip
