"""The native engine with a copy of the weights: its model belongs to no trainer in this process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import WeightSource


@dataclass(slots=True)
class OwnWeightsEngine(NativeEngine):
    """Generates from a model that only `load_weights` changes."""

    @torch.no_grad()
    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Copy the weights into the model."""
        own = dict(self.model.model.named_parameters())
        for name, weight in weights():
            own[name].copy_(weight)
        NativeEngine.load_weights(self, weights, version)
