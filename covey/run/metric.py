"""The class `Metric`, which describes a logged metric, and the kinds of metric sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

RUN = "run"
ROLLOUTS = "rollouts"
PASSES = "passes"
OPTIMIZER = "optimizer"
SFT = "sft"
MACHINE = "machine"
SOURCES: Mapping[str, str] = MappingProxyType(
    {
        RUN: "the metric is counted from the start of the run.",
        ROLLOUTS: "the metric covers all completions of the step, trained on or not.",
        PASSES: "the metric covers trained tokens in the forward and backward passes of the step.",
        OPTIMIZER: "the metric covers the optimizer steps of the training step.",
        SFT: "the metric covers the solutions of an SFT step.",
        MACHINE: "the metric is a time or an amount of memory.",
    }
)


@dataclass(frozen=True, slots=True)
class Metric:
    """The description of one metric in the metrics registry."""

    definition: str
    unit: str = ""
    """The unit. The unit is empty for plain numbers, such as ratios."""
    source: str = ROLLOUTS
    healthy: tuple[float | None, float | None] | None = None
    """Smallest and largest value in a healthy run; None means no bound."""
    open_instruct: str = ""
    """Name of the metric in open-instruct, if it differs from the name in Covey. Every step logs
    the metric under Covey's name and under open-instruct's name.
    """
    trl: str = ""
    """Name of the same metric in TRL."""
