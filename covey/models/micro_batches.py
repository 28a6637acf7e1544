"""Micro-batches: rows of a batch that go through the model together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from covey.accel.packing import host_rows, prompt_numbers
from covey.types import Batch


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
        parts = _spread(pieces, count)
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


def _spread(pieces: list[tuple[int, list[int]]], count: int) -> list[tuple[int, list[int]]]:
    """Assign each set of rows, largest first, to the micro-batch that is smallest so far."""
    parts: list[tuple[int, list[int]]] = [(0, []) for _ in range(count)]
    for size, rows in pieces:
        least = min(range(count), key=lambda i: parts[i][0])
        parts[least] = (parts[least][0] + size, [*parts[least][1], *rows])
    return parts
