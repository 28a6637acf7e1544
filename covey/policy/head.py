"""Log-probabilities and entropies of chosen tokens, without ever holding all their logits.

Shapes: M chosen tokens, D hidden size, V vocabulary. Logits exist for one chunk of tokens at a
time, in the forward pass and again, recomputed, in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from covey.policy.model import Head

LIVE_COPIES = 3
"""Tensors of a chunk's size that are alive at once: logits, probabilities and one product."""


def chunk_rows(vocabulary: int, megabytes: float, element_bytes: int = 4) -> int:
    """Return how many tokens a chunk may hold so that its tensors fit into `megabytes`."""
    return max(1, int(megabytes * 2**20 / (vocabulary * element_bytes * LIVE_COPIES)))


def token_logp(
    head: Head, hidden: torch.Tensor, tokens: torch.Tensor, *, temperature: float, megabytes: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability [M] of `tokens` [M] and entropy [M] (nats) after `hidden` [M, D].

    Both are of the distribution at `temperature`, and both can be differentiated.
    """
    weight = head.linear.weight
    chunk = chunk_rows(
        weight.shape[0], megabytes, torch.promote_types(weight.dtype, torch.float32).itemsize
    )
    scale = head.scale / temperature
    softcap = None if head.softcap is None else head.softcap / temperature
    logp, entropy = _TokenLogp.apply(
        hidden, weight, head.linear.bias, tokens, scale, softcap, chunk
    )
    return logp, entropy


def _chunk_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(scale)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


class _TokenLogp(torch.autograd.Function):
    """With p = softmax(z): d logp / dz = onehot - p, and d H / dz = -p (log p + H)."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd functions take their tensors one by one
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        scale: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        precision = torch.promote_types(hidden.dtype, torch.float32)
        logp = hidden.new_empty(len(tokens), dtype=precision)
        entropy = torch.empty_like(logp)
        normalizer = torch.empty_like(logp)
        for at in range(0, len(tokens), chunk):
            part = slice(at, at + chunk)
            logits = _chunk_logits(hidden[part], weight, bias, scale, softcap)
            normalizer[part] = logits.logsumexp(dim=-1)
            logp[part] = logits.gather(-1, tokens[part, None]).squeeze(-1) - normalizer[part]
            probability = (logits - normalizer[part, None]).exp_()
            entropy[part] = normalizer[part] - probability.mul_(logits).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, tokens, normalizer, entropy)
        ctx.settings = (scale, softcap, chunk)
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logp_grad, entropy_grad = grads
        hidden, weight, bias, tokens, normalizer, entropy = ctx.saved_tensors
        scale, softcap, chunk = ctx.settings
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight)
        bias_grad = None if bias is None else torch.zeros_like(bias)
        for at in range(0, len(tokens), chunk):
            part = slice(at, at + chunk)
            logits = _chunk_logits(hidden[part], weight, bias, scale, softcap)
            log_probability = logits - normalizer[part, None]
            probability = log_probability.exp()
            grad = torch.zeros_like(logits)
            if logp_grad is not None:
                grad.addcmul_(probability, logp_grad[part, None], value=-1)
                grad.scatter_add_(-1, tokens[part, None], logp_grad[part, None])
            if entropy_grad is not None:
                inner = log_probability.add_(entropy[part, None]).mul_(probability)
                grad.addcmul_(inner, entropy_grad[part, None], value=-1)
            if softcap is not None:
                grad.mul_(1 - (logits / softcap).square())
            grad = grad.mul_(scale).to(weight.dtype)
            torch.mm(grad, weight, out=hidden_grad[part])
            weight_grad.addmm_(grad.t(), hidden[part])
            if bias_grad is not None:
                bias_grad += grad.sum(dim=0)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None
