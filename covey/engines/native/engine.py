"""The native engine: generation in this process, with the trainer's own weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from covey.engines.native.backend import MODEL_PRECISION, DecodeBackend, Precision, choose_backend
from covey.engines.native.scheduler import Scheduler
from covey.engines.protocol import EngineInfo, RequestSource, WeightSource
from covey.models.device import skip_determinism_check
from covey.models.language_model import LanguageModel


@dataclass(slots=True)
class NativeEngine:
    """The native engine, which generates with the weights of the model being trained."""

    shares_weights: ClassVar[bool] = True
    model: LanguageModel
    precision: Precision = MODEL_PRECISION
    backend: DecodeBackend = field(init=False)
    version: int = field(init=False, default=0)
    scheduler: Scheduler | None = field(init=False, default=None)
    """The scheduler of the current call of `run`; None between calls."""
    paused_before: int = field(init=False, default=0)
    """Number of preemptions in earlier calls of `run`."""

    def __post_init__(self) -> None:
        self.backend = choose_backend(self.model, self.precision)

    @property
    def info(self) -> EngineInfo:
        # In float32, the forward passes of engine and trainer differ by about 1e-6; in 16 bits,
        # rounding makes them differ much more.
        in_float32 = self.model.head.linear.weight.dtype == torch.float32
        return EngineInfo(
            backend=self.backend.description,
            exact_logp=self.precision.exact and in_float32,
            shares_weights=self.shares_weights,
        )

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Record the version of the weights, which trainer and engine share.

        If the request source calls this method during `run`, completions continue with the new
        weights.
        """
        self.version = version
        if self.scheduler is not None:
            self.backend.refresh()
            self.scheduler.change_version(version)

    def events(self) -> list[str]:
        """Return no events, because a failure of this engine also ends the trainer."""
        return []

    @property
    def preemptions(self) -> int:
        return self.paused_before + (self.scheduler.preemptions if self.scheduler else 0)

    def close(self) -> None:
        """Do nothing, because the model belongs to the trainer."""

    @torch.inference_mode()
    @skip_determinism_check()
    def run(self, requests: RequestSource) -> None:
        if not requests.limits.requests:
            return
        training = self.model.model.training
        if training:
            _set_mode(self.model.model, training=False)
        try:
            self.scheduler = Scheduler(self.model, self.backend, requests, self.version)
            self.scheduler.change_version(self.version)  # takes requests on construction
            for completions in self.scheduler.run():
                requests.done(completions)
        finally:
            self.paused_before, self.scheduler = self.preemptions, None
            if training:
                _set_mode(self.model.model, training=True)


class NativeCopy(NativeEngine):
    """A native engine with its own copy of the model, in another thread or process."""

    shares_weights = False

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Copy the weights into the engine's own model."""
        own = dict(self.model.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights():
                own[name].copy_(weight)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # the caller may change the weights now
        NativeEngine.load_weights(self, weights, version)


def _set_mode(model: nn.Module, *, training: bool) -> None:
    """Set training or evaluation mode without `nn.Module.train`, which takes 5 ms for 30 layers."""
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None:
            vars(module)["training"] = training
            left += module._modules.values()
