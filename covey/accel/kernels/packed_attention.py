"""Attention over packed rows for training: forward and backward kernels.

Attention is causal. The causal mask is aligned at the end of a row, so the last query of a row sees
all keys of the row. The last queries of a row see the most keys, so they need
the most work. The first keys of a row need the most work, because most queries see the first keys.
Triton programs with the most work start first, so that all multiprocessors end at about the same
time.

In the backward pass, one kernel computes the gradient of queries, and another kernel computes the
gradients of keys and values. The kernel for keys and values sums gradients over the query heads
that share a key head, and writes only the sums. All sums have a fixed order, so results are
deterministic.

The dimensions in tensor shapes are N (packed tokens), R (key positions), H (heads), K (key-value
heads) and D (head size).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from covey.accel.attention_kernels import VarlenRows
from covey.accel.kernels.running_softmax import online_softmax

SIZES = (16, 32, 64, 128)
"""Head sizes that the kernels support."""
PROGRAMS = 500
"""Desired minimum number of Triton programs that compute the gradients of keys and values; an H200
runs about 260 of these programs at a time."""


class Tile(NamedTuple):
    """The numbers of queries and keys in a tile, and the launch settings of a Triton program."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _bounds(query_starts, key_starts, row):
    """Return the first query, the first key, and the numbers of queries and keys of a row."""
    first, place = tl.load(query_starts + row), tl.load(key_starts + row)
    count = tl.load(query_starts + row + 1) - first
    length = tl.load(key_starts + row + 1) - place
    return first.to(tl.int64), place.to(tl.int64), count, length


@triton.jit
def _tile(source, start, count, stride, size: tl.constexpr, block: tl.constexpr):
    """Load `block` vectors from index `start`; vectors with an index of `count` or more are 0."""
    at = start + tl.arange(0, block)
    cell = at[:, None] * stride + tl.arange(0, size)[None, :]
    return tl.load(source + cell, mask=(at < count)[:, None], other=0.0)


@triton.jit
def _forward_keys(
    query, key, value, low, high, length, last, key_stride, value_stride, factor,
    largest, total, result,
    size: tl.constexpr, keys: tl.constexpr, masked: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Update the running softmax of each query with keys `low` to `high` - 1.

    If `masked` is true, each query sees only keys up to its index in `last`.
    """
    for start in range(low, high, keys):
        k = _tile(key, start, length, key_stride, size, keys)
        v = _tile(value, start, length, value_stride, size, keys)
        score = tl.dot(query, tl.trans(k), input_precision=precision) * factor
        if masked:
            seen = start + tl.arange(0, keys)[None, :] <= last[:, None]
            score = tl.where(seen, score, float("-inf"))
        largest, total, result = online_softmax(score, v, largest, total, result, precision)
    return largest, total, result


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    query, key, value, attended, norm, query_starts, key_starts, tokens, factor,
    query_stride, query_head, key_stride, key_head, value_stride, value_head,
    heads: tl.constexpr, shared: tl.constexpr, size: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    first, place, count, length = _bounds(query_starts, key_starts, tl.program_id(2))
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * queries
    if start >= count:
        return
    number = start + tl.arange(0, queries)
    last = number + length - count
    q = _tile(query + first * query_stride + head * query_head, start, count, query_stride,
              size, queries)  # fmt: skip
    key += place * key_stride + head // shared * key_head
    value += place * value_stride + head // shared * value_head
    largest = tl.full((queries,), float("-inf"), tl.float32)
    total = tl.zeros((queries,), tl.float32)
    result = tl.zeros((queries, size), tl.float32)
    seen_by_all = (start + length - count + 1) // keys * keys
    largest, total, result = _forward_keys(
        q, key, value, 0, seen_by_all, length, last, key_stride, value_stride, factor,
        largest, total, result, size, keys, False, precision,
    )  # fmt: skip
    high = tl.minimum(start + queries + length - count, length)
    largest, total, result = _forward_keys(
        q, key, value, seen_by_all, high, length, last, key_stride, value_stride, factor,
        largest, total, result, size, keys, True, precision,
    )  # fmt: skip
    real = number < count
    cell = ((first + number) * heads + head)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(attended + cell, result / total[:, None], mask=real[:, None])
    tl.store(norm + head * tokens + first + number, largest + tl.log2(total), mask=real)


@triton.jit
def _query_grad_keys(
    query, grad, key, value, low, high, length, last, key_stride, value_stride, factor,
    norm, inner, result,
    size: tl.constexpr, keys: tl.constexpr, masked: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Add the gradient of queries that comes from the keys with indices in [low, high)."""
    for start in range(low, high, keys):
        k = _tile(key, start, length, key_stride, size, keys)
        v = _tile(value, start, length, value_stride, size, keys)
        score = tl.dot(query, tl.trans(k), input_precision=precision) * factor
        if masked:
            seen = start + tl.arange(0, keys)[None, :] <= last[:, None]
            score = tl.where(seen, score, float("-inf"))
        weight = tl.exp2(score - norm[:, None])
        by_weight = tl.dot(grad, tl.trans(v), input_precision=precision)
        by_score = (weight * (by_weight - inner[:, None])).to(k.dtype)
        result += tl.dot(by_score, k, input_precision=precision)
    return result


@triton.jit(do_not_specialize=["tokens"])
def _query_grad(
    query, key, value, attended, grad, norm, inner, query_grad, query_starts, key_starts, tokens,
    factor, scale, query_stride, query_head, key_stride, key_head, value_stride, value_head,
    heads: tl.constexpr, shared: tl.constexpr, size: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of queries.

    The kernel also writes `inner`, the dot product of output and output gradient for each query.
    """
    head = tl.program_id(1)
    first, place, count, length = _bounds(query_starts, key_starts, tl.program_id(2))
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * queries
    if start >= count:
        return
    number = start + tl.arange(0, queries)
    real, last = number < count, number + length - count
    q = _tile(query + first * query_stride + head * query_head, start, count, query_stride,
              size, queries)  # fmt: skip
    line = (first * heads + head) * size
    g = _tile(grad + line, start, count, heads * size, size, queries)
    out = _tile(attended + line, start, count, heads * size, size, queries)
    products = tl.sum(g.to(tl.float32) * out.to(tl.float32), axis=1)
    cell = head * tokens + first + number
    tl.store(inner + cell, products, mask=real)
    norms = tl.load(norm + cell, mask=real, other=0.0)
    key += place * key_stride + head // shared * key_head
    value += place * value_stride + head // shared * value_head
    result = tl.zeros((queries, size), tl.float32)
    seen_by_all = (start + length - count + 1) // keys * keys
    result = _query_grad_keys(
        q, g, key, value, 0, seen_by_all, length, last, key_stride, value_stride, factor,
        norms, products, result, size, keys, False, precision,
    )  # fmt: skip
    high = tl.minimum(start + queries + length - count, length)
    result = _query_grad_keys(
        q, g, key, value, seen_by_all, high, length, last, key_stride, value_stride, factor,
        norms, products, result, size, keys, True, precision,
    )  # fmt: skip
    cells = line + number[:, None] * heads * size + tl.arange(0, size)[None, :]
    tl.store(query_grad + cells, result * scale, mask=real[:, None])


@triton.jit
def _key_grad_queries(
    key, value, query, grad, norm, inner, low, high, count, before, start,
    query_stride, grad_stride, factor, by_key, by_value,
    size: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, masked: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Add the contribution of queries `low` to `high` - 1 to the gradients of keys and values."""
    for begin in range(low, high, queries):
        q = _tile(query, begin, count, query_stride, size, queries)
        g = _tile(grad, begin, count, grad_stride, size, queries)
        number = begin + tl.arange(0, queries)
        norms = tl.load(norm + number, mask=number < count, other=0.0)
        products = tl.load(inner + number, mask=number < count, other=0.0)
        score = tl.dot(key, tl.trans(q), input_precision=precision) * factor
        if masked:
            seen = start + tl.arange(0, keys)[:, None] <= (number + before)[None, :]
            score = tl.where(seen, score, float("-inf"))
        weight = tl.exp2(score - norms[None, :])
        by_value += tl.dot(weight.to(g.dtype), g, input_precision=precision)
        by_weight = tl.dot(value, tl.trans(g), input_precision=precision)
        by_score = (weight * (by_weight - products[None, :])).to(q.dtype)
        by_key += tl.dot(by_score, q, input_precision=precision)
    return by_key, by_value


@triton.jit(do_not_specialize=["tokens", "places"])
def _key_grad(
    query, key, value, grad, norm, inner, grads, query_starts, key_starts, tokens,
    factor, scale, places, query_stride, query_head, key_stride, key_head, value_stride, value_head,
    heads: tl.constexpr, shared: tl.constexpr, size: tl.constexpr, parts: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values from one part of the query heads.

    The query heads that share a key head are divided into parts, one for each Triton program.
    """
    key_number, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    first, place, count, length = _bounds(query_starts, key_starts, tl.program_id(2))
    start = tl.program_id(0) * keys
    if start >= length:
        return
    k = _tile(key + place * key_stride + key_number * key_head, start, length, key_stride,
              size, keys)  # fmt: skip
    v = _tile(value + place * value_stride + key_number * value_head, start, length, value_stride,
              size, keys)  # fmt: skip
    by_key = tl.zeros((keys, size), tl.float32)
    by_value = tl.zeros((keys, size), tl.float32)
    # Query i sees keys up to number i + before; the first queries see only some of these keys.
    before = length - count
    low = tl.maximum(start - before, 0) // queries * queries
    middle = tl.cdiv(tl.maximum(start + keys - 1 - before, 0), queries) * queries
    middle = tl.maximum(tl.minimum(middle, count), low)
    for member in range(shared // parts):
        head = key_number * shared + part * (shared // parts) + member
        source = query + first * query_stride + head * query_head
        line = grad + (first * heads + head) * size
        row = head * tokens + first
        by_key, by_value = _key_grad_queries(
            k, v, source, line, norm + row, inner + row, low, middle, count, before, start,
            query_stride, heads * size, factor, by_key, by_value,
            size, queries, keys, True, precision,
        )  # fmt: skip
        by_key, by_value = _key_grad_queries(
            k, v, source, line, norm + row, inner + row, middle, count, count, before, start,
            query_stride, heads * size, factor, by_key, by_value,
            size, queries, keys, False, precision,
        )  # fmt: skip
    number = start + tl.arange(0, keys)
    key_heads: tl.constexpr = heads // shared
    line = 2 * part * places.to(tl.int64) + place
    real = (number < length)[:, None]
    cell = ((line + number) * key_heads + key_number)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(grads + cell, by_key * scale, mask=real)
    tl.store(grads + cell + places.to(tl.int64) * key_heads * size, by_value, mask=real)


class Tiles(NamedTuple):
    """Tile sizes of the forward kernel and of the two backward kernels."""

    forward: Tile
    query_grad: Tile
    key_grad: Tile
    parts: int = 0
    """Number of parts into which the query heads that share a key head are divided; if 0,
    `parts_for` decides."""


def tiles_for(size: int, *, large: bool = True) -> Tiles:
    """Return the fastest tiles for a head size, measured on an H200 (rows of 384 and 1,024 tokens).

    `large` says whether a Triton program may use more than 99 KiB of shared memory.
    """
    if size <= 64:
        return Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2))
    return Tiles(Tile(64, 64, 4, 3 if large else 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))


@functools.cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Return whether a Triton program can use at least 160 KiB of shared memory.

    Data center GPUs since Ampere have at least 160 KiB of shared memory.
    """
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    found: int = getattr(properties, "shared_memory_per_block_optin", 0)  # not in older torch
    return found >= 160 * 2**10


def _shared_options(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: Tile
) -> dict[str, object]:
    """Return the launch arguments that the forward and backward kernels share."""
    heads, size = query.shape[1:]
    names = ("query", "key", "value")
    options: dict[str, object] = {"heads": heads, "shared": heads // key.shape[1], "size": size}
    for name, tensor in zip(names, (query, key, value), strict=True):
        options |= {f"{name}_stride": tensor.stride(0), f"{name}_head": tensor.stride(1)}
    return options | {
        "queries": tile.queries,
        "keys": tile.keys,
        "precision": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: VarlenRows,
    scale: float,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [N, H, D] of attention, and each query's log-sum-exp [H, N] to base 2."""
    tokens, heads, size = query.shape
    tile = tile or tiles_for(size, large=_has_large_shared_memory(query.device)).forward
    attended = query.new_empty(query.shape)
    norm = query.new_empty(heads, tokens, dtype=torch.float32)
    rows = len(spans.query_starts) - 1
    _forward[(triton.cdiv(spans.longest_query, tile.queries), heads, rows)](
        query, key, value, attended, norm, spans.query_starts, spans.key_starts, tokens,
        scale / math.log(2), **_shared_options(query, key, value, tile),
    )  # fmt: skip
    return attended, norm


def attention_backward(
    grad: torch.Tensor,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attended: torch.Tensor,
    norm: torch.Tensor,
    spans: VarlenRows,
    scale: float,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values; `grad` must be contiguous."""
    query, key, value = tensors
    tokens, heads, size = query.shape
    tiles = tiles or tiles_for(size, large=_has_large_shared_memory(query.device))
    inner = torch.empty_like(norm)
    query_grad = query.new_empty(query.shape)
    rows, factor = len(spans.query_starts) - 1, scale / math.log(2)
    starts = (spans.query_starts, spans.key_starts, tokens, factor, scale)
    tile = tiles.query_grad
    _query_grad[(triton.cdiv(spans.longest_query, tile.queries), heads, rows)](
        query, key, value, attended, grad, norm, inner, query_grad, *starts,
        **_shared_options(query, key, value, tile),
    )  # fmt: skip
    tile = tiles.key_grad
    places, key_heads, _ = key.shape
    parts = tiles.parts or parts_for(places, key_heads, heads // key_heads, tile)
    grads = key.new_empty(parts, 2, places, key_heads, size)
    _key_grad[(triton.cdiv(spans.longest_key, tile.keys), key_heads * parts, rows)](
        query, key, value, grad, norm, inner, grads, *starts, places, parts=parts,
        **_shared_options(query, key, value, tile),
    )  # fmt: skip
    key_grad, value_grad = grads[0] if parts == 1 else grads.sum(dim=0)
    return query_grad, key_grad, value_grad


def parts_for(places: int, key_heads: int, shared: int, tile: Tile) -> int:
    """Return the number of parts into which to divide the query heads that share a key head.

    With few Triton programs, the GPU would wait for the slowest program. The number of parts is
    therefore increased until there are at least `PROGRAMS` Triton programs, or until each part is a
    single query head.
    """
    programs = triton.cdiv(places, tile.keys) * key_heads
    divisors = (parts for parts in range(1, shared) if shared % parts == 0)
    return next((parts for parts in divisors if programs * parts >= PROGRAMS), shared)
