"""Kernels that sample each sequence's next token from logits and update the decoding state.

The first kernel reads all logits once, and computes the maximum and the sum of exponentials of each
vocabulary block. The second kernel finds the block that contains the sampled token, and reads only
this block again.

A slot is the place of one sequence in the batch. The dimensions in tensor shapes are W (slots in
use), S (all slots), V (vocabulary size) and R (maximum length of a completion).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from covey.accel.sizes import VOCABULARY_BLOCK


class SlotState(NamedTuple):
    """State of the sequences being decoded, which the kernels update in place."""

    tokens: torch.Tensor
    """[S, R] int64."""
    logps: torch.Tensor
    """[S, R] float32."""
    uniforms: torch.Tensor
    """[S, R] float32."""
    last: torch.Tensor
    """[S] int64: the newest token of each sequence."""
    counts: torch.Tensor
    """[S] int64: the number of tokens generated so far for each sequence."""
    place: torch.Tensor
    """[S] int64: the cache position of the newest token."""
    active: torch.Tensor
    """[S] bool: whether the completion is unfinished."""


@triton.jit
def _block_sums(logits, largest, total, factor, vocabulary, block: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * block + tl.arange(0, block)
    inside = column < vocabulary
    line = logits + row * vocabulary
    values = tl.load(line + column, mask=inside, other=float("-inf")).to(tl.float32) * factor
    top = tl.max(values)
    at = row * tl.num_programs(1) + part
    tl.store(largest + at, top)
    finite = tl.where(top == float("-inf"), 0.0, top)  # a block may have no probability mass
    tl.store(total + at, tl.sum(tl.exp(values - finite)))


@triton.jit
def _largest(values):
    # Comparisons with NaN can select any index, and the next step needs a valid token.
    return tl.argmax(tl.where(values == values, values, float("-inf")), axis=0)


@triton.jit
def _sample(
    logits, largest, total, factor, vocabulary, parts,
    tokens, logps, uniforms, last, count, place, active, stop_ids, stops, room,
    block: tl.constexpr, most_parts: tl.constexpr, greedy: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(active + row) == 0:
        return
    part = tl.arange(0, most_parts)
    known = part < parts
    tops = tl.load(largest + row * parts + part, mask=known, other=float("-inf"))
    top = tl.max(tops)
    sums = tl.load(total + row * parts + part, mask=known, other=0.0) * tl.exp(tops - top)
    mass = tl.sum(sums)
    written = tl.load(count + row)
    if greedy:
        chosen = _largest(tops)
        before = 0.0
        wanted = 0.0
    else:
        wanted = tl.load(uniforms + row * room + written) * mass
        upto = tl.cumsum(sums, axis=0)
        # The first block whose cumulative mass exceeds `wanted`; if rounding leaves no such block,
        # the last block with mass.
        passing = (upto > wanted) & (sums > 0)
        filled = tl.max(tl.where(sums > 0, part, 0))
        chosen = tl.minimum(tl.min(tl.where(passing, part, most_parts)), filled)
        # Reuse the prefix sum: with another order of additions, rounding might make this sum exceed
        # `wanted`, and the first token would be selected.
        before = tl.max(tl.where(part < chosen, upto, 0.0))
    column = chosen * block + tl.arange(0, block)
    inside = column < vocabulary
    line = logits + row * vocabulary
    values = tl.load(line + column, mask=inside, other=float("-inf")).to(tl.float32) * factor
    if greedy:
        index = _largest(values)
        token = chosen * block + index
        logp = mass - mass  # 0, or NaN
    else:
        weights = tl.exp(values - top)
        inner = before + tl.cumsum(weights, axis=0)
        place_in = tl.arange(0, block)
        least = tl.min(tl.where((inner > wanted) & (weights > 0), place_in, block))
        final = tl.max(tl.where(weights > 0, place_in, 0))
        index = tl.minimum(least, final)
        token = chosen * block + index
        value = tl.sum(tl.where(place_in == index, values, 0.0))
        logp = value - top - tl.log(mass)
    tl.store(tokens + row * room + written, token.to(tl.int64))
    tl.store(logps + row * room + written, logp)
    tl.store(last + row, token.to(tl.int64))
    tl.store(count + row, written + 1)
    tl.store(place + row, tl.load(place + row) + 1)
    ended = written + 1 >= room
    for number in range(stops):
        ended = ended | (tl.load(stop_ids + number) == token)
    tl.store(active + row, (ended == 0).to(tl.int1))


def sample_tokens(
    logits: torch.Tensor, state: SlotState, *, temperature: float, stop_ids: torch.Tensor
) -> None:
    """Sample the next token of the first W sequences from `logits` [W, V].

    Temperature 0 chooses the most likely token. A completion ends with a stop token or at its
    maximum length. If logits are NaN, the log-probability of the sampled token is NaN too.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
    largest = logits.new_empty(rows, parts, dtype=torch.float32)
    total = torch.empty_like(largest)
    factor = 1.0 if temperature == 0.0 else 1.0 / temperature
    _block_sums[(rows, parts)](
        logits, largest, total, factor, vocabulary, block=VOCABULARY_BLOCK, num_warps=4
    )
    _sample[(rows,)](
        logits, largest, total, factor, vocabulary, parts,
        *state, stop_ids, len(stop_ids), state.tokens.shape[1],
        block=VOCABULARY_BLOCK, most_parts=triton.next_power_of_2(parts), greedy=temperature == 0.0,
        num_warps=4,
    )  # fmt: skip
