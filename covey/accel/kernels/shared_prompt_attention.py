"""Decode attention of any model over a KV cache in which sequences can share a prompt.

The model's own code applies RoPE and norms before this kernel. The kernel stores the new key and
value of each sequence. The kernel then attends to the sequence's prompt, which several sequences
may share, and to the sequence's own completion. The kernel supports sliding windows and soft caps.

A slot is the place of one sequence in the batch. The dimensions in tensor shapes are W (slots in
use), S (all slots), P (prompts), H (heads), K (key-value heads), C (positions per page) and D (head
size).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from covey.accel.kernels.decode_attention import LEAST_ROWS, LayerCache, tile_sizes
from covey.accel.kernels.running_softmax import online_softmax

NO_WINDOW = 2**31 - 1


@triton.jit
def _score(product, scale, softcap, capped: tl.constexpr):
    """Return attention scores for a softmax to base 2, with an optional soft cap."""
    score = product * scale
    if capped:
        # tanh(x) as 2 / (1 + exp(-2 x)) - 1.
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    return score * 1.4426950408889634


@triton.jit
def _attend(
    keys, values, begin, pages, stride, low, count, query, largest, total, result, scale, softcap,
    size: tl.constexpr, room: tl.constexpr, block: tl.constexpr, page: tl.constexpr,
    capped: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Update a running softmax with the keys and values of positions `low` to `count` - 1.

    The key and value of position 0 are in row `begin`. If `page` is not 0, keys and values are in
    pages of `page` positions each, and page p begins at row `begin` + p * `stride`.
    """
    whole = tl.arange(0, room)
    for start in range(low // block * block, count, block):
        position = start + tl.arange(0, block)
        seen = (position >= low) & (position < count)
        inside = seen[:, None] & (whole < size)[None, :]
        row = begin + start
        if page != 0:
            row = begin + tl.load(pages + start // page).to(tl.int64) * stride + start % page
        cell = (row + tl.arange(0, block))[:, None] * size + whole
        key = tl.load(keys + cell, mask=inside, other=0.0)
        value = tl.load(values + cell, mask=inside, other=0.0)
        product = tl.dot(query, tl.trans(key), input_precision=precision)
        score = _score(product, scale, softcap, capped)
        score = tl.where(seen[None, :], score, float("-inf"))
        largest, total, result = online_softmax(score, value, largest, total, result, precision)
    return largest, total, result


@triton.jit
def _shared_prompt_attention(
    query, key, value, query_slot, query_head, key_slot, key_head, value_slot, value_head,
    prompt_keys, prompt_values, prompt_row, prompt_length, keys, values, pages, place, active,
    attended, scale, softcap, window, prompt_capacity, slot_pages,
    key_heads: tl.constexpr, shared: tl.constexpr, size: tl.constexpr, room: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, page: tl.constexpr, capped: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    whole, member = tl.arange(0, room), tl.arange(0, rows)
    known = whole < size
    real = (member < shared)[:, None] & known[None, :]
    out = attended + (slot * key_heads * shared + head * shared + member)[:, None] * size + whole
    if tl.load(active + slot) == 0:
        tl.store(out, tl.zeros((rows, room), tl.float32), mask=real)  # replaces the old values
        return
    at, before = tl.load(place + slot), tl.load(prompt_length + slot)
    row = tl.load(prompt_row + slot)
    kind = keys.dtype.element_ty

    query_at = query + slot * query_slot + (head * shared + member)[:, None] * query_head + whole
    q = tl.load(query_at, mask=real, other=0.0).to(kind)
    k = tl.load(key + slot * key_slot + head * key_head + whole, mask=known, other=0.0).to(kind)
    value_at = value + slot * value_slot + head * value_head + whole
    v = tl.load(value_at, mask=known, other=0.0).to(kind)
    own = pages + slot * slot_pages
    new_row = (tl.load(own + at // page).to(tl.int64) * key_heads + head) * page + at % page
    tl.store(keys + new_row * size + whole, k, mask=known)
    tl.store(values + new_row * size + whole, v, mask=known)

    # The new position comes first, from registers, so the kernel never reads what it just stored.
    product = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1)
    largest = _score(product, scale, softcap, capped)
    total = tl.full((rows,), 1.0, tl.float32)
    result = tl.zeros((rows, room), tl.float32) + v.to(tl.float32)[None, :]
    # A window includes the new position, and may begin in the prompt or after it.
    prompt_low = tl.maximum(before + at + 1 - window, 0)
    prompt_begin = (row * key_heads + head) * prompt_capacity
    largest, total, result = _attend(
        prompt_keys, prompt_values, prompt_begin, own, 0, prompt_low, before, q,
        largest, total, result, scale, softcap, size, room, block, 0, capped, precision,
    )  # fmt: skip
    low = tl.maximum(at + 1 - window, 0)
    largest, total, result = _attend(
        keys, values, head * page, own, key_heads * page, low, at, q,
        largest, total, result, scale, softcap, size, room, block, page, capped, precision,
    )  # fmt: skip
    tl.store(out, result / total[:, None], mask=real)


def shared_prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Store the new key and value; return the attention output [W, H, D].

    `query` [W, H, D], `key` and `value` [W, K, D] belong to one new token per sequence. A sliding
    window of n positions covers the new position and the n - 1 positions before it.
    """
    slots, heads, size = query.shape
    key_heads, page = cache.keys.shape[1:3]
    query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
    attended = torch.empty((slots, heads, size), dtype=query.dtype, device=query.device)
    room = max(LEAST_ROWS, triton.next_power_of_2(size))
    block, warps, stages = tile_sizes(slots * key_heads, room, cache.keys.dtype)
    _shared_prompt_attention[(slots, key_heads)](
        query, key, value, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        *cache[:9],
        attended, scale, softcap or 0.0, window or NO_WINDOW, cache.prompt_keys.shape[2],
        cache.pages.shape[1],
        key_heads=key_heads, shared=heads // key_heads, size=size, room=room,
        rows=max(LEAST_ROWS, triton.next_power_of_2(heads // key_heads)),
        block=min(block, page), page=page, capped=softcap is not None,
        precision="ieee" if cache.keys.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return attended
