"""Output head: log-probabilities of given tokens, and entropies, computed in chunks.

Only the logits of one chunk of tokens are in memory at a time. The backward pass recomputes the
logits.

The dimensions in tensor shapes are M (tokens), D (hidden size) and V (vocabulary size).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from covey.accel.fused_parameters import GradHolder, GradSink, sink_of
from covey.accel.kernels.matmul import matmul
from covey.accel.sizes import chunk_rows, kernel_chunk_rows
from covey.errors import ModelError
from covey.kept_sets import KeptIds

NOTHING = -1e30
"""The logit of a token that top-k or top-p removed; the token's probability is exactly 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Output layer: scale * (h W^T + b), then optionally a soft cap."""

    linear: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] in float32 or float64; GPU inference never rounds to bfloat16.

        At the usual magnitude of logits, adjacent bfloat16 numbers are 1/16 apart.
        """
        weight, bias = self.linear.weight, self.linear.bias
        wide = torch.promote_types(weight.dtype, torch.float32)
        if not hidden.is_cuda or weight.dtype == wide or hidden.requires_grad:
            logits: torch.Tensor = self.linear(hidden).to(wide)
        else:
            logits = weight.new_empty(*hidden.shape[:-1], len(weight), dtype=wide)
            matmul(hidden.flatten(0, -2), weight.t(), logits.view(-1, len(weight)))
            logits = logits if bias is None else logits + bias
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def token_logp(
    head: Head,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float,
    megabytes: float,
    kept: KeptIds | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [M] of `tokens` [M] and entropies [M] in nats, given `hidden`.

    Logits are divided by `temperature` before the softmax. With `kept`, the distribution contains
    only the tokens that top-k and top-p kept, and the logits of all other tokens get no gradient.
    Log-probabilities and entropies are differentiable.
    """
    weight = head.linear.weight
    function: type[torch.autograd.Function] = _TokenLogp
    size = torch.promote_types(weight.dtype, torch.float32).itemsize
    chunk = chunk_rows(len(weight), megabytes, size)
    if uses_kernels(weight):
        if kept is not None and head.softcap is not None:
            raise ModelError(
                "model: on a GPU, rollout.mask_replay does not work with this model, because the "
                "model applies a soft cap to its logits; set rollout.mask_replay = false"
            )
        function = _DeviceLogp
        chunk = kernel_chunk_rows(len(weight), megabytes, weight.element_size())
    softcap = None if head.softcap is None else head.softcap / temperature
    settings = LogitSettings(head.scale / temperature, softcap, chunk)
    logp, entropy = function.apply(hidden, weight, head.linear.bias, tokens, settings, kept)
    return logp, entropy


def uses_kernels(weight: torch.Tensor) -> bool:
    """Return whether the fused kernels compute log-probabilities for a head with this weight."""
    known = weight.is_cuda and weight.dtype != torch.float64
    return known and importlib.util.find_spec("triton") is not None


class LogitSettings(NamedTuple):
    """Scale and soft cap of logits, and the number of tokens in a chunk."""

    scale: float
    softcap: float | None
    chunk: int


def _chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: LogitSettings,
    kept: KeptIds | None,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """For each chunk, yield the slice of tokens, their logits and a scratch buffer.

    Tokens that top-k or top-p removed get a very negative but finite logit, because the product of
    probability and logit must be 0, not NaN. All chunks reuse the same two buffers. New tensors for
    every chunk would fragment the heap, which grew to 343 MB instead of 63 MB in a measurement.
    """
    scale, softcap, chunk = settings
    precision = torch.promote_types(weight.dtype, torch.float32)
    buffer = weight.new_empty(min(chunk, len(hidden)), len(weight), dtype=precision)
    product = torch.empty_like(buffer)
    for at in range(0, len(hidden), chunk):
        part = slice(at, min(at + chunk, len(hidden)))
        logits = buffer[: part.stop - part.start]
        if logits.dtype == weight.dtype:
            torch.mm(hidden[part], weight.t(), out=logits)
        else:
            logits.copy_(hidden[part] @ weight.t())
        if bias is not None:
            logits.add_(bias)
        logits.mul_(scale)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        if kept is not None:
            kept.keep_only(logits, part, NOTHING)
        yield part, logits, product[: len(logits)]


class _TokenLogp(torch.autograd.Function):
    """Gradients for p = softmax(z) and entropy H: dlogp/dz = onehot - p, dH/dz = -p (log p + H)."""

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
        precision = torch.promote_types(hidden.dtype, torch.float32)
        logp = hidden.new_empty(len(tokens), dtype=precision)
        entropy, normalizer = torch.empty_like(logp), torch.empty_like(logp)
        for part, logits, product in _chunks(hidden, weight, bias, settings, kept):
            largest = logits.amax(dim=-1, keepdim=True)
            torch.sub(logits, largest, out=product).exp_()
            total = product.sum(dim=-1)
            normalizer[part] = total.log() + largest.squeeze(-1)
            logp[part] = logits.gather(-1, tokens[part, None]).squeeze(-1) - normalizer[part]
            entropy[part] = normalizer[part] - product.mul_(logits).sum(dim=-1) / total
        ctx.save_for_backward(hidden, weight, bias, tokens, normalizer, entropy)
        ctx.settings, ctx.kept = settings, kept
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logp_grad, entropy_grad = grads
        hidden, weight, bias, tokens, normalizer, entropy = ctx.saved_tensors
        scale, softcap, _ = ctx.settings
        hidden_grad = torch.empty_like(hidden)
        # With an adapter, the head is frozen, and its gradient would only waste memory.
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for part, logits, grad in _chunks(hidden, weight, bias, ctx.settings, ctx.kept):
            slope = None if softcap is None else 1 - (logits / softcap).square_()
            if slope is not None and ctx.kept is not None:
                slope.clamp_(min=0)  # -inf for tokens outside their kept set
            log_p = logits.sub_(normalizer[part, None])
            torch.exp(log_p, out=grad)
            # grad = p * factor, factor = -logp_grad - entropy_grad (log p + H), built in log_p.
            if entropy_grad is not None:
                log_p.add_(entropy[part, None]).mul_(-entropy_grad[part, None])
            else:
                log_p.zero_()
            if logp_grad is not None:
                log_p.sub_(logp_grad[part, None])
            grad.mul_(log_p)
            if logp_grad is not None:
                grad.scatter_add_(-1, tokens[part, None], logp_grad[part, None])
            if slope is not None:
                grad.mul_(slope)
            rounded = grad.mul_(scale).to(weight.dtype)
            torch.mm(rounded, weight, out=hidden_grad[part])
            if weight_grad is not None:
                weight_grad.addmm_(rounded.t(), hidden[part])
            if bias_grad is not None:
                bias_grad += rounded.sum(dim=0)
        return hidden_grad, weight_grad, bias_grad, None, None, None


# The output head on a GPU, with fused kernels.
#
# Logits are never rounded to bfloat16, but their gradient is rounded to the weight's dtype before
# the two matrix products that use it. The gradient of the head's weight is summed over chunks in
# float32. In the backward pass, the logits of the last chunk are still in memory, and the logits of
# all other chunks are recomputed.


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
        from covey.accel.kernels.token_logp import logp_forward  # needs Triton

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
        from covey.accel.kernels.token_logp import logp_backward

        hidden, weight, bias, tokens, normalizer, entropy = ctx.saved_tensors
        zero = torch.zeros_like(normalizer)
        by_logp, by_entropy = (zero if g is None else g.contiguous() for g in grads)
        hidden_grad = torch.empty_like(hidden)
        # Without a GradSink, the weight's gradient is still summed in float32 here.
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
