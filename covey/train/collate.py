"""From groups to tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from covey.types import Batch, Group


def collate(groups: Sequence[Group], device: torch.device | str = "cpu") -> Batch:
    """Stack the rollouts of all groups, row by row in order."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]

    def padded(rows: Sequence[Sequence[int | float | bool]], dtype: torch.dtype) -> torch.Tensor:
        stacked = pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
        return stacked.to(device)

    def column(values: Sequence[int | float | bool], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        prompt_tokens=padded([r.prompt_tokens for r in rollouts], torch.long),
        prompt_lengths=column([len(r.prompt_tokens) for r in rollouts], torch.long),
        tokens=padded([r.tokens for r in rollouts], torch.long),
        lengths=column([len(r.tokens) for r in rollouts], torch.long),
        mask=padded([r.trained for r in rollouts], torch.bool),
        sampler_logp=padded([r.sampler_logp for r in rollouts], torch.float32),
        rewards=column(
            [math.nan if r.reward is None else r.reward for r in rollouts], torch.float64
        ),
        success=column([bool(r.success) for r in rollouts], torch.bool),
        group=column(
            [number for number, group in enumerate(groups) for _ in group.rollouts], torch.long
        ),
        truncated=column([r.finish == "length" for r in rollouts], torch.bool),
    )
