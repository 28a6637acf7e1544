"""Divides the rows of a batch among ranks, and each rank's rows into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from covey.accel.packing import host_rows, prompt_numbers, to_device
from covey.models.logp import LogProbs
from covey.parallel.world import ALONE, World
from covey.rng import dropout_seed
from covey.types import Batch

if TYPE_CHECKING:
    from covey.policy.policy import Policy


# Micro-batches: rows of a batch that go through the model together.


def micro_batches(batch: Batch, micro_batch_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the row indices of each micro-batch of at most `micro_batch_tokens` tokens.

    On a GPU, `micro_batch_tokens` counts packed tokens without padding if every rollout has one
    row. On a CPU, or if a rollout has several rows, `micro_batch_tokens` counts padded tokens. The
    rows of a rollout stay together, because the loss may depend on all its tokens.
    """
    if not batch.one_row_each:
        return whole_rollouts(batch, micro_batch_tokens)
    if batch.tokens.device.type == "cpu":
        return padded_parts(batch, micro_batch_tokens)
    return iter(balanced_parts(batch, micro_batch_tokens))


def padded_parts(batch: Batch, micro_batch_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the row indices of each micro-batch of at most `micro_batch_tokens` padded tokens.

    Rows of similar length are put into the same micro-batch. A row with more than
    `micro_batch_tokens` tokens is a micro-batch of its own.
    """
    lengths = batch.prompt_lengths + batch.lengths
    order = lengths.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        size = max(1, micro_batch_tokens // int(lengths[order[start]]))
        yield order[start : start + size]
        start += size


def whole_rollouts(batch: Batch, micro_batch_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the row indices of each micro-batch; a micro-batch never splits a rollout.

    A micro-batch has at most `micro_batch_tokens` padded tokens, or is a single rollout.
    """
    host = host_rows(batch)
    assert host.rollout is not None
    lengths = (host.prompt_lengths + host.lengths).tolist()
    rows_of: dict[int, list[int]] = {}
    for row, rollout in enumerate(host.rollout.tolist()):
        rows_of.setdefault(rollout, []).append(row)
    rollouts = [(max(lengths[row] for row in rows), rows) for rows in rows_of.values()]
    part: list[int] = []
    longest = 0
    for length, rows in sorted(rollouts, key=lambda rollout: -rollout[0]):
        longest = longest or length
        if part and (len(part) + len(rows)) * longest > micro_batch_tokens:
            yield torch.tensor(sorted(part))
            part, longest = [], length
        part += rows
    yield torch.tensor(sorted(part))


def balanced_parts(batch: Batch, micro_batch_tokens: int) -> list[torch.Tensor]:
    """Return the row indices of each micro-batch; all micro-batches have similar sizes.

    A micro-batch has at most `micro_batch_tokens` packed tokens. Rows that share a prompt stay
    together if possible, so that the prompt goes through the model only once. A row with more than
    `micro_batch_tokens` tokens is a micro-batch of its own.
    """
    host = host_rows(batch)
    number, prompt = prompt_numbers(host), host.prompt_lengths.tolist()
    lengths = (host.lengths - 1).clamp(min=0).tolist()
    sharing: dict[int, list[int]] = {}
    for row, which in enumerate(number.tolist()):
        sharing.setdefault(which, []).append(row)
    if sum(lengths) + sum(prompt[rows[0]] for rows in sharing.values()) <= micro_batch_tokens:
        return [torch.arange(len(lengths))]
    pieces: list[tuple[int, list[int]]] = []
    for rows in sharing.values():
        pieces += _pieces(rows, prompt[rows[0]], lengths, micro_batch_tokens)
    pieces.sort(key=lambda piece: -piece[0])
    count = max(1, -(-sum(size for size, _ in pieces) // micro_batch_tokens))
    while True:
        # Each piece, largest first, goes to the micro-batch that is smallest so far.
        parts: list[tuple[int, list[int]]] = [(0, []) for _ in range(count)]
        for size, rows in pieces:
            least = min(range(count), key=lambda i: parts[i][0])
            parts[least] = (parts[least][0] + size, [*parts[least][1], *rows])
        # If every piece is already a micro-batch, a micro-batch that is too large cannot be split
        # further.
        if count >= len(pieces) or max(size for size, _ in parts) <= micro_batch_tokens:
            return [torch.tensor(sorted(rows)) for _, rows in parts if rows]
        count += 1


def _pieces(
    rows: list[int], prompt: int, lengths: list[int], micro_batch_tokens: int
) -> list[tuple[int, list[int]]]:
    """Split the rows that share a prompt into sets of at most `micro_batch_tokens` tokens.

    For each set, return the number of tokens and the row indices.
    """
    pieces: list[tuple[int, list[int]]] = []
    for row in rows:
        if not pieces or pieces[-1][0] + lengths[row] > micro_batch_tokens:
            pieces.append((prompt, []))
        size, members = pieces[-1]
        pieces[-1] = (size + lengths[row], [*members, row])
    return pieces


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
