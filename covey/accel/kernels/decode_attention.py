"""Decode attention of Llama-like models, fused with RoPE and cache write, for one token per slot.

With one token per slot the matrix products are small, and the operations around them take most of
the time. Therefore one kernel computes everything between the QKV product and the output product.

Attention is limited by reading keys and values. A prompt is read once for up to `TOGETHER` slots
that share it, by Triton programs of their own. The result of such a program, called a part, is a
softmax over some of a slot's positions with its maximum and its sum. If slots are few, the
positions of a completion are also divided into parts. The last program of a slot adds the parts
to its own.

Tensor shapes use W occupied slots, S slots, P prompts, H heads, K key-value heads, head size D,
C positions, B pages and T pages per slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_ROWS = 16
"""Minimum rows of a tensor core product; query heads that share keys are padded to this."""
MOST_ROWS = 64
"""Most rows of a product with a shared prompt: query heads of several slots."""
TOGETHER = 8
"""Most slots in a row of `LayerCache.sharing`."""
STAGE_BYTES = 64 * 2**10
"""Maximum bytes of keys and values that a Triton program has in flight. Large heads are read in
smaller tiles, because larger tiles would not fit in a multiprocessor's shared memory.
"""
SMALLEST_HEAD = 16
"""Smallest head size in 16-bit types, a limit of tensor cores."""


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
    """[B, K, C, D]: keys of completions, in pages of C positions; written by the kernel."""
    values: torch.Tensor
    """[B, K, C, D]: values of completions, in pages of C positions; written by the kernel."""
    pages: torch.Tensor
    """[S, T] int32: the pages of a slot's completion, in the order of positions."""
    place: torch.Tensor
    """[S] int64: the position at which the new key and value are written."""
    active: torch.Tensor
    """[S] bool: whether a slot is unfinished; finished slots are skipped."""
    sharing: torch.Tensor
    """[S, TOGETHER] int32: in each row slots with the same prompt, then -1. Every unfinished slot
    occurs once."""
    shares: torch.Tensor
    """[1] int32: the number of rows of `sharing` in use."""
    arrived: torch.Tensor
    """[S, K] int32: the number of parts that are ready; zero before and after the kernel."""


class Tiling(NamedTuple):
    """How the work is divided into Triton programs."""

    block: int
    """Positions per iteration."""
    warps: int
    stages: int
    splits: int = 1
    """Parts of a completion."""
    prompt_splits: int = 1
    """Parts of a prompt."""
    launches: int = 1
    prompt_warps: int = 0
    prompt_block: int = 0
    rows: int = 64


@triton.jit
def _rotated(line, real, position, cosine, sine, gain, eps, size: tl.constexpr, norms: tl.constexpr):
    """Load heads [rows, size] at `line` [rows, 1], normalize them and apply RoPE, in float32."""
    half: tl.constexpr = size // 2
    whole = tl.arange(0, size)
    other = (whole + half) % size
    head = tl.load(line + whole, mask=real, other=0.0).to(tl.float32)
    swapped = tl.load(line + other, mask=real, other=0.0).to(tl.float32)
    if norms:
        scale = 1.0 / tl.sqrt(tl.sum(head * head, axis=1) / size + eps)[:, None]
        head = head * scale * tl.load(gain + whole).to(tl.float32)
        swapped = swapped * scale * tl.load(gain + other).to(tl.float32)
    angle = position * half + whole % half
    cos = tl.load(cosine + angle).to(tl.float32)
    sin = tl.load(sine + angle).to(tl.float32)
    return head * cos + swapped * tl.where(whole < half, -sin, sin)


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
    keys, values, begin, pages, stride, low, high, query, largest, total, result, log2,
    size: tl.constexpr, block: tl.constexpr, page: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Attend to positions `low` to `high` - 1; `low` is a multiple of `block`.

    Position 0 is at row `begin`. With pages of `page` positions, `begin` is its row in page 0, and
    pages are `stride` rows apart.
    """
    whole = tl.arange(0, size)
    number = tl.zeros((), tl.int64)
    if page != 0:
        number = tl.load(pages + low // page).to(tl.int64)
    for start in range(low, high, block):
        position = start + tl.arange(0, block)
        seen = position < high
        if page == 0:
            row = begin + start
        else:
            row = begin + number * stride + start % page
            # Loaded one iteration ahead; a load in the same iteration would delay the tile.
            after = start + block
            number = tl.load(pages + after // page, mask=after < high, other=0).to(tl.int64)
        cell = (row + tl.arange(0, block))[:, None] * size + whole
        key = tl.load(keys + cell, mask=seen[:, None], other=0.0)
        value = tl.load(values + cell, mask=seen[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=precision)
        score = tl.where(seen[None, :], score * log2, float("-inf"))
        largest, total, result = online_softmax(score, value, largest, total, result, precision)
    return largest, total, result


@triton.jit
def _part_size(length, splits: tl.constexpr, block: tl.constexpr):
    """Return the number of positions in each part of `length` positions but the last."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, splits), block), 1) * block


@triton.jit
def _prompt_part(
    item, heads, cosine, sine, query_gain, prompt_keys, prompt_values, prompt_row, prompt_length,
    place, active, sharing, arrived, parts, sums, scale, eps, prompt_capacity,
    key_heads: tl.constexpr, shared: tl.constexpr, size: tl.constexpr, rows: tl.constexpr,
    together: tl.constexpr, unit: tl.constexpr, block: tl.constexpr, splits: tl.constexpr,
    all_splits: tl.constexpr, norms: tl.constexpr, role: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Attend from slots that share a prompt to a part of it; rows are query heads of the slots."""
    part = item % splits
    head = item // splits % key_heads
    line = sharing + item // (splits * key_heads) * together
    row = tl.arange(0, rows)
    member = row % shared
    slot = tl.load(line + row // shared, mask=row < together * shared, other=-1).to(tl.int64)
    real = slot >= 0
    real = real & (tl.load(active + slot, mask=real, other=0) != 0)
    first = tl.maximum(tl.load(line), 0)
    before = tl.load(prompt_length + first)
    per = _part_size(before, splits, unit)
    low = part * per
    high = tl.minimum(low + per, before)
    if (high > low) & (tl.max(real.to(tl.int32), axis=0) > 0):
        kind = prompt_keys.dtype.element_ty
        position = before + tl.load(place + slot, mask=real, other=0)
        width: tl.constexpr = (key_heads * shared + 2 * key_heads) * size
        query_at = heads + (slot * width + (head * shared + member) * size)[:, None]
        query = _rotated(
            query_at, real[:, None], position[:, None], cosine, sine, query_gain, eps, size, norms
        ).to(kind)
        largest = tl.full((rows,), float("-inf"), tl.float32)
        total = tl.zeros((rows,), tl.float32)
        result = tl.zeros((rows, size), tl.float32)
        begin = (tl.load(prompt_row + first) * key_heads + head) * prompt_capacity
        largest, total, result = _attend(
            prompt_keys, prompt_values, begin, sharing, 0, low, high, query,
            largest, total, result, scale * 1.4426950408889634, size, block, 0, precision,
        )  # fmt: skip
        cell = ((slot * key_heads + head) * all_splits + part) * shared + member
        whole = tl.arange(0, size)
        tl.store(parts + cell[:, None] * size + whole, result, mask=real[:, None])
        tl.store(sums + cell * 2, largest, mask=real)
        tl.store(sums + cell * 2 + 1, total, mask=real)
        if role == 0:
            tl.debug_barrier()
            flag = arrived + slot * key_heads + head
            tl.atomic_add(flag, 1, mask=real & (member == 0), sem="release")


@triton.jit
def _add_part(parts, sums, cell, real, largest, total, result, size: tl.constexpr):
    """Add a part at rows `cell` to a running softmax."""
    whole = tl.arange(0, size)
    # Another multiprocessor may have written the part, so this one's L1 cache is bypassed.
    other = tl.load(sums + cell * 2, mask=real, other=0.0, cache_modifier=".cg")
    weight = tl.load(sums + cell * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
    at = parts + cell[:, None] * size + whole
    new = tl.load(at, mask=real[:, None], other=0.0, cache_modifier=".cg")
    larger = tl.maximum(largest, other)
    mine, theirs = tl.exp2(largest - larger), tl.exp2(other - larger)
    total = total * mine + weight * theirs
    return larger, total, result * mine[:, None] + new * theirs[:, None]


@triton.jit
def _decode_attention(
    heads, cosine, sine, query_gain, key_gain,
    prompt_keys, prompt_values, prompt_row, prompt_length, keys, values, pages, place, active,
    sharing, shares, arrived, parts, sums, attended,
    scale, eps, prompt_capacity, slot_pages, slots, prompt_programs, first_program,
    key_heads: tl.constexpr, shared: tl.constexpr, size: tl.constexpr, rows: tl.constexpr,
    together: tl.constexpr, prompt_rows: tl.constexpr, row_width: tl.constexpr,
    page: tl.constexpr, block: tl.constexpr, unit: tl.constexpr, splits: tl.constexpr,
    prompt_splits: tl.constexpr,
    norms: tl.constexpr, role: tl.constexpr, overlap: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    all_splits: tl.constexpr = prompt_splits + splits - 1
    program = tl.program_id(0) + first_program
    is_prompt = program < prompt_programs
    if role == 1:
        is_prompt = True
    if role == 2:
        is_prompt = False
    if is_prompt:
        if overlap:
            gdc_launch_dependents()
        # `sharing` is a list of rows of `together` slots.
        items = tl.load(shares) * (row_width // together * key_heads * prompt_splits)
        for item in range(program, items, prompt_programs):
            _prompt_part(
                item, heads, cosine, sine, query_gain, prompt_keys, prompt_values, prompt_row,
                prompt_length, place, active, sharing, arrived, parts, sums, scale, eps,
                prompt_capacity, key_heads, shared, size, prompt_rows, together, unit, block,
                prompt_splits, all_splits, norms, role, precision,
            )  # fmt: skip
    else:
        item = program - prompt_programs
        # A slot's part 0 is computed by its last program, which waits for the other parts.
        part = splits - 1 - item // (slots * key_heads)
        slot = (item // key_heads % slots).to(tl.int64)
        head = item % key_heads
        whole = tl.arange(0, size)
        member = tl.arange(0, rows)
        real = member < shared
        query_head = slot * key_heads * shared + head * shared + member
        out = attended + query_head[:, None] * size + whole
        goes_on = tl.load(active + slot)
        at = tl.load(place + slot)
        before = tl.load(prompt_length + slot)
        per = _part_size(at, splits, block)
        low = part * per
        high = tl.minimum(low + per, at)
        if goes_on == 0:
            if part == 0:  # replaces the old values
                tl.store(out, tl.zeros((rows, size), tl.float32), mask=real[:, None])
        elif (part == 0) | (high > low):
            kind = keys.dtype.element_ty
            width: tl.constexpr = (key_heads * shared + 2 * key_heads) * size
            line = heads + slot * width
            query = _rotated(
                line + ((head * shared + member) * size)[:, None], real[:, None], before + at,
                cosine, sine, query_gain, eps, size, norms,
            ).to(kind)  # fmt: skip
            one = tl.arange(0, 1)[:, None]
            # Rounded once, to the type of the cache and of the products.
            key = _rotated(
                line + (key_heads * shared + head) * size + one, one == 0, before + at,
                cosine, sine, key_gain, eps, size, norms,
            ).to(kind)  # fmt: skip
            value_at = line + (key_heads * shared + key_heads + head) * size
            value = tl.load(value_at + one + whole)
            # The new position comes first, from registers: the kernel never reads what it stored.
            log2 = scale * 1.4426950408889634
            score = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1) * log2
            largest = tl.where(part == 0, score, float("-inf"))
            total = tl.where(part == 0, tl.full((rows,), 1.0, tl.float32), 0.0)
            result = tl.zeros((rows, size), tl.float32)
            result += tl.where(part == 0, value.to(tl.float32), 0.0)
            slot_line = pages + slot * slot_pages
            largest, total, result = _attend(
                keys, values, head * page, slot_line, key_heads * page, low, high, query,
                largest, total, result, log2, size, block, page, precision,
            )  # fmt: skip
            cell = (slot * key_heads + head) * all_splits * shared + member
            flag = arrived + slot * key_heads + head
            if part == 0:
                new_row = tl.load(slot_line + at // page).to(tl.int64) * key_heads * page
                new_row += head * page + at % page
                tl.store(keys + new_row * size + one + whole, key)
                tl.store(values + new_row * size + one + whole, value)
                prompt_parts = tl.cdiv(before, _part_size(before, prompt_splits, unit))
                own_parts = tl.maximum(tl.cdiv(at, per), 1)
                expected = own_parts - 1
                if role == 0:
                    expected += prompt_parts
                if (role == 0) | (splits > 1):
                    while tl.atomic_add(flag, 0, sem="acquire") < expected:
                        pass
                    tl.debug_barrier()
                    tl.atomic_xchg(flag, 0)
                if overlap:
                    gdc_wait()
                for number in range(0, prompt_parts):
                    largest, total, result = _add_part(
                        parts, sums, cell + number * shared, real, largest, total, result, size
                    )
                for number in range(1, own_parts):
                    largest, total, result = _add_part(
                        parts, sums, cell + (prompt_splits + number - 1) * shared, real,
                        largest, total, result, size,
                    )  # fmt: skip
                tl.store(out, result / total[:, None], mask=real[:, None])
            else:
                cell += (prompt_splits + part - 1) * shared
                tl.store(parts + cell[:, None] * size + whole, result, mask=real[:, None])
                tl.store(sums + cell * 2, largest, mask=real)
                tl.store(sums + cell * 2 + 1, total, mask=real)
                tl.debug_barrier()
                tl.atomic_add(flag, 1, sem="release")


def tile_sizes(programs: int, head: int, kind: torch.dtype) -> Tiling:
    """Return how the work is divided."""
    return Tiling(64, 4, 3)


def launches(
    heads: torch.Tensor,
    cache: LayerCache,
    *,
    rope: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    tiling: Tiling | None = None,
) -> tuple[torch.Tensor, list[tuple[tuple[int], tuple[Any, ...], dict[str, Any]]]]:
    slots, (_, key_heads, page, size) = len(heads), cache.keys.shape
    shared = heads.shape[1] // size // key_heads - 2
    kind = cache.keys.dtype
    tiling = tiling or tile_sizes(slots * key_heads, size, kind)
    exact = kind == torch.float32
    most = LEAST_ROWS if exact else tiling.rows
    together = min(TOGETHER, max(1, 1 << (max(1, most // shared).bit_length() - 1)))
    attended = heads.new_empty(slots, key_heads * shared * size)
    parts = slots * key_heads * (tiling.prompt_splits + tiling.splits - 1) * shared
    workspace = heads.new_empty(parts * (size + 2), dtype=torch.float32)
    query_gain, key_gain, eps = (heads, heads, 0.0) if norms is None else norms
    prompt_programs = -(-slots // together) * key_heads * tiling.prompt_splits
    known = {
        "key_heads": key_heads, "shared": shared, "size": size, "together": together,
        "rows": max(LEAST_ROWS, triton.next_power_of_2(shared)),
        "prompt_rows": max(LEAST_ROWS, triton.next_power_of_2(shared * together)),
        "row_width": TOGETHER, "page": page, "block": min(tiling.block, page),
        "unit": min(128, page), "splits": tiling.splits, "prompt_splits": tiling.prompt_splits,
        "norms": norms is not None,
        "precision": "ieee" if exact else "tf32",
        "num_warps": tiling.warps, "num_stages": tiling.stages,
    }  # fmt: skip
    arguments = (
        heads, *rope, query_gain, key_gain, *cache, workspace, workspace[parts * size :], attended,
        scale, eps, cache.prompt_keys.shape[2], cache.pages.shape[1], slots, prompt_programs,
    )  # fmt: skip
    finals = slots * key_heads * tiling.splits
    if tiling.launches == 1:
        once = known | {"role": 0, "overlap": False}
        return attended, [((prompt_programs + finals,), (*arguments, 0), once)]
    pdl = tiling.launches == 3
    first = known | {"role": 1, "overlap": pdl, "num_warps": tiling.prompt_warps or tiling.warps}
    first["block"] = min(tiling.prompt_block or tiling.block, page)
    second = known | {"role": 2, "overlap": pdl, "launch_pdl": pdl}
    return attended, [
        ((prompt_programs,), (*arguments, 0), first),
        ((finals,), (*arguments, prompt_programs), second),
    ]


def decode_attention(
    heads: torch.Tensor,
    cache: LayerCache,
    *,
    rope: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Apply RoPE, write the cache and attend for one new token per slot; return [W, H * D].

    `heads` [W, (H + 2 K) * D] are queries, keys and values from the QKV product. `rope` contains
    cosine and sine [positions, D / 2].
    """
    attended, calls = launches(heads, cache, rope=rope, scale=scale, norms=norms, tiling=tiling)
    for grid, arguments, known in calls:
        _decode_attention[grid](*arguments, **known)
    return attended
