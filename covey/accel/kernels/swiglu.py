"""SwiGLU: one kernel for silu(gate) * up and one kernel for its gradient.

The dimensions in tensor shapes are N (tokens) and M (MLP size). The inputs `gate` and `up` are
either the left and right halves of one matrix [N, 2 M], or two separate matrices [N, M].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from covey.accel.kernels.launch import early_start

BLOCK = 1024
"""Number of columns that a Triton program processes; a row of up to 2 * `BLOCK` columns takes only
one program."""


@triton.jit
def _forward(
    gate, up, product, gate_stride, up_stride, size, block: tl.constexpr, early: tl.constexpr
):
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(product + row * size + column, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _backward(
    product_grad, gate, up, gate_grad, up_grad, product, gate_stride, up_stride, grad_stride,
    size, again: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    grad = tl.load(product_grad + row * size + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(gate_grad + row * grad_stride + column, grad * u * slope, mask=inside)
    tl.store(up_grad + row * grad_stride + column, grad * silu, mask=inside)
    if again:
        tl.store(product + row * size + column, silu * u, mask=inside)


def _block(size: int) -> int:
    return triton.next_power_of_2(size) if size <= 2 * BLOCK else BLOCK


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [N, M] without recording gradients."""
    count, size = gate.shape
    product = gate.new_empty(count, size)
    block = _block(size)
    _forward[(count, triton.cdiv(size, block))](
        gate, up, product, gate.stride(0), up.stride(0), size, block=block,
        **early_start(gate.device),
    )  # fmt: skip
    return product


def silu_mul_backward(
    product_grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    product: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return gradients of `gate` and `up` in [N, 2 M]; write silu(gate) * up to `product`.

    The gradient of the down projection's weight needs silu(gate) * up. This kernel recomputes
    silu(gate) * up at no extra cost, so that the forward pass need not save the product. `product`
    may be the same tensor as `product_grad`, because the kernel reads each gradient before it
    writes.
    """
    count, size = gate.shape
    grads = gate.new_empty(count, 2 * size)
    product_grad = product_grad.contiguous()
    block = _block(size)
    _backward[(count, triton.cdiv(size, block))](
        product_grad, gate, up, grads, grads[:, size:],
        product_grad if product is None else product, gate.stride(0), up.stride(0),
        grads.stride(0), size, again=product is not None, block=block,
    )  # fmt: skip
    return grads
