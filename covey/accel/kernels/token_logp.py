"""Kernels for token log-probabilities and entropies from logits, and for the gradients.

The softmax input is scale * (logits + bias), optionally soft-capped. Both passes read the logits
only once: the forward pass keeps a running maximum, and the backward pass uses the saved
normalizer.

The dimensions in tensor shapes are R (rows) and V (vocabulary size).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _scores(logits, bias, at, inside, scale, cap, capped: tl.constexpr, biased: tl.constexpr):
    z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    if biased:
        z += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    z = z * scale
    if capped:
        z = cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)
    return z


@triton.jit
def _forward(
    logits, bias, tokens, logp, entropy, normalizer, scale, cap,
    size: tl.constexpr, block: tl.constexpr, capped: tl.constexpr, biased: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * size
    largest, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, size, block):
        at = start + tl.arange(0, block)
        z = _scores(line, bias, at, at < size, scale, cap, capped, biased)
        larger = tl.maximum(largest, tl.max(tl.where(at < size, z, float("-inf"))))
        shrink = tl.exp(largest - larger)
        p = tl.where(at < size, tl.exp(z - larger), 0.0)
        total = total * shrink + tl.sum(p)
        weighted = weighted * shrink + tl.sum(p * z)
        largest = larger
    whole = largest + tl.log(total)
    token = tl.load(tokens + row)
    chosen = _scores(line, bias, token, token < size, scale, cap, capped, biased)
    tl.store(normalizer + row, whole)
    tl.store(logp + row, chosen - whole)
    tl.store(entropy + row, whole - weighted / total)


@triton.jit
def _backward(
    logits, bias, tokens, normalizer, entropy, logp_grad, entropy_grad, grad, scale, cap,
    size: tl.constexpr, block: tl.constexpr, capped: tl.constexpr, biased: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    z = _scores(logits + row * size, bias, at, at < size, scale, cap, capped, biased)
    log_p = z - tl.load(normalizer + row)
    by_logp, by_entropy = tl.load(logp_grad + row), tl.load(entropy_grad + row)
    factor = -by_logp - by_entropy * (log_p + tl.load(entropy + row))
    result = tl.exp(log_p) * factor
    result += tl.where(at == tl.load(tokens + row), by_logp, 0.0)
    if capped:
        result = result * (1.0 - (z / cap) * (z / cap))
    tl.store(grad + row * size + at, result * scale, mask=at < size)


def logp_forward(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    cap: float | None,
) -> None:
    """Write the token log-probability, entropy and normalizer of each row to `out`, three tensors
    [R]."""
    size = logits.shape[1]
    block = min(BLOCK, triton.next_power_of_2(size))
    _forward[(len(logits),)](
        logits, logits if bias is None else bias, tokens, *out, scale, cap or 1.0,
        size=size, block=block, capped=cap is not None, biased=bias is not None, num_warps=8,
    )  # fmt: skip


def logp_backward(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor, torch.Tensor],
    grad: torch.Tensor,
    scale: float,
    cap: float | None,
) -> None:
    """Write the gradient of logits [R, V] to `grad`, which may be the same tensor as the logits.

    `kept` contains the normalizer [R] and the entropy [R] from the forward pass. `grads` contains
    the gradients [R] of the log-probabilities and of the entropies.
    """
    count, size = logits.shape
    block = min(BLOCK, triton.next_power_of_2(size))
    _backward[(count, triton.cdiv(size, block))](
        logits, logits if bias is None else bias, tokens, *kept, *grads, grad, scale, cap or 1.0,
        size=size, block=block, capped=cap is not None, biased=bias is not None, num_warps=8,
    )  # fmt: skip
