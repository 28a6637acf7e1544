"""Fused parameters: several weights in one storage, so that one matrix product uses all of them.

Fused parameters keep their names and shapes, but are views of one shared tensor. An optimizer step
changes the parameters in place, so the fused product uses the new values without a copy. Parameters
count as fused if they are consecutive in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from covey.accel.kernels.matmul import add_matmul, matmul

FUSED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
"""Names of linear layers that have the same input, in Llama-like models."""


@torch.no_grad()
def fuse_parameters(backbone: nn.Module) -> None:
    """Fuse the weights of layers that have the same input."""
    for modules in _groups(backbone):
        if all(type(m) is nn.Linear for m in modules):
            _join([m.weight for m in modules])
            _join([m.bias for m in modules])


@torch.no_grad()
def fuse_adapters(backbone: nn.Module, name: str) -> None:
    """Fuse the LoRA matrices A of layers that have the same input."""
    for modules in _groups(backbone):
        found = [m.lora_A[name] for m in modules if name in getattr(m, "lora_A", ())]
        if found:
            _join([m.weight for m in found])


def _groups(backbone: nn.Module) -> Iterator[list[Any]]:
    """Yield lists of layers that have the same input."""
    layers: Any = getattr(backbone, "layers", ())
    for layer in layers:
        for part, names in FUSED:
            yield [getattr(getattr(layer, part, None), name, None) for name in names]


def _join(parameters: Sequence[nn.Parameter | None]) -> None:
    found = [p for p in parameters if p is not None]
    alike = len({(p.dtype, p.device, p.shape[1:], p.requires_grad) for p in found}) == 1
    if len(found) != len(parameters) or not alike:
        return
    together = torch.cat([p.detach() for p in found])
    for parameter, part in zip(found, together.split([len(p) for p in found]), strict=True):
        parameter.data = part


def fused_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return `tensors` stacked as one tensor if they are fused, or else None."""
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        apart = tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage
        if apart or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        end += tensor.numel() * tensor.element_size()
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class GradHolder:
    """Stores the float32 gradient of a bfloat16 parameter that has no float32 master weight."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.grad: torch.Tensor | None = None
        self.shape, self.device = parameter.shape, parameter.device


HoldsGrad = nn.Parameter | GradHolder
"""The object that stores a parameter's float32 gradient: its master weight or a GradHolder."""


class GradSink:
    """Accumulates the float32 gradients of bfloat16 parameters that share one tensor.

    A backward pass may add a gradient to the float32 sum and return None to autograd. A matrix
    product can even write to the sum directly, so that no gradient is rounded to bfloat16.
    """

    def __init__(self, masters: Sequence[HoldsGrad]) -> None:
        self.masters = list(masters)
        self._total: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor | None:
        """The gradient sum so far; None if no gradient was added since gradients were last
        cleared."""
        return None if self.masters[0].grad is None else self._total

    def start(self) -> torch.Tensor:
        """Start a new gradient sum; the caller must fill the returned tensor.

        The new gradient sum reuses the memory of the previous gradient sum. A second buffer would
        double the memory of gradients, and a CUDA graph needs the gradient sum at a fixed address.
        """
        first, *others = self.masters
        # A single parameter keeps its shape: a scalar has no rows.
        rows = [m.shape[0] for m in self.masters] if others else []
        if self._total is None:
            shape = (sum(rows), *first.shape[1:]) if others else first.shape
            self._total = torch.empty(shape, device=first.device)
        parts = self._total.split(rows) if others else [self._total]
        for master, part in zip(self.masters, parts, strict=True):
            master.grad = part
        return self._total

    def resume(self) -> torch.Tensor | None:
        """If gradients were cleared, start a new sum and return its buffer; else return None.

        The caller must set the returned tensor to zero.
        """
        cleared = self._total is not None and self.total is None
        return self.start() if cleared else None

    def add(self, grad: torch.Tensor) -> None:
        """Add `grad`, the stacked gradients of all parameters, to the float32 sum."""
        total = self.total
        if total is None:
            self.start().copy_(grad)
        else:
            total.add_(grad)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left @ right, the stacked gradients, to the float32 sum without extra rounding."""
        total = self.total
        if total is None:
            matmul(left, right, self.start())
        else:
            add_matmul(left, right, total)

    def add_part(self, number: int, grad: torch.Tensor) -> None:
        """Add the gradient of one parameter."""
        if len(self.masters) == 1:
            self.add(grad)
            return
        if self.total is None:
            self.start().zero_()
        part = self.masters[number].grad
        assert part is not None
        part.add_(grad)


def sink_of(parameters: Sequence[torch.Tensor]) -> GradSink | None:
    """Return the GradSink that all the parameters share, or None if they share no GradSink."""
    sink: GradSink | None = getattr(parameters[0], "grad_sink", None)
    if sink is None or len(sink.masters) != len(parameters):
        return None
    return sink if all(getattr(p, "grad_sink", None) is sink for p in parameters) else None


def grad_holder(parameter: nn.Parameter) -> Any:
    """Return the object whose `.grad` is the parameter's gradient, for example a master weight."""
    sink: GradSink | None = getattr(parameter, "grad_sink", None)
    part: int = getattr(parameter, "grad_part", 0)
    return parameter if sink is None else sink.masters[part]


def attach_grad_sinks(pairs: Iterable[tuple[nn.Parameter, HoldsGrad]]) -> None:
    """Attach a GradSink to each bfloat16 parameter; fused parameters share one GradSink."""
    run: list[tuple[nn.Parameter, HoldsGrad]] = []
    by_address = sorted(pairs, key=lambda pair: pair[0].data_ptr())
    for pair in by_address:
        if run and fused_view([p for p, _ in (*run, pair)]) is None:
            _give_sink(run)
            run = []
        run.append(pair)
    if run:
        _give_sink(run)


def _give_sink(run: Sequence[tuple[nn.Parameter, HoldsGrad]]) -> None:
    sink = GradSink([master for _, master in run])
    for number, (parameter, _) in enumerate(run):
        parameter.grad_sink = sink  # type: ignore[attr-defined]
        parameter.grad_part = number  # type: ignore[attr-defined]
        set_grad_hook(parameter, _collector(sink, number))


def set_grad_hook(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
    """Set the hook that receives a parameter's gradient; remove an earlier optimizer's hook."""
    if (former := getattr(parameter, "grad_hook", None)) is not None:
        former.remove()
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.grad_hook = handle  # type: ignore[attr-defined]


def _collector(sink: GradSink, number: int) -> Any:
    def collect(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            sink.add_part(number, parameter.grad)
            parameter.grad = None

    return collect
