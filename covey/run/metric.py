"""Entries of the registry of metrics: what the registry says about a metric."""

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
        RUN: "counted over the run",
        ROLLOUTS: "all completions of the step, trained on or not",
        PASSES: "trained tokens in the forward and backward passes of the step",
        OPTIMIZER: "the optimizer steps of the step",
        SFT: "the solutions of a step of supervised training",
        MACHINE: "clock and memory",
    }
)
"""What metrics are computed from."""


@dataclass(frozen=True, slots=True)
class Metric:
    """An entry of the registry."""

    definition: str
    unit: str = ""
    """Empty for plain numbers, such as ratios."""
    source: str = ROLLOUTS
    healthy: tuple[float | None, float | None] | None = None
    """Smallest and largest value in a healthy run; None: no bound."""
    open_instruct: str = ""
    """open-instruct's name, where it is another. Steps log the number under both names."""
    trl: str = ""
    """TRL's name of the same number."""
