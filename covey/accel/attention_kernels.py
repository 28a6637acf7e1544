"""Kernels for attention over packed rows: torch's flash attention, cuDNN's and FlashAttention 3.

Attention is causal and aligned at the end of a row (varlen_attention.py). Flash attention 2 and 3
support rows with fewer queries than keys. cuDNN's causal mask is aligned at the start of a row, so
queries are copied to all key positions: the queries of a shared prompt then occur in every row of
the prompt. Only one of these copies is read, and the gradient of the others is zero, so results and
gradients do not change.

This module calls torch's internal operators, because the public function for variable-length
attention changes its arguments between versions of torch, and has no cuDNN.

Tensor shapes use N packed tokens, R key positions, H heads, K key-value heads and head size D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from covey.accel.varlen_attention import VarlenRows

Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, VarlenRows, float | None, int | None], torch.Tensor
]
"""Attention of queries [N, H, D], keys and values [R, K, D], with a scale and a window."""


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spans: VarlenRows,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        limits = (spans.query_starts, spans.key_starts, spans.longest_query, spans.longest_key)
        options = {"scale": scale}
        if window is not None:
            options |= {"window_size_left": window - 1, "window_size_right": 0}
        attended, total, seed, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *limits, 0.0, True, False, **options
        )
        ctx.save_for_backward(query, key, value, attended, total, seed, unused)
        ctx.limits, ctx.options = limits, options
        result: torch.Tensor = attended
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, attended, total, seed, unused = ctx.saved_tensors
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), query, key, value, attended, total, *ctx.limits, 0.0, True,
            seed, unused, **ctx.options,
        )  # fmt: skip
        return *found, None, None, None


class _Cudnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spans: VarlenRows,
        scale: float | None,
    ) -> torch.Tensor:
        limits = (spans.key_starts, spans.key_starts, spans.longest_key, spans.longest_key)
        found = torch.ops.aten._cudnn_attention_forward(
            spans.gathered(query), key, value, None, *limits, True, 0.0, True, False, scale=scale
        )
        attended, total, seed, offset = spans.selected(found[0]), found[1], found[6], found[7]
        ctx.save_for_backward(query, key, value, attended, total, seed, offset)
        ctx.spans, ctx.limits, ctx.scale = spans, limits, scale
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, attended, total, seed, offset = ctx.saved_tensors
        spans: VarlenRows = ctx.spans
        query_grad, *others = torch.ops.aten._cudnn_attention_backward(
            spans.scattered(grads[0].contiguous()), spans.gathered(query), key, value,
            spans.scattered(attended), total, seed, offset, None, *ctx.limits, 0.0, True,
            scale=ctx.scale,
        )  # fmt: skip
        return spans.selected(query_grad), *others, None, None


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: VarlenRows,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    attended: torch.Tensor = _Flash.apply(query, key, value, spans, scale, window)
    return attended


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: VarlenRows,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    if window is not None:
        raise NotImplementedError("cuDNN's variable-length attention has no window")
    attended: torch.Tensor = _Cudnn.apply(query, key, value, spans, scale)
    return attended


def _flash3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: VarlenRows,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    from flash_attn_interface import flash_attn_varlen_func

    found = flash_attn_varlen_func(
        query, key, value, spans.query_starts, spans.key_starts, spans.longest_query,
        spans.longest_key, softmax_scale=scale, causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )  # fmt: skip
    # Some versions return the log-sum-exp as well.
    attended: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return attended


FLASH = "flash attention 2"
KERNELS: Mapping[str, Attend] = MappingProxyType(
    {FLASH: _flash, "cuDNN": _cudnn, "FlashAttention 3": _flash3}
)
"""Name -> attention; the first supports every shape and, in torch's deterministic mode, is
deterministic."""
