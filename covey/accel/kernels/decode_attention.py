"""Decode attention of Llama-like models, fused with RoPE and the write to the KV cache.

When each sequence decodes one token, matrix products are small, and the operations between them
take most of the time. One kernel therefore computes everything between the QKV projection and the
output projection.

A matrix product on tensor cores has at least 16 rows. A Triton program fills the 16 rows of a
product with the query heads of several sequences that share a prompt. The program reads the
prompt's keys and values only once for all sequences that share the prompt. After the prompt, the
program reads the sequences' completions one after another. While the program reads one completion,
it masks the rows of all other sequences. If there are few sequences with long completions, each
sequence is split into parts. One Triton program processes each part. The program of part 0 combines
the results of all parts. The result of a sequence never depends on the other sequences in the
batch.

A slot is the place of one sequence in the batch. The dimensions in tensor shapes are W (slots in
use), S (all slots), P (prompts), H (heads), K (key-value heads), C (positions per page), B (pages),
T (pages per slot) and D (head size).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from covey.accel.kernels.launch import starts_early
from covey.accel.kernels.running_softmax import merge_parts, online_softmax

LEAST_ROWS = 16
"""Minimum number of rows of a matrix product on tensor cores. If the query heads that share a key
head fill fewer than `LEAST_ROWS` rows, the kernel adds padding rows."""
LEAST = tl.constexpr(-1e30)
"""Initial value of a running maximum; it is finite, so that differences of maxima are never NaN."""
FEW_PROGRAMS = 512
WIDE, NARROW, EXACT = (128, 4, 2), (32, 2, 2), (16, 4, 2)
"""Settings of a Triton program: positions per iteration, number of warps, number of stages. Large
tiles (`WIDE`) are faster if few programs run, because each program then has many loads in flight.
Small tiles (`NARROW`) are faster if many programs run. `EXACT` is for float32: the compiler unrolls
float32 products, so larger tiles would take four seconds to compile."""
HOPPER = {4096: (16, 1, 4), 2048: (32, 2, 3), 0: (64, 4, 3)}
"""Maps a minimum number of Triton programs (at head size 64) to the fastest tile settings on an
H200."""
STAGE_BYTES, HOPPER_BYTES = 64 * 2**10, 192 * 2**10
"""Maximum number of bytes of keys and values that a Triton program loads at the same time.
`STAGE_BYTES` limits the bytes of one pipeline stage. On Hopper and later GPUs, `HOPPER_BYTES`
limits the bytes of all pipeline stages together. Large heads are read in smaller tiles, because
larger tiles would not fit in a multiprocessor's shared memory."""
SHARING_PROGRAMS = 512
"""If the number of sequences times the number of key heads is at least `SHARING_PROGRAMS`, one
Triton program handles several sequences."""
SPLIT_PROGRAMS = 256
SPLIT_POSITIONS = 512
"""With fewer than `SPLIT_PROGRAMS` Triton programs, completions are split into parts of at least
`SPLIT_POSITIONS` positions."""
SMALLEST_HEAD = 32
"""The smallest head size for which the engine uses this kernel with 16-bit dtypes. Tensor cores
would support a head size of 16. With a head size of 16 in bfloat16, the log-probs of engine and
trainer differed by 3.6 nats on an H200, although the kernel is correct in Triton's interpreter.
With head sizes of 64 and 128, the log-probs of engine and trainer differ only by rounding."""


KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""The dtypes in which the kernel multiplies queries, keys and values."""


class LayerCache(NamedTuple):
    """KV cache of one layer, and tables that locate the keys and values of each sequence."""

    prompt_keys: torch.Tensor
    """[P, K, C', D]: keys of prompts, of up to C' positions each."""
    prompt_values: torch.Tensor
    """[P, K, C', D]: values of prompts, of up to C' positions each."""
    prompt_row: torch.Tensor
    """[S] int64: the index of each sequence's prompt in `prompt_keys`."""
    prompt_length: torch.Tensor
    """[S] int64: the length of each sequence's prompt."""
    keys: torch.Tensor
    """[B, K, C, D]: keys of completions, in pages of C positions; written by the kernel."""
    values: torch.Tensor
    """[B, K, C, D]: values of completions, in pages of C positions; written by the kernel."""
    pages: torch.Tensor
    """[S, T] int32: the pages that contain each sequence's completion, in order of positions."""
    place: torch.Tensor
    """[S] int64: the position in a completion at which the new key and value are written."""
    active: torch.Tensor
    """[S] bool: whether a sequence is unfinished; the kernel skips finished sequences."""
    sharing: torch.Tensor
    """[S, G] int32: each row lists up to G slots whose sequences have the same prompt, and is
    padded with -1. Every slot occurs in exactly one row, and rows without slots come last."""
    arrived: torch.Tensor
    """[S, K] int32: how many parts of a sequence are finished; zero between kernel runs."""
    units: torch.Tensor
    """[2, K] float32: the scales of float8 keys and values."""


class Tiling(NamedTuple):
    """Settings that divide the kernel's work into Triton programs."""

    block: int
    """Positions per iteration."""
    warps: int
    stages: int
    together: bool = False
    """Whether one Triton program processes several sequences that share a prompt."""
    splits: int = 1
    """Number of parts into which the positions of a sequence are divided."""
    early: bool = False
    """Whether this kernel starts while the previous kernel, which computes `heads`, still runs."""


@triton.jit
def _rotated(
    line, real, cos, sin, gain, eps, kind: tl.constexpr, size: tl.constexpr, norms: tl.constexpr
):
    """Load heads [rows, D] from the addresses `line`, normalize them and apply RoPE.

    Return the first and the second half of each head as separate tensors. The heads are rounded
    only once, to the dtype in which the kernel multiplies matrices.
    """
    half = tl.arange(0, size // 2)
    first = tl.load(line + half, mask=real, other=0.0).to(tl.float32)
    second = tl.load(line + size // 2 + half, mask=real, other=0.0).to(tl.float32)
    if norms:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = 1.0 / tl.sqrt(square / size + eps)[:, None]
        first = first * scale * tl.load(gain + half).to(tl.float32)
        second = second * scale * tl.load(gain + size // 2 + half).to(tl.float32)
    return (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)


@triton.jit
def _part_size(length, splits: tl.constexpr, block: tl.constexpr):
    """Return the size of each part if `length` positions are split into `splits` parts."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, splits), block), 1) * block


@triton.jit
def _picked(values, index, chosen):
    """Return the element of the vector `values` at position `chosen`."""
    return tl.sum(tl.where(index == chosen, values, 0), axis=0)


@triton.jit
def _new_position(
    token, real, writes, q1, q2, cos, sin, key_gain, keys, values, new, head, eps, log2,
    key_unit, value_unit,
    key_heads: tl.constexpr, shared: tl.constexpr, size: tl.constexpr, norms: tl.constexpr,
    rounds: tl.constexpr,
):  # fmt: skip
    """Store the new key and value; return the new score and value, the first terms of the softmax.

    The new key and value stay in registers, because the kernel never reads back what it has stored.
    """
    half, whole = tl.arange(0, size // 2), tl.arange(0, size)
    k1, k2 = _rotated(
        token + (key_heads * shared + head) * size, real, cos, sin, key_gain, eps,
        q1.dtype, size, norms,
    )  # fmt: skip
    value = tl.load(
        token + (key_heads * shared + key_heads + head) * size + whole, mask=real, other=0.0
    )
    kind: tl.constexpr = keys.dtype.element_ty
    tl.store(keys + new + half, as_stored(k1, key_unit, kind, rounds), mask=writes)
    second = keys + new + size // 2 + half
    tl.store(second, as_stored(k2, key_unit, kind, rounds), mask=writes)
    tl.store(values + new + whole, as_stored(value, value_unit, kind, rounds), mask=writes)
    score = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), axis=1)
    score += tl.sum(q2.to(tl.float32) * k2.to(tl.float32), axis=1)
    return score * log2, value.to(tl.float32)


@triton.jit
def _decode_attention(
    heads, cosine, sine, query_gain, key_gain,
    prompt_keys, prompt_values, prompt_row, prompt_length, keys, values, pages, place, active,
    sharing, arrived, units, parts, attended,
    scale, eps, prompt_capacity, slot_pages, slots, programs,
    key_heads: tl.constexpr, shared: tl.constexpr, size: tl.constexpr, rows: tl.constexpr,
    together: tl.constexpr, sequences: tl.constexpr, page: tl.constexpr, block: tl.constexpr,
    splits: tl.constexpr, norms: tl.constexpr, rounds: tl.constexpr, kind: tl.constexpr,
    early: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
    # Part 0 waits for the other parts, so its programs are the last to start.
    part = splits - 1 - tl.program_id(0) // programs
    item = tl.program_id(0) % programs
    head = item % key_heads
    line = item // key_heads
    row = tl.arange(0, rows)
    which = row // shared
    member = row % shared
    # Sequence 0 is the prompt; sequence 1 + n is the completion of the program's slot n.
    index = tl.arange(0, sequences)
    asked = (index > 0) & (index <= together)
    if together == 1:
        first = line.to(tl.int64)
        slot = tl.full((rows,), line, tl.int64)
        owner = tl.full((sequences,), line, tl.int64)
    else:
        list_at = sharing + line * together
        first = tl.load(list_at).to(tl.int64)
        slot = tl.load(list_at + which, mask=which < together, other=-1).to(tl.int64)
        owner = tl.load(list_at + index - 1, mask=asked, other=-1).to(tl.int64)
    known = (which < together) & (slot >= 0) & (slot < slots)
    asked = asked & (owner >= 0) & (owner < slots)
    if (first >= 0) & (first < slots):
        goes_on = known & (tl.load(active + slot, mask=known, other=0) != 0)
        asked = asked & (tl.load(active + owner, mask=asked, other=0) != 0)
        at = tl.load(place + slot, mask=goes_on, other=0)
        length = tl.load(place + owner, mask=asked, other=0).to(tl.int32)
        before = tl.load(prompt_length + first)
        prompt = (tl.load(prompt_row + first) * key_heads + head) * prompt_capacity
        alive = tl.max(goes_on.to(tl.int32), axis=0)  # 0: the prompt need not be read
        length = tl.where(index == 0, before.to(tl.int32) * alive, length)
        per = _part_size(length, splits, block)
        low = part * per
        tiles = tl.cdiv(tl.maximum(tl.minimum(low + per, length) - low, 0), block)
        ends = tl.cumsum(tiles, axis=0)
        count = tl.max(tl.cdiv(length, per), axis=0)
        if (part == 0) | (part < count):
            width: tl.constexpr = (key_heads * shared + 2 * key_heads) * size
            key_unit, value_unit = units_of(units, head, key_heads, rounds)
            log2 = scale * 1.4426950408889634
            real = goes_on[:, None]
            half, whole = tl.arange(0, size // 2), tl.arange(0, size)
            angle = (before + at)[:, None] * (size // 2) + half
            cos = tl.load(cosine + angle, mask=real, other=0.0).to(tl.float32)
            sin = tl.load(sine + angle, mask=real, other=0.0).to(tl.float32)
            number = tl.load(pages + slot * slot_pages + at // page, mask=goes_on, other=0)
            if early:
                gdc_wait()
            token = heads + (slot * width)[:, None]
            q1, q2 = _rotated(
                token + ((head * shared + member) * size)[:, None], real, cos, sin, query_gain, eps,
                kind, size, norms,
            )  # fmt: skip
            query = tl.reshape(tl.permute(tl.join(q1, q2), (0, 2, 1)), (rows, size))
            largest = tl.full((rows,), LEAST, tl.float32)
            total = tl.zeros((rows,), tl.float32)
            result = tl.zeros((rows, size), tl.float32)
            if part == 0:
                new = ((number.to(tl.int64) * key_heads + head) * page + at % page)[:, None] * size
                writes = (goes_on & (member == 0))[:, None]
                largest, result = _new_position(
                    token, real, writes, q1, q2, cos, sin, key_gain, keys, values, new, head, eps,
                    log2, key_unit, value_unit, key_heads, shared, size, norms, rounds,
                )  # fmt: skip
                total = tl.full((rows,), 1.0, tl.float32)
            # The sums below are in the units of keys and values.
            log2 *= key_unit
            result /= value_unit
            # One loop over the tiles of all sequences keeps loads in flight between sequences. The
            # address of a tile is computed one iteration ahead, because its page must be looked up.
            sequence = tl.sum((ends <= 0).to(tl.int32), axis=0)
            start = _picked(low, index, sequence)
            at_page = pages + _picked(owner, index, sequence) * slot_pages + start // page
            page_row = tl.load(at_page, mask=sequence > 0, other=0).to(tl.int64)
            cell = tl.arange(0, block)[:, None] * size + whole
            for tile in range(_picked(ends, index, sequences - 1)):
                high = tl.minimum(
                    _picked(low + per, index, sequence), _picked(length, index, sequence)
                )
                seen = start + tl.arange(0, block) < high
                mine = goes_on & ((sequence == 0) | (which == sequence - 1))
                begin = (page_row * key_heads + head) * page + start % page
                begin = tl.where(sequence == 0, prompt + start, begin) * size
                key_at = tl.where(sequence == 0, prompt_keys, keys) + begin
                value_at = tl.where(sequence == 0, prompt_values, values) + begin
                sequence = tl.sum((ends <= tile + 1).to(tl.int32), axis=0)
                begun = _picked(ends - tiles, index, sequence)
                start = _picked(low, index, sequence) + (tile + 1 - begun) * block
                at_page = pages + _picked(owner, index, sequence) * slot_pages + start // page
                more = (sequence > 0) & (sequence < sequences)
                page_row = tl.load(at_page, mask=more, other=0).to(tl.int64)
                key = tl.load(key_at + cell, mask=seen[:, None], other=0.0)
                value = tl.load(value_at + cell, mask=seen[:, None], other=0.0)
                key, value = key.to(kind), value.to(kind)
                score = tl.dot(query, tl.trans(key), input_precision=precision)
                score = tl.where(mine[:, None] & seen[None, :], score * log2, float("-inf"))
                largest, total, result = online_softmax(
                    score, value, largest, total, result, precision
                )
            result *= value_unit
            if splits > 1:
                flag = arrived + first * key_heads + head
                own = parts + (first * key_heads + head) * splits * (rows * (size + 2))
                largest, total, result = merge_parts(
                    own, flag, part, count, largest, total, result, rows, size
                )
            if part == 0:
                # Slots that have ended get zeros, which replace the old values.
                out = ((slot * key_heads + head) * shared + member)[:, None] * size + whole
                tl.store(attended + out, result / total[:, None], mask=known[:, None])


def tile_sizes(programs: int, head: int, kind: torch.dtype) -> tuple[int, int, int]:
    """Return a Triton program's positions per iteration, number of warps and number of stages."""
    block, warps, stages = WIDE if programs < FEW_PROGRAMS else NARROW
    if kind == torch.float32:
        block, warps, stages = EXACT
    return min(block, STAGE_BYTES // (2 * head * kind.itemsize)), warps, stages


def tiling_for(slots: int, cache: LayerCache, *, hopper: bool | None = None) -> Tiling:
    """Return the fastest tiling, which depends only on tensor shapes and the device.

    `hopper` says whether the GPU is a Hopper or later; if it is None, the device of `cache`
    decides.
    """
    _, key_heads, page, head = cache.keys.shape
    hopper = starts_early(cache.keys.device) if hopper is None else hopper
    programs, capacity = slots * key_heads, page * cache.pages.shape[1]
    splits = max(1, min(16, SPLIT_PROGRAMS // programs, capacity // SPLIT_POSITIONS))
    tile = tile_sizes(programs, head, cache.keys.dtype)
    if hopper and cache.keys.dtype != torch.float32:
        work = programs * head // 64
        block, warps, stages = next(tile for least, tile in HOPPER.items() if work >= least)
        block = min(block, HOPPER_BYTES // (2 * stages * head * cache.keys.itemsize))
        tile = block, warps, stages
    return Tiling(*tile, together=programs >= SHARING_PROGRAMS, splits=splits, early=hopper)


def launch(
    heads: torch.Tensor,
    cache: LayerCache,
    *,
    rope: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    tiling: Tiling,
) -> tuple[torch.Tensor, int, tuple[Any, ...], dict[str, Any]]:
    """Return the output tensor, the number of Triton programs, and the arguments of the kernel."""
    slots, (_, key_heads, page, size) = len(heads), cache.keys.shape
    shared = heads.shape[1] // size // key_heads - 2
    together = cache.sharing.shape[1] if tiling.together else 1
    rows = max(LEAST_ROWS, triton.next_power_of_2(shared * together))
    attended = heads.new_empty(slots, key_heads * shared * size)
    parts = slots * key_heads * tiling.splits * rows * (size + 2) if tiling.splits > 1 else 1
    workspace = heads.new_empty(parts, dtype=torch.float32)
    query_gain, key_gain, eps = (heads, heads, 0.0) if norms is None else norms
    rounds = cache.keys.dtype == torch.float8_e4m3fn
    programs = slots * key_heads
    arguments = (
        heads, *rope, query_gain, key_gain, *cache, workspace, attended,
        scale, eps, cache.prompt_keys.shape[2], cache.pages.shape[1], slots, programs,
    )  # fmt: skip
    known = {
        "key_heads": key_heads, "shared": shared, "size": size, "rows": rows,
        "together": together, "sequences": triton.next_power_of_2(together + 1), "page": page,
        "block": min(tiling.block, page), "splits": tiling.splits, "norms": norms is not None,
        "rounds": rounds, "kind": KINDS[heads.dtype if rounds else cache.keys.dtype],
        "early": tiling.early,
        "precision": "ieee" if cache.keys.dtype == torch.float32 else "tf32",
        "num_warps": tiling.warps, "num_stages": tiling.stages,
        **({"launch_pdl": True} if tiling.early else {}),
    }  # fmt: skip
    return attended, programs * tiling.splits, arguments, known


def decode_attention(
    heads: torch.Tensor,
    cache: LayerCache,
    *,
    rope: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Apply RoPE, write the KV cache and compute attention for one new token per sequence.

    `heads` [W, (H + 2 K) * D] are queries, keys and values from the QKV product, and `rope` is
    cosine and sine [positions, D / 2]. The attention output is [W, H * D].
    """
    tiling = tiling_for(len(heads), cache) if tiling is None else tiling
    attended, programs, arguments, known = launch(
        heads, cache, rope=rope, scale=scale, norms=norms, tiling=tiling
    )
    _decode_attention[(programs,)](*arguments, **known)
    return attended


# Keys and values that are stored as float8 numbers, with one scale (unit) per head.


@triton.jit
def as_stored(numbers, unit, kind: tl.constexpr, rounds: tl.constexpr):
    """Convert keys or values to the cache dtype; for float8, divide them by `unit` first."""
    if not rounds:
        return numbers
    return tl.clamp(numbers.to(tl.float32) / unit, -448.0, 448.0).to(kind)


@triton.jit
def units_of(units, head, key_heads: tl.constexpr, rounds: tl.constexpr):
    """Return the scales of a head's keys and values; both are 1 if the cache is not float8."""
    if not rounds:
        return 1.0, 1.0
    return tl.load(units + head), tl.load(units + key_heads + head)
