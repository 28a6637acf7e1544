"""The model that training started from, kept as it was: in one of three places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from covey.models.adapter import adapter_off
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp
from covey.reference.protocol import Still
from covey.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReference(Still):
    """A second copy of the starting weights, beside the policy's."""

    model: LanguageModel
    temperature: float
    logits_megabytes: float

    def __post_init__(self) -> None:
        self.model.model.requires_grad_(False).eval()

    @property
    def identity(self) -> str:
        """The kind."""
        return "frozen"

    @torch.no_grad()
    def logp(self, batch: Batch) -> LogProbs:
        """Return log-probability and entropy of every trained token under the starting weights."""
        return batch_logp(
            self.model,
            batch,
            temperature=self.temperature,
            logits_megabytes=self.logits_megabytes,
        )


@dataclass(slots=True, kw_only=True)
class OffloadedReference(Still):
    """A second copy of the starting weights, in main memory; it visits the device to compute.

    The weights never change, so nothing is carried back: the parameters point at the copy in main
    memory again, and the device's memory is free for gradients. Buffers are small and stay.
    """

    model: LanguageModel
    temperature: float
    logits_megabytes: float
    device: torch.device = field(init=False)
    home: dict[str, torch.Tensor] = field(init=False)
    visiting: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.model.model.requires_grad_(False).eval()
        self.device = self.model.device
        self.home = {
            # Pinned memory is read by the device itself, several times as fast.
            name: p.data if p.device.type == "cpu" else p.data.cpu().pin_memory()
            for name, p in self.model.model.named_parameters()
        }
        self._place(self.home)

    @property
    def identity(self) -> str:
        """The kind."""
        return "offloaded"

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Bring the weights to the device, once for all calls within."""
        if self.visiting:
            yield
            return
        copies = {n: p.to(self.device, non_blocking=True) for n, p in self.home.items()}
        self._place(copies)
        self.visiting = True
        try:
            yield
        finally:
            self.visiting = False
            self._place(self.home)

    @torch.no_grad()
    def logp(self, batch: Batch) -> LogProbs:
        """Return log-probability and entropy of every trained token under the starting weights."""
        with self.loaded():
            return batch_logp(
                self.model,
                batch,
                temperature=self.temperature,
                logits_megabytes=self.logits_megabytes,
            )

    def _place(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.model.named_parameters():
            parameter.data = weights[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOffReference(Still):
    """The policy's own model with its adapter switched off: no second copy at all."""

    model: LanguageModel
    temperature: float
    logits_megabytes: float

    @property
    def identity(self) -> str:
        """The kind."""
        return "adapter_off"

    @torch.no_grad()
    def logp(self, batch: Batch) -> LogProbs:
        """Return log-probability and entropy of every trained token without the adapter."""
        with adapter_off(self.model) as base:
            return batch_logp(
                base,
                batch,
                temperature=self.temperature,
                logits_megabytes=self.logits_megabytes,
            )
