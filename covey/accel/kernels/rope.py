"""Apply RoPE to queries and keys, and copy a shared prompt's keys and values to every row.

Attention needs the keys and values of a row to be consecutive in memory. The kernel therefore
copies the keys and values of a prompt to every row that shares the prompt. Each packed token has
only one query. The backward pass sums the gradients of shared keys and values in float32, in a
fixed order.

The dimensions in tensor shapes are N (packed tokens), R (key positions), H (heads), K (key-value
heads) and D (head size).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from covey.accel.attention_kernels import KeyIndex
from covey.accel.kernels.launch import call


@triton.jit
def _rotate(source, target, cos, sin, line, head, half, real, size: tl.constexpr):
    """Apply RoPE to the heads at `source`; write the result, rounded once, to `target`."""
    at = head[:, None] * size + half[None, :]
    first = tl.load(source + at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(source + at + size // 2, mask=real, other=0.0).to(tl.float32)
    tl.store(target + line + at, first * cos - second * sin, mask=real)
    tl.store(target + line + at + size // 2, second * cos + first * sin, mask=real)


@triton.jit
def _forward(
    query, key, value, cosine, sine, tokens, rotated, keys, values, count, places,
    query_stride, key_stride, value_stride,
    heads: tl.constexpr, key_heads: tl.constexpr, size: tl.constexpr,
    head_block: tl.constexpr, key_block: tl.constexpr, half_block: tl.constexpr,
    gathers: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, half_block)
    half_real = (half < size // 2)[None, :]
    if number < count:
        at = number * (size // 2) + half
        cos = tl.load(cosine + at, mask=half < size // 2, other=0.0)[None, :]
        sin = tl.load(sine + at, mask=half < size // 2, other=0.0)[None, :]
        head = tl.arange(0, head_block)
        real = (head < heads)[:, None] & half_real
        _rotate(
            query + number * query_stride, rotated, cos, sin, number * heads * size,
            head, half, real, size,
        )  # fmt: skip
    if number < places:
        token = number
        if gathers:
            token = tl.load(tokens + number).to(tl.int64)
        at = token * (size // 2) + half
        cos = tl.load(cosine + at, mask=half < size // 2, other=0.0)[None, :]
        sin = tl.load(sine + at, mask=half < size // 2, other=0.0)[None, :]
        head = tl.arange(0, key_block)
        real = (head < key_heads)[:, None] & half_real
        line = number * key_heads * size
        _rotate(key + token * key_stride, keys, cos, sin, line, head, half, real, size)
        cell = head[:, None] * size + half[None, :]
        for part in tl.static_range(2):
            where = cell + part * (size // 2)
            whole = tl.load(value + token * value_stride + where, mask=real)
            tl.store(values + line + where, whole, mask=real)


@triton.jit
def _backward(
    rotated_grad, keys_grad, values_grad, cosine, sine, starts, begin, end, position,
    query_grad, key_grad, value_grad, stride,
    heads: tl.constexpr, key_heads: tl.constexpr, size: tl.constexpr,
    head_block: tl.constexpr, key_block: tl.constexpr, half_block: tl.constexpr,
    gathers: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, half_block)
    half_real = (half < size // 2)[None, :]
    at = token * (size // 2) + half
    cos = tl.load(cosine + at, mask=half < size // 2, other=0.0)[None, :]
    # The inverse rotation has the opposite angle.
    sin = -tl.load(sine + at, mask=half < size // 2, other=0.0)[None, :]
    head = tl.arange(0, head_block)
    real = (head < heads)[:, None] & half_real
    _rotate(
        rotated_grad + token * heads * size, query_grad, cos, sin, token * stride,
        head, half, real, size,
    )  # fmt: skip
    head = tl.arange(0, key_block)
    real = (head < key_heads)[:, None] & half_real
    cell = head[:, None] * size + half[None, :]
    k1 = tl.zeros((key_block, half_block), tl.float32)
    k2 = tl.zeros((key_block, half_block), tl.float32)
    v1 = tl.zeros((key_block, half_block), tl.float32)
    v2 = tl.zeros((key_block, half_block), tl.float32)
    first, last, behind = 0, 1, 0
    if gathers:
        first, last = tl.load(begin + token), tl.load(end + token)
        behind = tl.load(position + token)
    for row in range(first, last):
        place = token
        if gathers:
            place = (tl.load(starts + row) + behind).to(tl.int64)
        where = place * key_heads * size + cell
        k1 += tl.load(keys_grad + where, mask=real, other=0.0).to(tl.float32)
        k2 += tl.load(keys_grad + where + size // 2, mask=real, other=0.0).to(tl.float32)
        v1 += tl.load(values_grad + where, mask=real, other=0.0).to(tl.float32)
        v2 += tl.load(values_grad + where + size // 2, mask=real, other=0.0).to(tl.float32)
    where = token * stride + cell
    tl.store(key_grad + where, k1 * cos - k2 * sin, mask=real)
    tl.store(key_grad + where + size // 2, k2 * cos + k1 * sin, mask=real)
    tl.store(value_grad + where, v1, mask=real)
    tl.store(value_grad + where + size // 2, v2, mask=real)


def _tiles(heads: int, key_heads: int, size: int) -> dict[str, int]:
    blocks = {
        "head_block": triton.next_power_of_2(heads),
        "key_block": triton.next_power_of_2(key_heads),
        "half_block": triton.next_power_of_2(size // 2),
    }
    elements = blocks["head_block"] * blocks["half_block"]
    warps = min(8, max(1, elements // 256))
    return {"heads": heads, "key_heads": key_heads, "size": size, "num_warps": warps, **blocks}


class _Rope(torch.autograd.Function):
    """Autograd function for RoPE; the input is a fused QKV tensor, or queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        rope: tuple[torch.Tensor, torch.Tensor],
        shared: KeyIndex | None,
        shape: tuple[int, int, int],
        *products: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, key_heads, size = shape
        widths = [heads * size, key_heads * size, key_heads * size]
        parts = products[0].split(widths, dim=1) if len(products) == 1 else products
        query, key, value = (p if p.stride(1) == 1 else p.contiguous() for p in parts)
        count = len(query)
        places = count if shared is None else len(shared.tokens)
        rotated = value.new_empty(count, heads, size)
        keys, values = value.new_empty(2, places, key_heads, size).unbind(0)
        _forward[(max(count, places),)](
            query, key, value, *rope, rope[0] if shared is None else shared.tokens,
            rotated, keys, values, count, places,
            query.stride(0), key.stride(0), value.stride(0),
            gathers=shared is not None, **_tiles(*shape),
        )  # fmt: skip
        ctx.rope, ctx.shared, ctx.shape, ctx.fused = rope, shared, shape, len(products) == 1
        ctx.dtypes = [p.dtype for p in products]
        return rotated, keys, values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rotated_grad, keys_grad, values_grad = (g.contiguous() for g in grads)
        heads, key_heads, size = ctx.shape
        count, width = len(rotated_grad), (heads + 2 * key_heads) * size
        fused = rotated_grad.new_empty(count, width)
        parts = fused.split([heads * size, key_heads * size, key_heads * size], dim=1)
        table = ctx.shared[1:] if ctx.shared is not None else (ctx.rope[0],) * 4
        _backward[(count,)](
            rotated_grad, keys_grad, values_grad, *ctx.rope, *table, *parts, width,
            gathers=ctx.shared is not None, **_tiles(*ctx.shape),
        )  # fmt: skip
        found = (fused,) if ctx.fused else parts
        return None, None, None, *(g.to(d) for g, d in zip(found, ctx.dtypes, strict=True))


def apply_rope(
    *products: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    shared: KeyIndex | None,
    shape: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [N, H, D], keys and values [R, K, D], with RoPE applied to queries and keys.

    `products` is either one QKV product [N, (H + 2 K) * D], or three products for queries, keys and
    values. `rope` is cosine and sine [N, D / 2] in float32, and `shape` is (H, K, D). If `shared`
    is None, every token has exactly one key position.
    """
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query, key, value = call(_Rope, rope, shared, shape, *products)
    return query, key, value
