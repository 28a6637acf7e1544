"""Metrics of a step: reward minus the KL penalty, GPU memory and GPU utilisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from covey.training.policy import Policy
from covey.types import Group

PEAK_FLOPS: Mapping[str, float] = MappingProxyType(
    {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
)
"""Dense bfloat16 FLOP/s from data sheets. The keys of this dictionary are substrings of GPU names.
"""


def reference_rewards(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the KL penalty in units of the reward, and the reward minus this penalty."""
    if "objective/kl" not in metrics:
        return {}
    cost = metrics["objective/beta"] * metrics["objective/kl"]
    return {
        "objective/non_score_reward": cost,
        "objective/rlhf_reward": metrics["objective/scores"] - cost,
    }


def usage_metrics(
    policy: Policy, groups: Sequence[Group], epochs: int, seconds: float
) -> dict[str, float]:
    """Return the peak GPU memory and the GPU utilisation of training; {} without a GPU."""
    device = policy.model.device
    if device.type != "cuda":
        return {}
    metrics = {"memory/peak": torch.cuda.max_memory_allocated(device) / 2**30}
    weights = sum(p.numel() for p in policy.model.model.parameters())
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = epochs * sum(len(r.prompt_tokens) + len(r.tokens) for r in rollouts)
    share = utilisation(torch.cuda.get_device_name(device), weights, tokens, seconds)
    return metrics if share is None else {**metrics, "time/mfu": share}


def utilisation(device: str, weights: int, tokens: int, seconds: float) -> float | None:
    """Return the model FLOPs utilisation of training; None if the GPU's peak speed is unknown.

    >>> round(utilisation("NVIDIA H200", weights=10**9, tokens=164_834, seconds=2.0), 4)
    0.5
    """
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    return None if peak is None else 6 * weights * tokens / (seconds * peak)
