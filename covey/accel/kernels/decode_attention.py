"""Decode attention of Llama-like models, fused with RoPE and cache write, for one token per slot.

With one token per slot the matrix products are small, and the operations around them take most of
the time. Therefore one kernel computes everything between the QKV product and the output product.

Tensor shapes use W occupied slots, S slots, P prompts, H heads, K key-value heads, head size D and
C positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LEAST_ROWS = 16
"""Minimum rows of a tensor core product; query heads that share keys are padded to this."""
FEW_PROGRAMS = 512
WIDE, NARROW, EXACT = (128, 4, 2), (32, 2, 2), (16, 4, 2)
"""Positions per iteration, warps and stages of a Triton program. If few Triton programs run, each
program should have many loads in flight. If many Triton programs run, each program is faster with
less data. These values were the fastest on an H200 with head sizes 64 and 128. In float32 the
compiler unrolls products, and would need four seconds to compile larger tiles.
"""
STAGE_BYTES = 64 * 2**10
"""Maximum bytes of keys and values that a Triton program has in flight. Large heads are read in
smaller tiles, because larger tiles would not fit in a multiprocessor's shared memory.
"""
SMALLEST_HEAD = 32
"""Smallest head size in 16-bit types: tensor cores need 16 numbers, and a head is halved."""


class LayerCache(NamedTuple):
    """Keys and values of one layer, and the positions of each slot's keys and values."""

    prompt_keys: torch.Tensor
    """[P, K, C', D]: keys of prompts, of up to C' positions each."""
    prompt_values: torch.Tensor
    """[P, K, C', D]: values of prompts, of up to C' positions each."""
    prompt_row: torch.Tensor
    """[S] int64: the index in `prompt_keys` of a slot's prompt."""
    prompt_length: torch.Tensor
    """[S] int64: the length of a slot's prompt."""
    keys: torch.Tensor
    """[S, K, C, D]: keys of completions; written by the kernel."""
    values: torch.Tensor
    """[S, K, C, D]: values of completions; written by the kernel."""
    place: torch.Tensor
    """[S] int64: the position at which the new key and value are written."""
    active: torch.Tensor
    """[S] bool: whether a slot is unfinished; finished slots are skipped."""


def tile_sizes(programs: int, head: int, kind: torch.dtype) -> tuple[int, int, int]:
    """Return positions per iteration, warps and stages of a Triton program."""
    block, warps, stages = WIDE if programs <= FEW_PROGRAMS else NARROW
    if kind == torch.float32:
        block, warps, stages = EXACT
    return min(block, STAGE_BYTES // (2 * head * kind.itemsize)), warps, stages


@triton.jit
def _norm_halves(first, second, gain, half, size: tl.constexpr, eps):
    """RMSNorm of a head that is split into two halves along the last axis."""
    square = tl.sum(first * first, axis=-1) + tl.sum(second * second, axis=-1)
    scale = 1.0 / tl.sqrt(square / size + eps)
    first_gain = tl.load(gain + half).to(tl.float32)
    second_gain = tl.load(gain + size // 2 + half).to(tl.float32)
    if len(first.shape) == 2:
        scale = scale[:, None]
    return first * scale * first_gain, second * scale * second_gain


@triton.jit
def online_softmax(score, value, largest, total, result, precision: tl.constexpr):
    """Add more positions to a running softmax; scores are logarithms to base 2."""
    larger = tl.maximum(largest, tl.max(score, axis=1))
    shrink = tl.exp2(largest - larger)
    weight = tl.exp2(score - larger[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    result = result * shrink[:, None]
    result += tl.dot(weight.to(value.dtype), value, input_precision=precision)
    return larger, total, result


@triton.jit
def _attend(
    keys, values, begin, count, first, second, largest, total, result, log2,
    size: tl.constexpr, block: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Attend to `count` consecutive positions, starting at row `begin`."""
    half = tl.arange(0, size // 2)
    whole = tl.arange(0, size)
    for start in range(0, count, block):
        position = start + tl.arange(0, block)
        seen = position < count
        cell = (begin + position)[:, None] * size
        c1 = tl.load(keys + cell + half, mask=seen[:, None], other=0.0)
        c2 = tl.load(keys + cell + size // 2 + half, mask=seen[:, None], other=0.0)
        cv = tl.load(values + cell + whole, mask=seen[:, None], other=0.0)
        score = tl.dot(first, tl.trans(c1), input_precision=precision)
        score += tl.dot(second, tl.trans(c2), input_precision=precision)
        score = tl.where(seen[None, :], score * log2, float("-inf"))
        largest, total, result = online_softmax(score, cv, largest, total, result, precision)
    return largest, total, result


@triton.jit
def _decode_attention(
    heads, cosine, sine, query_gain, key_gain,
    prompt_keys, prompt_values, prompt_row, prompt_length, keys, values, place, active,
    attended, scale, eps, prompt_capacity, capacity,
    key_heads: tl.constexpr, shared: tl.constexpr, size: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, norms: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, size // 2)
    whole = tl.arange(0, size)
    member = tl.arange(0, rows)
    real = (member < shared)[:, None]
    out = attended + (slot * key_heads * shared + head * shared + member)[:, None] * size + whole
    goes_on = tl.load(active + slot)
    at = tl.load(place + slot)
    before = tl.load(prompt_length + slot)
    row = tl.load(prompt_row + slot)
    if goes_on == 0:
        tl.store(out, tl.zeros((rows, size), tl.float32), mask=real)  # replaces the old values
        return
    kind = keys.dtype.element_ty

    cos = tl.load(cosine + (before + at) * (size // 2) + half).to(tl.float32)
    sin = tl.load(sine + (before + at) * (size // 2) + half).to(tl.float32)
    width: tl.constexpr = (key_heads * shared + 2 * key_heads) * size
    line = heads + slot * width
    query_at = line + (head * shared + member)[:, None] * size + half
    q1 = tl.load(query_at, mask=real, other=0.0).to(tl.float32)
    q2 = tl.load(query_at + size // 2, mask=real, other=0.0).to(tl.float32)
    key_at = line + (key_heads * shared + head) * size + half
    k1 = tl.load(key_at).to(tl.float32)
    k2 = tl.load(key_at + size // 2).to(tl.float32)
    v = tl.load(line + (key_heads * shared + key_heads + head) * size + whole)
    if norms:
        q1, q2 = _norm_halves(q1, q2, query_gain, half, size, eps)
        k1, k2 = _norm_halves(k1, k2, key_gain, half, size, eps)
    # Rounded once, to the type of the cache and of the products.
    first = (q1 * cos - q2 * sin).to(kind)
    second = (q2 * cos + q1 * sin).to(kind)
    k_first = (k1 * cos - k2 * sin).to(kind)
    k_second = (k2 * cos + k1 * sin).to(kind)
    begin = (slot * key_heads + head) * capacity
    tl.store(keys + (begin + at) * size + half, k_first)
    tl.store(keys + (begin + at) * size + size // 2 + half, k_second)
    tl.store(values + (begin + at) * size + whole, v)

    # The new position comes first, from registers, so the kernel never reads what it just stored.
    log2 = scale * 1.4426950408889634
    score = tl.sum(first.to(tl.float32) * k_first.to(tl.float32), axis=1)
    score += tl.sum(second.to(tl.float32) * k_second.to(tl.float32), axis=1)
    largest = score * log2
    total = tl.full((rows,), 1.0, tl.float32)
    result = tl.zeros((rows, size), tl.float32) + v.to(tl.float32)
    prompt_begin = (row * key_heads + head) * prompt_capacity
    largest, total, result = _attend(
        prompt_keys, prompt_values, prompt_begin, before, first, second,
        largest, total, result, log2, size, block, precision,
    )  # fmt: skip
    largest, total, result = _attend(
        keys, values, begin, at, first, second,
        largest, total, result, log2, size, block, precision,
    )  # fmt: skip
    tl.store(out, result / total[:, None], mask=real)


def decode_attention(
    heads: torch.Tensor,
    cache: LayerCache,
    *,
    rope: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Apply RoPE, write the cache and attend for one new token per slot; return [W, H * D].

    `heads` [W, (H + 2 K) * D] are queries, keys and values from the QKV product. `rope` contains
    cosine and sine [positions, D / 2]. Slots that share a prompt read the same memory, mostly from
    the L2 cache.
    """
    slots, (_, key_heads, capacity, size) = len(heads), cache.keys.shape
    shared = heads.shape[1] // size // key_heads - 2
    attended = heads.new_empty(slots, key_heads * shared * size)
    query_gain, key_gain, eps = (heads, heads, 0.0) if norms is None else norms
    block, warps, stages = tile_sizes(slots * key_heads, size, cache.keys.dtype)
    _decode_attention[(slots, key_heads)](
        heads, *rope, query_gain, key_gain, *cache,
        attended, scale, eps, cache.prompt_keys.shape[2], capacity,
        key_heads=key_heads, shared=shared, size=size,
        rows=max(LEAST_ROWS, triton.next_power_of_2(shared)),
        block=block, norms=norms is not None,
        precision="ieee" if cache.keys.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return attended
