"""LoRA adapters in the fused forward pass: low-rank products are added to the frozen product.

An adapted layer computes `W x + scale * B A x`. For layers with the same input, one matrix product
computes W x of all layers, and another computes A x of all layers. B A x is added to W x in place.
The backward pass computes gradients of A and B only, never of W.

The dimensions in tensor shapes are N (tokens), I and O (inputs and outputs of a layer) and R
(adapter rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from covey.accel.fused_parameters import fused_view, sink_of


class LowRank(NamedTuple):
    """The LoRA weights of one layer."""

    first: torch.Tensor
    """A, [R, I]."""
    second: torch.Tensor
    """B, [O, R]."""
    scale: float


class Adapted(NamedTuple):
    """A plain linear layer, and its LoRA weights if it has an active adapter."""

    linear: nn.Linear
    low_rank: LowRank | None


def adapted(module: Any) -> Adapted | None:
    """Return a linear layer with its LoRA weights.

    Return None if the layer computes anything besides these matrix products.
    """
    if module._forward_hooks:
        return None
    if type(module) is nn.Linear:
        return Adapted(module, None)
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(module, "lora_A") or module.merged:
        return None
    if module.disable_adapters:
        return Adapted(base, None)
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) != 1:
        return None
    (name,) = active
    first, second = module.lora_A[name], module.lora_B[name]
    plain = isinstance(module.lora_dropout[name], nn.Identity) and name not in module.lora_variant
    alike = first.weight.dtype == second.weight.dtype == base.weight.dtype
    if not (plain and alike and second.bias is None):
        return None
    return Adapted(base, LowRank(first.weight, second.weight, float(module.scaling[name])))


class LowRankProducts:
    """The LoRA weights of layers that have the same input.

    The outputs of these layers are columns of one tensor.
    """

    def __init__(self, layers: Sequence[Adapted]) -> None:
        self._parts: list[tuple[slice, LowRank]] = []
        end = 0
        for linear, low_rank in layers:
            begin, end = end, end + linear.out_features
            if low_rank is not None:
                self._parts.append((slice(begin, end), low_rank))

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The LoRA matrices: the matrix A of every layer, then the matrix B of every layer."""
        return [*self._first, *(part.second for _, part in self._parts)]

    @property
    def _first(self) -> list[torch.Tensor]:
        return [part.first for _, part in self._parts]

    def _stacked(self) -> torch.Tensor:
        """Return all matrices A as one matrix: a view if they are fused, or else a copy."""
        found = fused_view(self._first)
        return torch.cat([a.detach() for a in self._first]) if found is None else found

    def _scaled(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            column if part.scale == 1.0 else column.mul_(part.scale)
            for column, (_, part) in zip(columns, self._parts, strict=True)
        ]

    def _reduced(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return scale * A x of every layer, [N, R] each."""
        ranks = [len(a) for a in self._first]
        return self._scaled((values @ self._stacked().t()).split(ranks, dim=1))

    def add_to(self, result: torch.Tensor, values: torch.Tensor) -> None:
        """Add scale * B A x to the result of the frozen weights, in place."""
        if not self._parts:
            return
        for (columns, part), reduced in zip(self._parts, self._reduced(values), strict=True):
            result[:, columns].addmm_(reduced, part.second.t())

    def inner_grad(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient with respect to A x of all layers, [N, sum of all adapter ranks]."""
        if not self._parts:
            return None
        ranks = [len(a) for a in self._first]
        inner = grad.new_empty(len(grad), sum(ranks))
        parts = inner.split(ranks, dim=1)
        for (columns, part), out in zip(self._parts, parts, strict=True):
            torch.mm(grad[:, columns], part.second, out=out)
        self._scaled(parts)
        return inner

    def add_input_grad(self, back: torch.Tensor, inner: torch.Tensor | None) -> None:
        """Add the contribution of the adapters to the gradient of the input, in place."""
        if inner is not None:
            back.addmm_(inner, self._stacked())

    def grads(
        self, grad: torch.Tensor, inner: torch.Tensor | None, values: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Return the gradients of `parameters`.

        Gradients that were added to a GradSink are returned as None.
        """
        if inner is None:
            return []
        first = product_grads(self._first, inner, values)
        second = [
            product_grads([part.second], grad[:, columns], reduced)[0]
            for (columns, part), reduced in zip(self._parts, self._reduced(values), strict=True)
        ]
        return [*first, *second]


def product_grads(
    weights: Sequence[torch.Tensor], grad: torch.Tensor, values: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients of weights that are fused in one matrix product.

    Gradients that were added to a GradSink are returned as None.
    """
    sink = sink_of(weights)
    if sink is not None:
        sink.add_product(grad.t(), values)
        return [None] * len(weights)
    return list((grad.t() @ values).split([len(w) for w in weights]))
