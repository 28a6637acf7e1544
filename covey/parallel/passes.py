"""Divides the rows of a batch among ranks, and each rank's rows into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from covey.accel.packing import to_device
from covey.models.logp import LogProbs
from covey.models.micro_batches import micro_batches
from covey.parallel.world import ALONE, World
from covey.rng import dropout_seed
from covey.types import Batch

if TYPE_CHECKING:
    from covey.policy.policy import Policy


class Pass(NamedTuple):
    """One pass through the model, with the rows that it processes."""

    rows: torch.Tensor
    counts: bool
    """Whether the results are used; false for a placeholder pass, whose results are discarded. With
    placeholders, all ranks have the same number of passes, as a sharded model requires.
    """


def without_weight(rows: Batch) -> Batch:
    """Set the token weights of all rows to 0, so that they add nothing to the gradient."""
    assert rows.weight is not None, "weights come from the whole step"
    return replace(rows, weight=torch.zeros_like(rows.weight))


def rank_passes(batch: Batch, micro_batch_tokens: int, world: World) -> list[Pass]:
    """Return this rank's micro-batches; every rank gets the same number of micro-batches.

    All ranks have the same batch, so each rank computes the same split without communication. To
    balance the sizes of micro-batches, the token limit per micro-batch is the smallest limit that
    needs no additional passes.
    """
    parts = list(micro_batches(batch, micro_batch_tokens))
    if world.size == 1:
        return [Pass(rows, True) for rows in parts]
    wanted = -(-len(parts) // world.size) * world.size
    lengths = batch.layout.prompt_lengths + batch.layout.lengths
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


def training_passes(
    policy: Policy, batch: Batch, micro_batch_tokens: int, world: World
) -> Iterator[tuple[Pass, Batch]]:
    """Yield this rank's passes of an optimizer step, each with its micro-batch.

    The caller must call `backward` on the loss of a micro-batch before it takes the next
    micro-batch.
    """
    passes = rank_passes(batch, micro_batch_tokens, world)
    for place, one in enumerate(passes, start=1):
        micro = batch.rows(one.rows) if one.counts else without_weight(batch.rows(one.rows))
        if place == len(passes):
            policy.expect_last_pass()
        if policy.dropout is not None:
            address = {"version": policy.version, "place": place, "rank": world.rank}
            torch.manual_seed(dropout_seed(seed=policy.dropout, **address))
        yield one, micro


def whole_batch(
    batch: Batch,
    micro_batch_tokens: int,
    logp: Callable[[Batch], LogProbs],
    world: World = ALONE,
) -> LogProbs:
    """Compute the log-probs and entropies of a whole batch in micro-batches."""
    return LogProbs(*in_passes(batch, micro_batch_tokens, logp, world, count=2))


def in_passes(
    batch: Batch,
    micro_batch_tokens: int,
    compute: Callable[[Batch], Sequence[torch.Tensor]],
    world: World = ALONE,
    count: int = 1,
) -> torch.Tensor:
    """Compute `count` tensors [B, T] in micro-batches, and return them stacked.

    Exactly one rank computes each row, and all other ranks contribute 0. The sum over ranks
    therefore has no rounding error.
    """
    whole = torch.zeros((count, *batch.tokens.shape), device=batch.tokens.device)
    for index, counts in rank_passes(batch, micro_batch_tokens, world):
        part = compute(batch.rows(index))
        if counts:
            put_rows(whole, index, part)
    world.sum_in_place(whole)
    return whole


def put_rows(
    whole: Iterable[torch.Tensor], index: torch.Tensor, parts: Sequence[torch.Tensor]
) -> None:
    """Write the tensors [b, t] of `parts` to rows `index` of the tensors [B, T] of `whole`."""
    (rows,) = to_device([index], parts[0].device)
    for target, values in zip(whole, parts, strict=True):
        target[rows, : values.shape[1]] = values.float()
