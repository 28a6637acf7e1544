"""Fused output head on a GPU: log-probabilities and entropies from float32 logits, in chunks.

Logits are never rounded to bfloat16. At the usual magnitude of logits, adjacent bfloat16 numbers
are 1/16 apart. The gradient of logits is rounded to the weight's dtype before the two matrix
products that use this gradient. The gradient of the head's weight is summed over chunks in float32.
In the backward pass, the logits of the last chunk are still in memory, and the logits of all other
chunks are recomputed. If all logits fit into one chunk, no logits are recomputed.

The dimensions in tensor shapes are M (tokens), D (hidden size) and V (vocabulary size).
"""

from __future__ import annotations

from typing import Any

import torch

from covey.accel.fused_parameters import GradHolder, GradSink, sink_of
from covey.accel.head import NOTHING, LogitSettings
from covey.accel.kernels.matmul import matmul
from covey.accel.kernels.token_logp import logp_backward, logp_forward
from covey.accel.sizes import CHUNK_STEP
from covey.kept_sets import KeptIds


def fused_token_logp(
    hidden: torch.Tensor,
    linear: torch.nn.Linear,
    tokens: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    megabytes: float,
    kept: KeptIds | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy [M] in float32, both differentiable."""
    weight, bias = linear.weight, linear.bias
    # Float32 logits, and a rounded copy of their gradient unless it can overwrite them.
    size = 4 if weight.dtype == torch.float32 else 4 + weight.element_size()
    rows = max(1, int(megabytes * 2**20 / (len(weight) * size)))
    chunk = rows - rows % CHUNK_STEP if rows > CHUNK_STEP else rows
    settings = LogitSettings(scale, softcap, chunk)
    logp, entropy = _DeviceLogp.apply(hidden, weight, bias, tokens, settings, kept)
    return logp, entropy


def _new_buffer(hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return memory for the logits of one chunk."""
    return weight.new_empty(min(chunk, len(hidden)), len(weight), dtype=torch.float32)


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(at, min(at + chunk, count)) for at in range(0, count, chunk)]


def _compute_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    part: slice,
    buffer: torch.Tensor,
    kept: KeptIds | None,
) -> torch.Tensor:
    """Compute the logits of a chunk of tokens in `buffer`, and return the logits."""
    logits = buffer[: part.stop - part.start]
    matmul(hidden[part], weight.t(), out=logits)
    if kept is not None:
        kept.keep_only(logits, part, NOTHING)
    return logits


class _DeviceLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        settings: LogitSettings,
        kept: KeptIds | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.contiguous()
        logp = hidden.new_empty(len(tokens), dtype=torch.float32)
        entropy, normalizer = torch.empty_like(logp), torch.empty_like(logp)
        buffer = _new_buffer(hidden, weight, settings.chunk)
        for part in _parts(len(hidden), settings.chunk):
            logits = _compute_logits(hidden, weight, part, buffer, kept)
            out = (logp[part], entropy[part], normalizer[part])
            logp_forward(logits, bias, tokens[part], out, settings.scale, settings.softcap)
        ctx.save_for_backward(hidden, weight, bias, tokens, normalizer, entropy)
        ctx.settings, ctx.kept, ctx.buffer = settings, kept, buffer
        ctx.sink = sink_of([weight])
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, tokens, normalizer, entropy = ctx.saved_tensors
        zero = torch.zeros_like(normalizer)
        by_logp, by_entropy = (zero if g is None else g.contiguous() for g in grads)
        hidden_grad = torch.empty_like(hidden)
        # Without a float32 sink, the weight's gradient is still summed in float32 here.
        sink = ctx.sink or GradSink([GradHolder(weight)])
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        rounded = None
        last, ctx.buffer = ctx.buffer, None  # a second backward pass computes all logits again
        buffer = _new_buffer(hidden, weight, ctx.settings.chunk) if last is None else last
        for part in reversed(_parts(len(hidden), ctx.settings.chunk)):
            if last is None:
                logits = _compute_logits(hidden, weight, part, buffer, ctx.kept)
            else:
                logits, last = last[: part.stop - part.start], None
            if rounded is None:
                plain = logits.dtype == weight.dtype
                rounded = buffer if plain else torch.empty_like(buffer, dtype=weight.dtype)
            grad = rounded[: len(logits)]
            logp_backward(
                logits, bias, tokens[part], (normalizer[part], entropy[part]),
                (by_logp[part], by_entropy[part]), grad, ctx.settings.scale, ctx.settings.softcap,
            )  # fmt: skip
            torch.mm(grad, weight, out=hidden_grad[part])
            if ctx.needs_input_grad[1]:
                sink.add_product(grad.t(), hidden[part])
            if bias_grad is not None:
                bias_grad += grad.sum(dim=0, dtype=torch.float32)
        weight_grad = None
        if ctx.needs_input_grad[1] and ctx.sink is None:
            total = sink.total
            weight_grad = torch.zeros_like(weight) if total is None else total.to(weight.dtype)
        bias_grad = None if bias_grad is None else bias_grad.to(bias.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None
