"""Training on the best k completions of each group: GFPO, arXiv 2508.09726."""

from __future__ import annotations

from typing import Literal

import torch

from covey.errors import ConfigError
from covey.objective.advantage import per_token, rollout_rewards, standardized
from covey.types import Batch

Metric = Literal["length", "rate"]


def kept_standardized(
    batch: Batch, *, keep: int = 4, metric: Metric = "length", ddof: int = 1, eps: float = 1e-6
) -> torch.Tensor:
    """Rewards standardized over the `keep` best completions of a group; 0 for other completions."""
    rewards = rollout_rewards(batch)
    kept = kept_rows(rewards, batch.mask.sum(dim=1), batch.group, keep=keep, metric=metric)
    chosen = rewards.where(kept, torch.nan)
    return per_token(standardized(chosen, batch.group, ddof=ddof, eps=eps), batch.mask)


def kept_rows(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group: torch.Tensor,
    *,
    keep: int,
    metric: Metric = "length",
) -> torch.Tensor:
    """Return a mask [B] of the `keep` best completions of each group.

    With `metric = "length"`, the best completions are the shortest. With `metric = "rate"`, the
    best completions have the most reward per token.

    Ties go to the shorter completion, and then to the earlier completion. A completion that could
    not be scored is never among the best completions.
    """
    scored = ~rewards.isnan()
    if metric == "rate" and bool((rewards[scored] < 0).any()):
        raise ConfigError(
            "gfpo: metric = 'rate' needs rewards of at least 0, because with negative rewards "
            "gfpo would keep the longest failed completions"
        )
    best = lengths.double()
    if metric == "rate":
        best = -(rewards.double() / lengths.clamp(min=1))
    kept = torch.zeros_like(scored)
    for number in group.unique():
        rows = (scored & (group == number)).nonzero().squeeze(1)
        by_length = rows[lengths[rows].argsort(stable=True)]
        kept[by_length[best[by_length].argsort(stable=True)][:keep]] = True
    return kept
