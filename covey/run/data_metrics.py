"""Metrics of curriculum and replay."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from covey.run.metric import ROLLOUTS, Metric

DATA: Mapping[str, Metric] = MappingProxyType(
    {
        "data/seen_prompts": Metric(
            "Number of training prompts with results before this step. Only with a curriculum.",
            "prompts",
            ROLLOUTS,
        ),
        "data/pass_rate": Metric("Mean running pass rate of these prompts.", "share", ROLLOUTS),
        "data/drawn_pass_rate": Metric(
            "Mean running pass rate, before this step, of its prompts; 0.5 for a new prompt.",
            "share",
            ROLLOUTS,
        ),
        "data/dropped_prompts": Metric(
            "Prompts at or above curriculum.drop_above.", "prompts", ROLLOUTS
        ),
        "data/drawn_again": Metric(
            "Prompts of this step that are at or above curriculum.drop_above, because too few "
            "others are left.",
            "prompts",
            ROLLOUTS,
            healthy=(0.0, 0.0),
        ),
        "data/parts/*": Metric(
            "Share of a part of the mixed task in the draw of this step.", "share", ROLLOUTS
        ),
        "data/replayed_groups": Metric(
            "Groups of earlier steps that this step also trained on.", "groups", ROLLOUTS
        ),
        "data/replay_size": Metric("Groups that could be replayed.", "groups", ROLLOUTS),
        "data/replay_age": Metric(
            "Mean optimizer steps since the replayed groups were sampled.",
            "optimizer steps",
            ROLLOUTS,
        ),
    }
)
