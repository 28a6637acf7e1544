"""The AdamW optimizer, with float32 master weights and gradient clipping.

This module contains MasterAdamW. CompactAdamW (compact_adamw.py) needs less memory than
MasterAdamW.

If the model computes in bfloat16, each of its parameters has a float32 copy, called its master.
Gradients are summed in float32 as soon as they are computed, so accumulation over micro-batches
loses no precision. An optimizer step updates the masters, and writes the rounded masters into the
bfloat16 parameters in place. An engine that shares the parameters needs no weight transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import nn

from covey.accel.fused_parameters import attach_grad_sinks, set_grad_hook
from covey.parallel.shard import local_part, sharded_like, total_norm


class AdamWSettings(TypedDict):
    """Options of MasterAdamW and CompactAdamW, except the learning rate."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float


class Stepped(NamedTuple):
    """The result of an optimizer step."""

    grad_norm: float
    """Gradient norm before clipping."""
    skipped: bool
    """Whether the step was skipped because the gradient was not finite."""


class Optimizer(Protocol):
    """The interface of a policy's optimizer."""

    parameters: dict[str, nn.Parameter]
    """The trained parameters, by name."""

    @property
    def masters(self) -> Mapping[str, torch.Tensor]:
        """The float32 weights by name; an implementation may compute them on access."""

    def step(self, rate: float) -> Stepped:
        """Clip the gradients, take an optimizer step, and clear the gradients."""

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the accumulated gradients by parameter name."""

    def set_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Put back gradients that `gradients` returned before `zero_grad`."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the moments and step counts by parameter name."""

    def load(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Restore weights and moments that MasterAdamW or CompactAdamW has saved."""


class MasterAdamW:
    """AdamW on float32 master weights; each step also updates the model's parameters in place."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self._masters = {name: _master(p) for name, p in self.parameters.items()}
        # AdamW works on this rank's rows, because operations on sharded tensors have a high
        # overhead.
        self._rows = {n: m if local_part(m) is m else _rows(m) for n, m in self._masters.items()}
        attach_grad_sinks((p, m) for p, m in self._rounded() if p.is_cuda)
        self.max_grad_norm = max_grad_norm
        self.adamw = torch.optim.AdamW(
            list(self._rows.values()),
            lr=0.0,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )

    def step(self, rate: float) -> Stepped:
        """Clip the gradients, take an optimizer step, and clear the gradients."""
        total = total_norm([m.grad for m in self._masters.values() if m.grad is not None])
        if total.is_cuda:
            # The device itself skips the step if the gradient is not finite; otherwise it would
            # wait until the host has read the norm.
            self.adamw.found_inf = (~total.isfinite()).float()  # type: ignore[attr-defined]
            self._update(rate, total)
        norm = float(total)
        finite = math.isfinite(norm)
        if finite and not total.is_cuda:
            self._update(rate, total)
        self.zero_grad()
        return Stepped(grad_norm=norm, skipped=not finite)

    def _update(self, rate: float, norm: torch.Tensor) -> None:
        """Clip the gradients, given their norm, and take an optimizer step."""
        self._share_rows()
        rows = self._rows.values()
        torch.nn.utils.clip_grads_with_norm_(rows, self.max_grad_norm, norm)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self._round_to_parameters()

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The float32 weights by name; a float32 parameter is its own master."""
        return self._masters

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the accumulated gradients by parameter name."""
        return {name: master.grad for name, master in self.masters.items()}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Put back gradients that `gradients` returned before `zero_grad`."""
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for tensor in (*self._masters.values(), *self._rows.values()):
            tensor.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Return the moments and step counts by parameter name."""
        tensors = {}
        for name, rows in self._rows.items():
            for key, value in self.adamw.state[rows].items():
                whole = key == "step"  # one number for all rows
                tensors[f"{key}.{name}"] = (
                    value if whole else sharded_like(value, self.masters[name])
                )
        return tensors

    def load(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Restore master weights and moments."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(weights[name])
        self._round_to_parameters()
        for tag, value in state.items():
            key, name = tag.split(".", 1)
            rows = self._rows[name]
            # A compact state has bfloat16 moments.
            dtype = value.dtype if key == "step" else rows.dtype
            self.adamw.state[rows][key] = local_part(value).to(rows.device, dtype)

    @torch.no_grad()
    def _share_rows(self) -> None:
        """Make `_rows` share memory with this rank's shards of the master weights."""
        for name, rows in self._rows.items():
            master = self._masters[name]
            if rows is not master:
                rows.data = local_part(master)  # torch may have moved the shards
                rows.grad = None if master.grad is None else local_part(master.grad)

    def _round_to_parameters(self) -> None:
        pairs = self._rounded()
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def _rounded(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return a (parameter, master) pair for each parameter that has a separate master."""
        pairs = ((p, self.masters[name]) for name, p in self.parameters.items())
        return [(parameter, master) for parameter, master in pairs if master is not parameter]


def _rows(master: nn.Parameter) -> nn.Parameter:
    """Return this rank's rows of a sharded parameter as a view."""
    return nn.Parameter(local_part(master.detach()))


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    master = nn.Parameter(parameter.detach().float())
    if parameter.is_cuda:
        return master  # a gradient sink receives the gradients

    def collect(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.float()
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        parameter.grad = None

    set_grad_hook(parameter, collect)
    return master
