"""How a GPU's micro-batches come out if all prompts, and all answers, are of one length."""

from __future__ import annotations

from functools import lru_cache

import torch

from covey.models.micro_batches import balanced_parts
from covey.types import Batch, HostRows


@lru_cache(maxsize=256)
def largest_part(
    rows: int, samples: int, prompt: int, answer: int, micro_batch_tokens: int
) -> tuple[int, int]:
    """Return how many rows, and of how many prompts, the micro-batch with most tokens holds."""
    parts = balanced_parts(_equal_rows(rows, samples, prompt, answer), micro_batch_tokens)
    sizes = [(len(part), len(set((part // samples).tolist()))) for part in parts]
    return max(sizes, key=lambda size: size[0] * (answer - 1) + size[1] * prompt)


def _equal_rows(rows: int, samples: int, prompt: int, answer: int) -> Batch:
    """Return a batch that says of its tokens how many there are, and no more."""
    group, nothing = torch.arange(rows) // samples, torch.zeros(rows)
    host = HostRows(
        prompt_tokens=group[:, None],
        prompt_lengths=torch.full((rows,), prompt),
        tokens=group[:, None],
        lengths=torch.full((rows,), answer),
        mask=torch.ones(rows, 1, dtype=torch.bool),
    )
    return Batch(
        prompt_tokens=host.prompt_tokens,
        prompt_lengths=host.prompt_lengths,
        tokens=host.tokens,
        lengths=host.lengths,
        mask=host.mask,
        sampler_logp=nothing[:, None],
        rewards=nothing.double(),
        success=nothing.bool(),
        group=group,
        truncated=nothing.bool(),
        host=host,
    )
