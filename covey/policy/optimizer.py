"""The AdamW optimizer, with float32 master weights and gradient clipping.

If the model computes in bfloat16, each of its parameters has a float32 copy, called its master.
Gradients are summed in float32 as soon as they are computed, so accumulation over micro-batches
loses no precision. An optimizer step updates the masters, and writes the rounded masters into the
bfloat16 parameters in place. An engine that shares the parameters needs no weight transfer.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import nn

from covey.accel.fused_parameters import (
    GradHolder,
    GradSink,
    attach_grad_sinks,
    fused_view,
    grad_holder,
    set_grad_hook,
)
from covey.errors import ConfigError
from covey.parallel.shard import first_element, local_part, sharded_like, total_norm


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
        for name, rows in self._rows.items():
            master = self._masters[name]
            if rows is not master:
                with torch.no_grad():
                    rows.data = local_part(master)  # torch may have moved the shards
                    rows.grad = None if master.grad is None else local_part(master.grad)
        torch.nn.utils.clip_grads_with_norm_(self._rows.values(), self.max_grad_norm, norm)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self._round_to_parameters()

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        return self._masters

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: master.grad for name, master in self.masters.items()}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient

    def zero_grad(self) -> None:
        for tensor in (*self._masters.values(), *self._rows.values()):
            tensor.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, rows in self._rows.items():
            for key, value in self.adamw.state[rows].items():
                whole = key == "step"  # one number for all rows
                tensors[f"{key}.{name}"] = (
                    value if whole else sharded_like(value, self.masters[name])
                )
        return tensors

    def load(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
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

    def _round_to_parameters(self) -> None:
        pairs = self._rounded()
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def _rounded(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        pairs = ((p, self.masters[name]) for name, p in self.parameters.items())
        return [(parameter, master) for parameter, master in pairs if master is not parameter]


def _rows(master: nn.Parameter) -> nn.Parameter:
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


# An AdamW optimizer that needs 12 bytes per trained bfloat16 parameter instead of 18.
#
#                      float32   compact
#   parameter             2         2      bfloat16, which the model computes with
#   master                4         2      compact: the lower half; the parameter is the upper half
#   sum of gradients      4         4      float32
#   moments               8         4      compact: bfloat16, rounded at random (`adamw`)
#
# Weights lose no precision, because parameter and master are the two 16-bit halves of the exact
# float32 weight. Float32 parameters, such as the shards of a sharded model, stay in float32, and
# only their moments are stored in bfloat16.
#
# The random bits for rounding depend only on the seed, the storage index, the optimizer step and
# the element index. A resumed run therefore rounds in the same way as an uninterrupted run. The
# element index counts within the full (unsharded) parameter, so the number of ranks does not
# change the rounding.


MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of the moments in the state of torch's AdamW, MasterAdamW and CompactAdamW. These
common names let MasterAdamW and CompactAdamW load each other's state."""


class CompactAdamW:
    """AdamW with bfloat16 moments, which updates bfloat16 or float32 parameters in place."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        seed: int,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.seed, self.settings = seed, settings
        for name, parameter in self.parameters.items():
            if parameter.dtype not in (torch.bfloat16, torch.float32):
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise ConfigError(
                    "config: optimizer.state = 'compact' needs weights in bfloat16 or float32, but "
                    f"the tensor {name} is in {dtype}; set optimizer.state = 'float32'"
                )
        attach_grad_sinks(
            (p, GradHolder(p)) for p in self.parameters.values() if p.dtype == torch.bfloat16
        )
        self.stores = _stores(self.parameters)
        self._kept = {name: kept for store in self.stores for name, kept in store.split().items()}

    def step(self, rate: float) -> Stepped:
        found = [(s, grad) for s in self.stores if (grad := s.gradient()) is not None]
        norm = float(total_norm([grad for _, grad in found]))
        finite = math.isfinite(norm)
        if finite:
            # As in torch's clip_grad_norm_.
            clip = min(1.0, self.settings["max_grad_norm"] / (norm + 1e-6))
            for store, grad in found:
                store.steps += 1
                numbers = numbers_of(self.settings, step=store.steps, rate=rate, clip=clip)
                store.step(grad, numbers, self.seed)
        self.zero_grad()
        return Stepped(grad_norm=norm, skipped=not finite)

    @property
    def masters(self) -> Mapping[str, torch.Tensor]:
        return _Masters(self.parameters, self._kept)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: grad_holder(p).grad for name, p in self.parameters.items()}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        for name, gradient in gradients.items():
            grad_holder(self.parameters[name]).grad = gradient

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            grad_holder(parameter).grad = None

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for store in self.stores:
            for name in store.names:
                tensors[f"step.{name}"] = torch.tensor(float(store.steps))
                for key in MOMENTS:
                    moment = self._kept[name][key].view(torch.bfloat16)
                    tensors[f"{key}.{name}"] = sharded_like(moment, self.parameters[name])
        return tensors

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Restore weights and moments; float32 moments are rounded to the nearest bfloat16."""
        for name, parameter in self.parameters.items():
            kept = self._kept[name]
            if "low" in kept:
                bits, low = parameter.data.view(torch.int16).view(-1), kept["low"].view(-1)
                values = weights[name].reshape(-1)
                for start in range(0, len(bits), CHUNK):
                    part = slice(start, start + CHUNK)
                    upper, lower = split(values[part].float().to(bits.device))
                    bits[part].copy_(upper)
                    low[part].copy_(lower)
            else:
                parameter.copy_(weights[name])
            for key in MOMENTS:
                if (value := state.get(f"{key}.{name}")) is not None:
                    kept[key].view(torch.bfloat16).copy_(local_part(value))
        for store in self.stores:
            steps = [state.get(f"step.{name}") for name in store.names]
            store.steps = max((int(s) for s in steps if s is not None), default=0)


class _Store:
    """Parameters that share one storage and are updated together, with their optimizer state."""

    def __init__(self, number: int, names: Sequence[str], parameters: Sequence[Any]) -> None:
        self.number, self.names, self.parameters = number, list(names), list(parameters)
        self.steps = 0
        blank = torch.zeros(self.weight().shape, dtype=torch.int16, device=parameters[0].device)
        self.low = blank if parameters[0].dtype == torch.bfloat16 else None
        self.moments = torch.zeros_like(blank), torch.zeros_like(blank)

    def weight(self) -> torch.Tensor:
        """Return all parameters as one tensor; bfloat16 values appear as int16 bits.

        The tensor includes only this rank's rows of a sharded parameter.
        """
        found = fused_view([local_part(parameter) for parameter in self.parameters])
        assert found is not None, "parameters were moved apart"
        return found.view(torch.int16) if found.dtype == torch.bfloat16 else found

    def gradient(self) -> torch.Tensor | None:
        """Return the accumulated float32 gradient, or None if no gradient was computed."""
        sink: GradSink | None = getattr(self.parameters[0], "grad_sink", None)
        grad: torch.Tensor | None = self.parameters[0].grad if sink is None else sink.total
        return grad

    def step(self, grad: torch.Tensor, numbers: Numbers, seed: int) -> None:
        first, second = self.moments
        if not first.numel():  # a shard without rows
            return
        with torch.no_grad():
            step = adamw
            if grad.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
                from covey.accel.kernels.adamw import adamw as step  # needs Triton
            step(
                self.weight().view(-1),
                None if self.low is None else self.low.view(-1),
                local_part(grad).contiguous().view(-1),
                (first.view(-1), second.view(-1)),
                numbers,
                keys_of(seed, self.number, self.steps),
                first_element(self.parameters[0]),
            )

    def split(self) -> dict[str, dict[str, torch.Tensor]]:
        kept = dict(zip(MOMENTS, self.moments, strict=True))
        if self.low is not None:
            kept["low"] = self.low
        if len(self.names) == 1:
            return {self.names[0]: kept}
        rows = [len(p) for p in self.parameters]
        parts = {key: value.split(rows) for key, value in kept.items()}
        return {n: {k: v[i] for k, v in parts.items()} for i, n in enumerate(self.names)}


class _Masters(Mapping[str, torch.Tensor]):
    """A mapping from parameter names to float32 weights, which are computed on access."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], kept: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        self.parameters, self.kept = parameters, kept

    def __getitem__(self, name: str) -> torch.Tensor:
        weight, low = self.parameters[name].detach(), self.kept[name].get("low")
        return weight if low is None else whole(weight.view(torch.int16), low)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def _stores(parameters: Mapping[str, nn.Parameter]) -> list[_Store]:
    """Build one numbered `_Store` for each set of parameters that share a storage."""
    runs: dict[int, list[tuple[int, str, nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        sink: GradSink | None = getattr(parameter, "grad_sink", None)
        place: int = getattr(parameter, "grad_part", 0)
        runs.setdefault(id(parameter if sink is None else sink), []).append(
            (place, name, parameter)
        )
    ordered = [sorted(run, key=lambda entry: entry[0]) for run in runs.values()]
    return [
        _Store(number, [name for _, name, _ in run], [p for _, _, p in run])
        for number, run in enumerate(ordered)
    ]


# AdamW step on a compact state, in torch operations.
#
# A float32 weight is stored in two halves of 16 bits. The upper half is the nearest bfloat16
# number, with which the model computes; the lower half is the difference between the weight's bits
# and the upper half, so the two together are exact. Moments are stored in bfloat16 with stochastic
# rounding, which is correct on average. Rounding to nearest would freeze the second moment: with
# beta2 = 0.999, a step reduces it by at most a thousandth of its value, while neighbouring bfloat16
# numbers differ by 1/256 to 1/128 of their value. The Triton kernel in covey/accel/kernels/adamw.py
# gives the same results as this module.

CHUNK = 1 << 17
"""Number of elements that are processed at a time, so that temporary tensors stay small."""


class Numbers(NamedTuple):
    """Scalar arguments of the AdamW kernel for one optimizer step."""

    clip: float
    """Factor that clips the gradients. The AdamW step multiplies the gradients by `clip`, so
    clipping needs no separate pass over the gradients."""
    beta1: float
    rest1: float
    """1 - beta1."""
    beta2: float
    rest2: float
    keep: float
    """`1 - rate * weight_decay`, the factor by which weight decay shrinks the weights."""
    size: float
    """The learning rate, divided by the first moment's bias correction."""
    inverse_root: float
    """`1 / sqrt(1 - beta2 ** step)`, the bias correction of the second moment's square root."""
    eps: float


def numbers_of(settings: AdamWSettings, *, step: int, rate: float, clip: float) -> Numbers:
    """Return the AdamW scalars for optimizer step number `step`, which counts from 1."""
    beta1, beta2 = settings["betas"]
    return Numbers(
        clip=clip,
        beta1=beta1,
        rest1=1 - beta1,
        beta2=beta2,
        rest2=1 - beta2,
        keep=1 - rate * settings["weight_decay"],
        size=rate / (1 - beta1**step),
        inverse_root=1 / math.sqrt(1 - beta2**step),
        eps=settings["eps"],
    )


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 values as two int16 halves: the nearest bfloat16, and the remaining bits.

    Ties are rounded away from 0. A NaN stays a NaN, but its lower bits become 0.
    """
    bits = values.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    lower = bits - (upper << 16)
    broken = values.isnan()
    upper = upper.where(~broken, (bits >> 16) | 0x40)
    return upper.short(), lower.masked_fill_(broken, 0).short()


def whole(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    return (upper.int() << 16).add_(lower).view(torch.float32)


def keys_of(seed: int, number: int, step: int) -> tuple[int, int]:
    """Return two 31-bit keys for the random bits of optimizer step `step` in storage `number`."""
    digest = hashlib.blake2b(f"{seed}/{number}/{step}".encode(), digest_size=8).digest()
    first, second = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    return first >> 1, second >> 1


def random_bits(
    start: int, count: int, keys: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Return a random int32 for each of `count` elements, beginning at index `start`."""
    signed = (start + 2**31) % 2**32 - 2**31
    bits = torch.arange(count, dtype=torch.int32, device=device).add_(signed)
    for key in keys:
        bits.bitwise_xor_(key)
        bits ^= (bits >> 16) & 0xFFFF
        bits *= 0x7FEB352D
        bits ^= (bits >> 15) & 0x1FFFF
        bits *= 0x846CA68B - 2**32  # the same bits, signed
        bits ^= (bits >> 16) & 0xFFFF
    return bits


def rounded(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round values to bfloat16 stochastically, and return the bits as int16.

    `random` contains a number from 0 to `2 ** 16 - 1` for each value. Each random number is added
    to the lower 16 bits of its float32 value, and then the lower 16 bits are dropped. If the
    addition carries into the upper bits, the value is rounded up. The probability of a carry is
    proportional to the lower bits, so the rounding is unbiased.
    """
    bits = values.view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    return ((bits + random * finite) >> 16).short()


def adamw(
    weight: torch.Tensor,
    low: torch.Tensor | None,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    numbers: Numbers,
    keys: tuple[int, int],
    first_index: int = 0,
) -> None:
    """Take an AdamW step in place on flat tensors.

    Moments are bfloat16 numbers, stored as int16 bits. The update uses the new moments before they
    are rounded. `weight` and `low` are the two int16 halves of the weights; if `low` is None,
    `weight` is float32. Element `i` uses the random bits with index `first_index + i`.
    """
    n = numbers
    for start in range(0, weight.numel(), CHUNK):
        part = slice(start, min(start + CHUNK, weight.numel()))
        first, second = (moment[part] for moment in moments)
        value = weight[part] if low is None else whole(weight[part], low[part])
        pull = grad[part] * n.clip
        mean = first.view(torch.bfloat16).float().mul_(n.beta1).add_(pull * n.rest1)
        square = second.view(torch.bfloat16).float().mul_(n.beta2)
        square.add_(pull.mul_(pull).mul_(n.rest2))
        # Computed in float64, because torch's float32 square root is sometimes one bit off.
        root = square.double().sqrt_().float()
        move = mean / root.mul_(n.inverse_root).add_(n.eps)
        value.mul_(n.keep).sub_(move.mul_(n.size))
        random = random_bits(first_index + start, len(value), keys, value.device)
        first.copy_(rounded(mean, random & 0xFFFF))
        second.copy_(rounded(square, (random >> 16) & 0xFFFF))
        if low is not None:
            upper, lower = split(value)
            weight[part].copy_(upper)
            low[part].copy_(lower)
