"""From groups to tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch

from covey.types import Batch, Group


def collate(groups: Sequence[Group], device: torch.device | str = "cpu") -> Batch:
    """Stack the rollouts of all groups, row by row in order."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]

    def padded(rows: Sequence[Sequence[int | float | bool]], dtype: torch.dtype) -> torch.Tensor:
        lengths = torch.tensor([len(row) for row in rows])
        place = torch.arange(int(lengths.max())) < lengths[:, None]
        # One tensor of all values: making one for every row takes longer than all the rest.
        values = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
        return torch.zeros(place.shape, dtype=dtype).masked_scatter_(place, values)

    def column(values: Sequence[int | float | bool], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    batch = Batch(
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
    return batch if torch.device(device).type == "cpu" else batch.to(device)
