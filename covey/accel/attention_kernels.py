"""Kernels for attention over packed rows: torch's flash attention and cuDNN's.

Attention is causal and aligned at the end of a row (varlen_attention.py). Flash attention computes
all rows in one call and supports rows with fewer queries than keys. cuDNN's causal mask is aligned
at the start of a row, so queries are copied to all key positions: the queries of a shared prompt
then occur in every row of the prompt. Only one of these copies is read, and the gradient of the
others is zero, so results and gradients do not change. Each row is one call. cuDNN's operator for
rows of different lengths is not used: with torch 2.11 its backward pass reads invalid addresses.

This module calls torch's internal operators, because the public function for variable-length
attention changes its arguments between versions of torch, and returns no log-sum-exp.

Tensor shapes use N packed tokens, R key positions, H heads, K key-value heads and head size D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from covey.accel.varlen_attention import VarlenRows

STEP = 256
"""cuDNN's rows are padded to a multiple of this length, because it prepares each length anew."""

Found = tuple[torch.Tensor, ...]
"""The output of attention, and the tensors that its backward pass needs besides."""
Kept = list[Found]
"""Receives the result of a forward pass that will be recomputed; the recomputation takes it."""


class Inputs(NamedTuple):
    """Arguments of attention besides queries [N, H, D], keys and values [R, K, D]."""

    spans: VarlenRows
    scale: float | None
    window: int | None = None


class Kernel(NamedTuple):
    """A forward and a backward pass of attention."""

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Inputs], Found]
    backward: Callable[[torch.Tensor, Found, Found, Inputs], Found]
    """From the output's gradient, (queries, keys, values) and the forward pass's result."""
    captured: bool
    """Whether the kernel can be part of a CUDA graph whose rows change."""


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
            found = kernel.forward(query, key, value, inputs)
            if kept is not None:
                kept.append((found[0].detach(), *found[1:]))
        ctx.save_for_backward(query, key, value, *found)
        ctx.kernel, ctx.inputs = kernel, inputs
        return found[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, found = saved[:3], saved[3:]
        back = ctx.kernel.backward(grads[0].contiguous(), tensors, found, ctx.inputs)
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

    With `kept`, the result is stored in an empty list, or taken from a list that is not empty.
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


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: Inputs
) -> Found:
    limits, options = _flash_limits(inputs)
    found: Found = torch.ops.aten._flash_attention_forward(
        query, key, value, *limits, 0.0, True, False, **options
    )
    return found[:4]


def _flash_backward(grad: torch.Tensor, tensors: Found, found: Found, inputs: Inputs) -> Found:
    limits, options = _flash_limits(inputs)
    attended, total, seed, unused = found
    back: Found = torch.ops.aten._flash_attention_backward(
        grad, *tensors, attended, total, *limits, 0.0, True, seed, unused, **options
    )
    return back


def _cudnn_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: Inputs
) -> Found:
    spans = inputs.spans
    rows = spans.gathered(query)
    attended = torch.empty_like(rows)
    beside: list[torch.Tensor] = []
    for row in _rows(inputs):
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_padded(t, row) for t in (rows, key, value)),
            None, True, 0.0, True, False, scale=inputs.scale,
        )  # fmt: skip
        attended[row] = _unpadded(found[0], row)
        beside += [found[1], found[6], found[7]]
    return spans.selected(attended), *beside


def _cudnn_backward(grad: torch.Tensor, tensors: Found, found: Found, inputs: Inputs) -> Found:
    query, key, value = tensors
    spans = inputs.spans
    inputs_of_row = (spans.scattered(grad), spans.gathered(query), key, value)
    attended, *beside = spans.scattered(found[0]), *found[1:]
    grads = tuple(torch.empty_like(t) for t in inputs_of_row[1:])
    for number, row in enumerate(_rows(inputs)):
        total, seed, offset = beside[3 * number : 3 * number + 3]
        length = _padded_length(row)
        back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_padded(t, row) for t in (*inputs_of_row, attended)),
            total, seed, offset, None, None, None, length, length, 0.0, True, scale=inputs.scale,
        )  # fmt: skip
        for target, part in zip(grads, back, strict=True):
            target[row] = _unpadded(part, row)
    return spans.selected(grads[0]), *grads[1:]


def _rows(inputs: Inputs) -> list[slice]:
    """Return the key positions of each row."""
    if inputs.window is not None or inputs.spans.bounds is None:
        raise NotImplementedError("cuDNN needs rows whose bounds are known, without a window")
    return [slice(begin, end) for begin, end in pairwise(inputs.spans.bounds)]


def _padded_length(row: slice) -> int:
    length: int = row.stop - row.start
    return -(-length // STEP) * STEP


def _padded(values: torch.Tensor, row: slice) -> torch.Tensor:
    """Return one row of [R, heads, D] as [1, heads, S, D]; zeros after its end have no effect."""
    missing = _padded_length(row) - (row.stop - row.start)
    part = pad(values[row], (0, 0, 0, 0, 0, missing)) if missing else values[row]
    return part.transpose(0, 1)[None]


def _unpadded(values: torch.Tensor, row: slice) -> torch.Tensor:
    """Return [1, heads, S, D] as a row [R, heads, D] without padding."""
    return values[0].transpose(0, 1)[: row.stop - row.start]


FLASH = "flash attention"
CUDNN = "cuDNN"
KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        FLASH: Kernel(_flash_forward, _flash_backward, captured=True),
        CUDNN: Kernel(_cudnn_forward, _cudnn_backward, captured=False),
    }
)
"""Name -> kernel. Flash attention supports all rows and, with torch's deterministic algorithms, is
deterministic; which version of it torch runs is chosen in attention_choice.py."""
