"""Metrics of the rollouts of a step, and of its filters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from covey.objective.advantage import zero_variance
from covey.rollout.collect import Collected
from covey.rollout.source import StepRollouts
from covey.types import Group, Rollout


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """Return the metrics of all rollouts of a step, trained on or not."""
    rollouts = collected.rollouts
    scored = [r for r in rollouts if r.reward is not None]
    rewards = np.array([r.reward for r in scored], dtype=float)
    metrics = {
        "objective/scores": float(rewards.mean()),
        "objective/reward_std": float(rewards.std()),
        "objective/success": _mean([float(bool(r.success)) for r in scored]),
        "objective/unscored": len(rollouts) - len(scored),
        "rollout/zero_variance_groups": _zero_variance_share(collected.groups),
        "rollout/stop_rate": _mean([float(r.finish == "stop") for r in rollouts]),
    }
    for name in sorted({name for r in scored for name in r.parts}):
        metrics[f"objective/parts/{name}"] = _mean(
            [r.parts[name] for r in scored if name in r.parts]
        )
    return metrics | _length_metrics(rollouts) | _episode_metrics(rollouts)


def selection_metrics(rollouts: StepRollouts) -> dict[str, float]:
    """Return how many groups the filters dropped, by reason, and the rounds of sampling."""
    selected = rollouts.selected
    return {
        "rollout/dropped_unscored": selected.unscored,
        "rollout/dropped_stale": selected.stale,
        "rollout/dropped_uniform": selected.uniform,
        "rollout/dropped_surplus": selected.surplus,
        "rollout/trained_groups": len(selected.groups),
        "rollout/rounds": rollouts.rounds,
    }


def _length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [r.sampled for r in rollouts]
    metrics = {
        "rollout/lengths": _mean(lengths),
        "rollout/lengths_min": min(lengths),
        "rollout/lengths_max": max(lengths),
    }
    for name, success in (("solved", True), ("unsolved", False)):
        some = [r.sampled for r in rollouts if r.success is success]
        if some:
            metrics[f"rollout/lengths_{name}"] = _mean(some)
    return metrics


def _episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of turns and tool calls; none without an environment."""
    episodes = [r.episode for r in rollouts if r.episode is not None]
    if not episodes:
        return {}
    calls = [call for episode in episodes for call in episode.tool_calls]
    limits = ("turn_limit", "tool_limit", "token_limit")
    return {
        "rollout/turns": _mean([len(episode.turn_rewards) for episode in episodes]),
        "rollout/tool_calls": len(calls) / len(episodes),
        "rollout/unreadable_calls": sum("error" in call for call in calls),
        "rollout/segments": _mean([len(r.segments) for r in rollouts]),
        "rollout/limit_rate": _mean([float(e.finish in limits) for e in episodes]),
        "rollout/environment_errors": sum(e.finish == "error" for e in episodes),
    }


def _zero_variance_share(groups: Sequence[Group]) -> float:
    rows = [(n, math.nan if r.reward is None else r.reward) for n, g in enumerate(groups)
            for r in g.rollouts]  # fmt: skip
    index, rewards = zip(*rows, strict=True)
    group = torch.tensor(index)
    flat = zero_variance(torch.tensor(rewards, dtype=torch.float64), group)
    return len(set(group[flat].tolist())) / len(groups)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
