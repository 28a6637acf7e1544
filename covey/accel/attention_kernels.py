"""Attention kernels for packed rows: torch's flash attention, cuDNN, and Triton.

Attention is causal. The causal mask is aligned at the end of a row, so the last query of a row sees
all keys of the row. Flash attention and the Triton kernels
(kernels/packed_attention.py) process all rows in one call and support rows with fewer queries than
keys. The Triton kernels are optimized for short rows.

cuDNN aligns the causal mask at the start of a row, so that query i sees keys 0 to i. cuDNN
therefore needs the prompt's queries in every row. If a prompt's queries belong to another row, the
queries are copied from that row. The outputs for copied queries are discarded, and the gradients of
these outputs are zero. One cuDNN call processes all rows of similar length. cuDNN's operator for
rows of different lengths is not used, because it reads invalid addresses in torch 2.11.

The functions `chosen` and `measured` measure the kernels on the device and choose the fastest
kernel.

This module calls torch's internal operators, because the public function for variable-length
attention changes its arguments between versions of torch, and returns no log-sum-exp.

The dimensions in tensor shapes are N (packed tokens), R (key positions), H (heads), K (key-value
heads) and D (head size).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from covey.accel.sizes import LONG

# Index tables that tell variable-length attention which packed tokens form each row.
#
# Every packed token has exactly one query, which belongs to one row. The queries of a shared prompt
# belong to the first row with this prompt. A row has keys for all of its tokens, so the keys of a
# shared prompt appear in several rows. Attention is causal, with the causal mask aligned at the end
# of a row. The last query of a row sees all keys of the row, and the second-to-last query sees all
# keys except the last.


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values of an attention call, or their gradients."""
HALF = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels of variable-length attention support."""


class KeyIndex(NamedTuple):
    """Indices that map packed tokens to key positions, so that rows can share a prompt."""

    tokens: torch.Tensor
    """[R] int32: the index of the packed token at each key position."""
    starts: torch.Tensor
    """[rows] int32: the first key position of each row; rows that share a prompt are adjacent."""
    begin: torch.Tensor
    """[N] int32: the index in `starts` of the first row that contains the token."""
    end: torch.Tensor
    """[N] int32: the index in `starts` of the last row that contains the token, plus one."""
    position: torch.Tensor
    """[N] int32: a token's offset from its row's start."""

    def first(self) -> torch.Tensor:
        """Return [N] int64: each token's key position in the first row that contains the token."""
        return (self.starts[self.begin.long()] + self.position).long()


class Bounds(NamedTuple):
    """Offsets of each row's queries and keys, on the CPU."""

    query: tuple[int, ...]
    key: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenRows:
    """Offsets of each row's queries and keys (cu_seqlens), and indices for keys that rows share."""

    query_starts: torch.Tensor
    """[rows + 1] int32: where each row's queries begin, and where the last row's queries end."""
    key_starts: torch.Tensor
    """[rows + 1] int32: where each row's keys begin, and where the last row's keys end."""
    longest_query: int
    longest_key: int
    shared: KeyIndex | None = None
    """Indices for copying the keys of shared prompts; None if no rows share a prompt."""
    bounds: Bounds | None = None
    """A CPU copy of `query_starts` and `key_starts`; None if there is no copy, for example in a
    CUDA graph, whose replays have other offsets."""

    def gathered(self, packed: torch.Tensor) -> torch.Tensor:
        """Expand keys or values of packed tokens [N, K, D] to all key positions [R, K, D]."""
        return packed if self.shared is None else packed.index_select(0, self.shared.tokens)


STEP = 256
"""For cuDNN, rows are padded to a multiple of STEP tokens, because cuDNN needs setup time for every
new row length."""

Found = tuple[torch.Tensor, ...]
"""The output of attention, and further tensors that the backward pass needs."""
Kept = list[Found]
"""A list that stores a checkpointed layer's attention result until the layer is recomputed."""


class Inputs(NamedTuple):
    """Row bounds, softmax scale and window length of an attention call."""

    spans: VarlenRows
    scale: float | None
    window: int | None = None


class Kernel(NamedTuple):
    """The forward function and the backward function of one attention kernel."""

    forward: Callable[[QKV, Inputs], Found]
    backward: Callable[[torch.Tensor, QKV, Found, Inputs], QKV]
    """Function that computes the gradients of queries, keys and values. Its arguments are the
    output gradient, the tuple (queries, keys, values), the result of `forward`, and `Inputs`."""
    captured: bool
    """Whether a CUDA graph with this kernel can be replayed with rows whose lengths differ from the
    lengths at capture."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel: Kernel,
        inputs: Inputs,
        kept: Kept | None,
    ) -> torch.Tensor:
        if kept:
            found = kept.pop()
        else:
            found = kernel.forward((query, key, value), inputs)
            if kept is not None:
                kept.append((found[0].detach(), *found[1:]))
        ctx.save_for_backward(query, key, value, *found)
        ctx.kernel, ctx.inputs = kernel, inputs
        return found[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *found = ctx.saved_tensors
        tensors = query, key, value
        back = ctx.kernel.backward(grads[0].contiguous(), tensors, tuple(found), ctx.inputs)
        return *back, None, None, None


def attend(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inputs: Inputs,
    kept: Kept | None = None,
) -> torch.Tensor:
    """Return the output [N, H, D] of attention for queries [N, H, D], keys and values [R, K, D].

    If `kept` is an empty list, the output is also stored in the list. If `kept` contains the output
    of an earlier call, that output is removed from the list and returned.
    """
    attended: torch.Tensor = _Attention.apply(query, key, value, kernel, inputs, kept)
    return attended


def _flash_limits(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    spans, window = inputs.spans, inputs.window
    limits = (spans.query_starts, spans.key_starts, spans.longest_query, spans.longest_key)
    options: dict[str, Any] = {"scale": inputs.scale}
    if window is not None:
        options |= {"window_size_left": window - 1, "window_size_right": 0}
    return limits, options


def _flash_forward(tensors: QKV, inputs: Inputs) -> Found:
    limits, options = _flash_limits(inputs)
    found: Found = torch.ops.aten._flash_attention_forward(
        *tensors, *limits, 0.0, True, False, **options
    )
    return found[:4]


def _flash_backward(grad: torch.Tensor, tensors: QKV, found: Found, inputs: Inputs) -> QKV:
    limits, options = _flash_limits(inputs)
    attended, total, seed, unused = found
    back: QKV = torch.ops.aten._flash_attention_backward(
        grad, *tensors, attended, total, *limits, 0.0, True, seed, unused, **options
    )
    return back


def _triton_scale(query: torch.Tensor, inputs: Inputs) -> float:
    from covey.accel.kernels.packed_attention import SIZES  # needs Triton

    size = query.shape[2]
    if inputs.window is not None or size not in SIZES:
        raise NotImplementedError("Triton's attention needs a usual head size, without a window")
    return size**-0.5 if inputs.scale is None else inputs.scale


def _triton_forward(tensors: QKV, inputs: Inputs) -> Found:
    from covey.accel.kernels.packed_attention import attention_forward

    return attention_forward(*tensors, inputs.spans, _triton_scale(tensors[0], inputs))


def _triton_backward(grad: torch.Tensor, tensors: QKV, found: Found, inputs: Inputs) -> QKV:
    from covey.accel.kernels.packed_attention import attention_backward

    attended, norm = found
    scale = _triton_scale(tensors[0], inputs)
    return attention_backward(grad, tensors, attended, norm, inputs.spans, scale)


class _Row(NamedTuple):
    """A row of packed tokens: the slice of its queries, and the slice of its key positions."""

    query: slice
    key: slice
    length: int
    """Number of keys."""
    missing: int
    """Number of tokens at the start of this row for which the row has no queries."""
    padded: int
    """Length of the row after padding for cuDNN."""


def _batches(inputs: Inputs) -> list[list[_Row]]:
    """Group the rows by padded length; one cuDNN call processes each group."""
    bounds = inputs.spans.bounds
    if inputs.window is not None or bounds is None:
        raise NotImplementedError("cuDNN needs rows whose bounds are known, without a window")
    found: dict[int, list[_Row]] = {}
    for query, key in zip(pairwise(bounds.query), pairwise(bounds.key), strict=True):
        length = key[1] - key[0]
        missing, padded = length - (query[1] - query[0]), -(-length // STEP) * STEP
        row = _Row(slice(*query), slice(*key), length, missing, padded)
        found.setdefault(padded, []).append(row)
    return list(found.values())


def _key_rows(values: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
    """Return keys or values [R, K, D] as padded rows [rows, K, S, D]."""
    (first, *others), size = rows, rows[0].padded
    if not others and first.length == size:
        return values[first.key].transpose(0, 1)[None]
    padded = values.new_empty(len(rows), size, *values.shape[1:])
    for target, row in zip(padded, rows, strict=True):
        target[: row.length] = values[row.key]
        target[row.length :] = 0.0  # finite; no query of the row sees these keys
    return padded.transpose(1, 2)


def _query_rows(
    values: torch.Tensor, rows: list[_Row], tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy queries, or tensors of the same shape [N, H, D], into padded rows [rows, H, S, D].

    `tokens` gives the index of the packed token at each key position. Queries that belong to
    another row are copied from that row if `tokens` is given, and are zero otherwise.
    """
    if not any(row.missing for row in rows):
        return _key_rows(values, [row._replace(key=row.query) for row in rows])
    padded = values.new_zeros(len(rows), rows[0].padded, *values.shape[1:])
    for target, row in zip(padded, rows, strict=True):
        target[row.missing : row.length] = values[row.query]
        if row.missing and tokens is not None:
            shared = tokens[row.key][: row.missing]
            target[: row.missing] = values.index_select(0, shared)
    return padded.transpose(1, 2)


def _cudnn_forward(tensors: QKV, inputs: Inputs) -> Found:
    query, key, value = tensors
    shared = inputs.spans.shared
    attended = torch.empty_like(query)
    beside: list[torch.Tensor] = []
    for rows in _batches(inputs):
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            _query_rows(query, rows, None if shared is None else shared.tokens),
            _key_rows(key, rows), _key_rows(value, rows),
            None, True, 0.0, True, False, scale=inputs.scale,
        )  # fmt: skip
        _write_queries(attended, found[0], rows)
        beside += [found[1], found[6], found[7]]
    return attended, *beside


def _cudnn_backward(grad: torch.Tensor, tensors: QKV, found: Found, inputs: Inputs) -> QKV:
    query, key, value = tensors
    attended, *beside = found
    shared = inputs.spans.shared
    query_grad, key_grad, value_grad = (torch.empty_like(tensor) for tensor in tensors)
    for number, rows in enumerate(_batches(inputs)):
        total, seed, offset = beside[3 * number : 3 * number + 3]
        size = rows[0].padded
        back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            _query_rows(grad, rows),
            _query_rows(query, rows, None if shared is None else shared.tokens),
            _key_rows(key, rows), _key_rows(value, rows), _query_rows(attended, rows),
            total, seed, offset, None, None, None, size, size, 0.0, True, scale=inputs.scale,
        )  # fmt: skip
        _write_queries(query_grad, back[0], rows)
        for target, part in ((key_grad, back[1]), (value_grad, back[2])):
            for row, values in zip(rows, part.transpose(1, 2), strict=True):
                target[row.key] = values[: row.length]
    return query_grad, key_grad, value_grad


def _write_queries(target: torch.Tensor, padded: torch.Tensor, rows: list[_Row]) -> None:
    """Copy the queries' results from padded rows [rows, H, S, D] to packed tokens [N, H, D]."""
    for row, values in zip(rows, padded.transpose(1, 2), strict=True):
        target[row.query] = values[row.missing : row.length]


FLASH = "flash attention"
CUDNN = "cuDNN"
TRITON = "Triton"
KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        FLASH: Kernel(_flash_forward, _flash_backward, captured=True),
        CUDNN: Kernel(_cudnn_forward, _cudnn_backward, captured=False),
        TRITON: Kernel(_triton_forward, _triton_backward, captured=True),
    }
)
"""Attention kernels by name; `flash_attention` chooses one kernel for each call. Flash attention is
the default, supports sliding windows, and is deterministic if torch's deterministic algorithms are
on."""


# Choose the fastest kernel for attention over packed rows, by measurement on the device.
#
# The fastest kernel depends on the device, the heads and the length of rows. A process therefore
# measures the kernels once for each class of shapes, by a forward and a backward pass over rows of
# equal length. A kernel that fails, or whose results differ from flash attention 2, is not used.
# For short rows, only kernels that can be part of a CUDA graph are measured, because CUDA graphs
# save more time than a faster kernel would. With torch's deterministic algorithms, only flash
# attention 2 is used.
#
# The dimensions in tensor shapes are N (packed tokens), R (key positions), H (heads), K (key-
# value heads) and D (head size).

NUMBERS = 2**24
"""Approximate number of elements in the query tensor on which kernels are timed."""
SHORTEST = 128
"""Maximum row length, in tokens, of the shape class for the shortest rows."""
TOLERANCE = 0.02
"""Maximum relative error of a kernel's results, compared to flash attention. Rounding alone changes
the results of correct kernels by less than 1 % of their norm."""
REPEATS = 3
CYCLES = 10_000_000
"""Number of clock cycles (a few milliseconds) for which the device is kept busy before each
measurement. The host launches the kernels while the device is busy, so that the launch time is not
measured."""
FLASH3 = "FlashAttention 3"


class ShapeClass(NamedTuple):
    """Properties of an attention call that decide which kernel is the fastest."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    size: int
    length: int
    """The length of the longest row, rounded up to a power of two."""
    captured: bool = False
    """Whether to consider only kernels that can be part of a CUDA graph."""


class Choice(NamedTuple):
    """The fastest kernel for a shape class, and the measured time of each kernel in seconds."""

    name: str
    seconds: dict[str, float]


CHOICES: dict[ShapeClass, Choice] = {}
"""The kernel that this process chose for each shape class."""


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: VarlenRows,
    scale: float | None,
    window: int | None = None,
    kept: Kept | None = None,
) -> torch.Tensor:
    """Return the attention output [N, H, D] for queries [N, H, D], keys and values [R, K, D].

    If `kept` is an empty list, the output is also stored in the list. If `kept` contains the output
    of an earlier call, that output is removed from the list and returned.
    """
    name = FLASH
    if window is None:
        captured = spans.bounds is None or not has_long_rows(spans.bounds.key)
        sizes = query.shape[1], key.shape[1], query.shape[2], spans.longest_key
        name = chosen(ShapeClass(query.device, query.dtype, *sizes, captured))
    return attend(KERNELS[name], query, key, value, Inputs(spans, scale, window), kept)


def has_long_rows(key_bounds: Sequence[int]) -> bool:
    """Return whether rows have at least `LONG` keys on average, given the offsets of their keys."""
    return key_bounds[-1] >= LONG * (len(key_bounds) - 1)


def chosen(shape: ShapeClass) -> str:
    """Return the name of the fastest attention kernel for a shape class.

    The first call for a shape class measures the kernels. The measurement is never part of a CUDA
    graph, because Covey captures a graph only at the third micro-batch of the same size.
    """
    # In a deterministic process, the choice must not depend on a measurement. The cuDNN flag also
    # covers the engine, which turns off torch's determinism check.
    deterministic = (
        torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    )
    if deterministic or shape.device.type != "cuda":
        return FLASH
    shape = shape._replace(length=max(SHORTEST, 1 << (shape.length - 1).bit_length()))
    if shape not in CHOICES:
        CHOICES[shape] = measured(shape)
    return CHOICES[shape].name


def chosen_for(
    config: Any, device: torch.device, dtype: torch.dtype, longest: int, captured: bool = False
) -> str:
    """Return the name of the fastest attention kernel for rows of a transformers model."""
    heads: int = config.num_attention_heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads: int = getattr(config, "num_key_value_heads", None) or heads
    return chosen(ShapeClass(device, dtype, heads, key_heads, size, longest, captured))


def description(config: Any, device: torch.device, dtype: torch.dtype, longest: int) -> str:
    """Describe the attention kernel for rows of up to `longest` tokens, with measured times."""
    short = longest < LONG
    name = chosen_for(config, device, dtype, longest, short)
    measurements = [
        choice.seconds
        for shape, choice in CHOICES.items()
        if shape.length >= longest and shape.captured is short
    ]
    if not measurements:
        return name
    times = (f"{kernel} {1000 * time:.1f} ms" for kernel, time in measurements[0].items())
    return f"{name} for {'short' if short else 'long'} rows (measured: {', '.join(times)})"


@torch.inference_mode(False)
def measured(shape: ShapeClass) -> Choice:
    """Measure kernels on rows of equal length, and choose the fastest kernel.

    This function turns inference mode off, because the measured backward passes need autograd. The
    engine's prefill calls this function in inference mode.
    """
    rows = _Rows(shape)
    expected = rows.results(FLASH)
    seconds: dict[str, float] = {}
    for name, kernel in KERNELS.items():
        if shape.captured and not kernel.captured:
            continue
        try:
            if rows.agree(rows.results(name), expected):
                seconds[name] = _seconds(partial(rows.results, name))
        except (RuntimeError, NotImplementedError, ImportError):
            continue  # not for this shape, or not installed
    if _activate_flash3() and not _keeps_flash3(rows, expected, seconds):
        _restore_flash2()
    name = min(KERNELS, key=lambda name: seconds.get(name, float("inf")))
    return Choice(name, seconds)


def _keeps_flash3(rows: _Rows, expected: list[torch.Tensor], seconds: dict[str, float]) -> bool:
    """Measure FlashAttention 3; return whether it is correct and faster than FlashAttention 2."""
    try:
        right = rows.agree(rows.results(FLASH), expected)
        seconds[FLASH3] = _seconds(partial(rows.results, FLASH))
    except (RuntimeError, NotImplementedError):
        return False  # not for this shape
    if not right or seconds[FLASH3] >= seconds[FLASH]:
        return False
    seconds[FLASH] = seconds[FLASH3]
    return True


class _Rows:
    """Random attention inputs and a random output gradient, on which kernels are timed."""

    def __init__(self, shape: ShapeClass) -> None:
        rows = max(1, NUMBERS // (shape.heads * shape.size * shape.length))
        tokens = rows * shape.length
        bounds = tuple(range(0, tokens + 1, shape.length))
        starts = torch.tensor(bounds, device=shape.device, dtype=torch.int32)
        self.spans = VarlenRows(
            query_starts=starts,
            key_starts=starts,
            longest_query=shape.length,
            longest_key=shape.length,
            bounds=Bounds(bounds, bounds),
        )
        draw = torch.Generator(shape.device).manual_seed(0)
        self.tensors = [
            torch.randn(
                tokens, heads, shape.size, generator=draw, device=shape.device, dtype=shape.dtype
            ).requires_grad_()
            for heads in (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
        ]

    def results(self, name: str) -> list[torch.Tensor]:
        """Return the output, and the gradients of queries, keys and values."""
        query, key, value, grad = self.tensors
        # The first call may come from a checkpointed layer, whose saved-tensor hooks would
        # recompute the layer here.
        with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
            attended = attend(KERNELS[name], query, key, value, Inputs(self.spans, None))
            return [attended.detach(), *torch.autograd.grad(attended, self.tensors[:3], grad)]

    def agree(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        """Return whether the results of two kernels differ only by rounding."""
        return all(
            float((a.float() - b.float()).norm()) <= TOLERANCE * float(b.float().norm())
            for a, b in zip(found, expected, strict=True)
        )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _activate_flash3() -> bool:
    """Make torch use FlashAttention 3; return False if FlashAttention 3 is not available."""
    try:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
    except (ImportError, ValueError, RuntimeError):
        return False
    return True


def _restore_flash2() -> None:
    from torch.nn.attention import restore_flash_attention_impl

    restore_flash_attention_impl()


def _seconds(call: Callable[[], object]) -> float:
    """Return the minimum time of several calls in seconds, after a warm-up call."""
    times = []
    for _ in range(1 + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000)
    return min(times[1:])
