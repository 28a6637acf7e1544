"""Linear layers of the fused forward pass: one matrix product for all fused parameters.

The products of plain LoRA adapters are added to the fused product (fused_adapter.py). A layer that
does anything else, such as dropout, is not fused and runs its own forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from covey.accel.fused_adapter import Adapted, LowRankProducts, adapted, product_grads
from covey.accel.fused_parameters import GradSink, fused_view, sink_of
from covey.accel.kernels.swiglu import silu_mul, silu_mul_backward
from covey.accel.parity import is_silu
from covey.accel.unrecorded import call


def plain(module: Any) -> nn.Linear:
    """Return the linear layer itself; of an adapter or a trained copy, return the layer inside."""
    found = getattr(module, "base_layer", getattr(module, "original_module", module))
    assert isinstance(found, nn.Linear)
    return found


def fused_linear(modules: Sequence[Any], values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Apply linear layers to the same input; return one fused result, or one result per layer."""
    weights = _fused_weights(modules)
    if weights is None and len(modules) > 1:
        return tuple(fused_linear([module], values)[0] for module in modules)
    if weights is None:
        return (modules[0](values),)
    result: torch.Tensor = call(_Product, values, weights, *weights.parameters)
    return (result,)


def swiglu_linear(
    gates: Sequence[torch.Tensor], activation: nn.Module, down: nn.Module
) -> torch.Tensor:
    """Return down(activation(gate) * up); `gate` and `up` are one fused tensor or two tensors."""
    result: torch.Tensor
    if not is_silu(activation):
        gate, up = gates[0].chunk(2, dim=1) if len(gates) == 1 else gates
        result = down(activation(gate) * up)
        return result
    weights = _fused_weights([down])
    if weights is None:
        result = down(call(_Gate, *gates))
        return result
    result = call(_GatedProduct, weights, len(gates), *gates, *weights.parameters)
    return result


_SKIPS: ContextVar[bool] = ContextVar("skips", default=False)


@contextmanager
def skip_swiglu_output() -> Iterator[None]:
    """Inside this `with` block, SwiGLU layers save their inputs but return uninitialized memory.

    The recomputation of a checkpointed layer runs inside this block, because nothing reads the
    layer's output a second time.
    """
    token = _SKIPS.set(True)
    try:
        yield
    finally:
        _SKIPS.reset(token)


class _Weights:
    """The fused weights of linear layers, and the sums to which their gradients are added."""

    def __init__(self, layers: Sequence[Adapted], weight: torch.Tensor) -> None:
        linears = [layer.linear for layer in layers]
        self.weights = [m.weight for m in linears]
        self.weight = weight
        self.biases: list[torch.Tensor] = [m.bias for m in linears if m.bias is not None]
        bias = fused_view(self.biases) if self.biases else None
        # Biases are small, so a copy is cheap if they are not fused.
        self.bias = torch.cat([b.detach() for b in self.biases]) if self.biases else None
        self.bias = self.bias if bias is None else bias
        self.low_rank = LowRankProducts(layers)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Inputs of the autograd function: all weights, then all biases, then all LoRA weights."""
        return [*self.weights, *self.biases, *self.low_rank.parameters]

    def product(self, values: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all layers as columns of one tensor."""
        result = linear(values, self.weight, self.bias)
        self.low_rank.add_to(result, values)
        return result

    def input_grad(self, grad: torch.Tensor, inner: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the layers' input.

        `inner` is the result of `low_rank.inner_grad`.
        """
        back = grad @ self.weight
        self.low_rank.add_input_grad(back, inner)
        return back

    def grads(
        self,
        needed: Sequence[bool],
        grad: torch.Tensor,
        values: torch.Tensor,
        inner: torch.Tensor | None,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of `parameters`.

        The result is None for a gradient that is not needed or was added to a GradSink.
        """
        count, end = len(self.weights), len(self.weights) + len(self.biases)
        found: list[torch.Tensor | None] = [None] * len(needed)
        if any(needed[:count]):
            found[:count] = product_grads(self.weights, grad, values)
        if any(needed[count:end]):
            found[count:end] = _bias_grads(self.biases, grad.sum(dim=0, dtype=torch.float32))
        if any(needed[end:]):
            found[end:] = self.low_rank.grads(grad, inner, values)
        return [part if wanted else None for part, wanted in zip(found, needed, strict=True)]


def _bias_grads(biases: Sequence[torch.Tensor], total: torch.Tensor) -> list[torch.Tensor | None]:
    sink: GradSink | None = sink_of(biases)
    if sink is None:
        return list(total.to(biases[0].dtype).split([len(b) for b in biases]))
    sink.add(total)
    return [None] * len(biases)


def _fused_weights(modules: Sequence[Any]) -> _Weights | None:
    """Return the fused weights of linear layers, or None if they are not fused."""
    layers = [layer for module in modules if (layer := adapted(module)) is not None]
    if len(layers) < len(modules):
        return None
    weight = fused_view([layer.linear.weight for layer in layers])
    alike = len({layer.linear.bias is None for layer in layers}) == 1
    return _Weights(layers, weight) if weight is not None and alike else None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, weights: _Weights, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(values)
        ctx.weights = weights
        return weights.product(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0]
        (values,) = ctx.saved_tensors
        weights: _Weights = ctx.weights
        inner = weights.low_rank.inner_grad(grad)
        back = weights.input_grad(grad, inner) if ctx.needs_input_grad[0] else None
        return back, None, *weights.grads(ctx.needs_input_grad[2:], grad, values, inner)


class _GatedProduct(torch.autograd.Function):
    """SwiGLU for autograd.

    The forward pass saves only `gate` and `up`, and the backward pass recomputes silu(gate) * up.
    """

    @staticmethod
    def forward(ctx: Any, weights: _Weights, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        gates = tensors[:count]
        ctx.save_for_backward(*gates)
        ctx.weights = weights
        if _SKIPS.get():
            return gates[0].new_empty(len(gates[0]), len(weights.weight))
        return weights.product(silu_mul(*_apart(gates)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gates, weights = ctx.saved_tensors, ctx.weights
        grad = grads[0]
        inner = weights.low_rank.inner_grad(grad)
        # The product's gradient, later overwritten by the product.
        values = weights.input_grad(grad, inner)
        both = silu_mul_backward(values, *_apart(gates), values)
        needed = ctx.needs_input_grad[2 + len(gates) :]
        back = (both,) if len(gates) == 1 else both.chunk(2, dim=1)
        return None, None, *back, *weights.grads(needed, grad, values, inner)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *gates: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*gates)
        return silu_mul(*_apart(gates))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gates = ctx.saved_tensors
        both = silu_mul_backward(grads[0], *_apart(gates))
        return (both,) if len(gates) == 1 else both.chunk(2, dim=1)


def _apart(gates: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = gates[0].chunk(2, dim=1) if len(gates) == 1 else gates
    return gate, up
