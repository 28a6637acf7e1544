"""Other names of metrics: in open-instruct and in earlier versions of Covey."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from covey.run.metrics import METRICS

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "val/ratio": "policy/ratio",
        "val/advantages": "reward/advantages",
        "val/zero_variance_groups": "rollout/zero_variance_groups",
        "val/learned_groups": "rollout/trained_groups",
        "val/rounds": "rollout/rounds",
        "val/dropped_": "rollout/dropped_",
        "val/off_policy_dropped": "policy/off_policy_dropped",
        "val/correction_": "policy/correction_",
        "val/sequence_lengths": "rollout/lengths",
        "val/stop_rate": "rollout/stop_rate",
        "warmup/solutions": "sft/examples",
        "warmup/": "sft/",
    }
)
"""Prefix of a metric name in Covey 0.1 -> current prefix."""
OPEN_INSTRUCT: Mapping[str, str] = MappingProxyType(
    {entry.open_instruct: name for name, entry in METRICS.items() if entry.open_instruct}
)
"""Metric name in open-instruct -> name in Covey, for metrics whose names differ."""


def current_name(name: str) -> str:
    """Return the current name of a metric, given its name in open-instruct or in Covey 0.1.

    >>> current_name("val/ratio_max"), current_name("objective/entropy")
    ('policy/ratio_max', 'policy/entropy_avg')
    """
    if name in OPEN_INSTRUCT:
        return OPEN_INSTRUCT[name]
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def with_open_instruct_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step under Covey's and open-instruct's names.

    >>> with_open_instruct_names({"policy/ratio": 1.0})
    {'policy/ratio': 1.0, 'val/ratio': 1.0}
    """
    return {**row, **{old: row[name] for old, name in OPEN_INSTRUCT.items() if name in row}}
