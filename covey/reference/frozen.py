"""Reference policies with the starting weights: a copy of these weights, or the policy without its
adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from covey.models.adapter import adapter_off
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp
from covey.reference.protocol import Reference
from covey.types import Batch


@dataclass(slots=True, kw_only=True)
class FrozenReference(Reference):
    """A reference that keeps a second copy of the starting weights on the device."""

    kind: ClassVar[str] = "frozen"
    borrowed: ClassVar[bool] = False
    """Whether the reference uses the policy's own model, which must not be frozen."""

    model: LanguageModel
    temperature: float
    logits_megabytes: float

    def __post_init__(self) -> None:
        if not self.borrowed:
            self.model.model.requires_grad_(False).eval()

    @property
    def identity(self) -> str:
        """The name of this kind of reference."""
        return self.kind

    @torch.no_grad()
    def logp(self, batch: Batch) -> LogProbs:
        """Return the log-probability and the entropy of every trained token under the reference."""
        with self.loaded():
            return self._logp(self.model, batch)

    def _logp(self, model: LanguageModel, batch: Batch) -> LogProbs:
        return batch_logp(
            model, batch, temperature=self.temperature, logits_megabytes=self.logits_megabytes
        )


@dataclass(slots=True, kw_only=True)
class OffloadedReference(FrozenReference):
    """A reference with weights in main memory, which are copied to the device for `logp`.

    The weights never change, so nothing is copied back. After `logp`, the parameters point to main
    memory again, and the device memory is free for gradients. The buffers of the model are small,
    so they stay on the device.
    """

    kind: ClassVar[str] = "offloaded"

    device: torch.device = field(init=False)
    host: dict[str, torch.Tensor] = field(init=False)
    on_device: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        FrozenReference.__post_init__(self)
        self.device = self.model.device
        self.host = {
            # The device reads pinned memory directly, which is several times as fast.
            name: p.data if p.device.type == "cpu" else p.data.cpu().pin_memory()
            for name, p in self.model.model.named_parameters()
        }
        self._point_to(self.host)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Copy the weights to the device once for all calls of `logp` in a `with` block."""
        if self.on_device:
            yield
            return
        self._point_to({n: p.to(self.device, non_blocking=True) for n, p in self.host.items()})
        self.on_device = True
        try:
            yield
        finally:
            self.on_device = False
            self._point_to(self.host)

    def _point_to(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.model.named_parameters():
            parameter.data = weights[name]


@dataclass(slots=True, kw_only=True)
class CurrentPolicy(FrozenReference):
    """The policy itself with its current weights, as the teacher of self-distillation."""

    kind: ClassVar[str] = "current"
    borrowed: ClassVar[bool] = True


@dataclass(slots=True, kw_only=True)
class AdapterOffReference(FrozenReference):
    """The policy's model with its adapter switched off, which needs no second copy."""

    kind: ClassVar[str] = "adapter_off"
    borrowed: ClassVar[bool] = True

    @torch.no_grad()
    def logp(self, batch: Batch) -> LogProbs:
        """Return the log-probability and entropy of every trained token, without the adapter."""
        with adapter_off(self.model) as base:
            return self._logp(base, batch)
