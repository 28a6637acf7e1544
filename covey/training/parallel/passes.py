"""Which rows of a batch this rank takes, and in how many passes through the model."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from covey.models.micro_batches import micro_batches
from covey.training.parallel.world import World
from covey.types import Batch


class Pass(NamedTuple):
    """One pass through the model."""

    rows: torch.Tensor
    counts: bool
    """False: these rows only stand in, so that all ranks take as many passes; another rank has
    them. With sharded parameters every pass is a meeting of all ranks."""


def without_weight(rows: Batch) -> Batch:
    """Return rows that only stand in: a pass over them adds nothing to the gradient."""
    assert rows.weight is not None, "weights come from the whole step"
    return replace(rows, weight=torch.zeros_like(rows.weight))


def rank_passes(batch: Batch, micro_batch_tokens: int, world: World) -> list[Pass]:
    """Return the micro-batches of this rank: as many on every rank, each about as large.

    All ranks have the same batch, so each finds the same division by itself. The limit on tokens is
    lowered as far as it does not add to the passes of a rank.
    """
    parts = list(micro_batches(batch, micro_batch_tokens))
    if world.size == 1:
        return [Pass(rows, True) for rows in parts]
    wanted = -(-len(parts) // world.size) * world.size
    lengths = batch.prompt_lengths + batch.lengths if batch.host is None else (
        batch.host.prompt_lengths + batch.host.lengths
    )  # fmt: skip
    low, high = 1, min(micro_batch_tokens, len(batch) * int(lengths.max()))
    while low < high:
        middle = (low + high) // 2
        if len(list(micro_batches(batch, middle))) <= wanted:
            high = middle
        else:
            low = middle + 1
    passes = [Pass(rows, True) for rows in micro_batches(batch, high)]
    stand_in = Pass(lengths.argmin()[None], False)
    passes += [stand_in] * (wanted - len(passes))
    return passes[world.rank :: world.size]
