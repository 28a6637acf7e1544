"""Keep a full copy of a sharded policy, for engines that have their own weights.

Checkpoints of a sharded policy are written from a full, unsharded copy of its weights. The native
engine generates with the full copy, and therefore updates the copy. For other engines, the class
`WholeCopy` updates the full copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from covey.engines.native.engine import NativeCopy
from covey.engines.protocol import Engine, EngineInfo, RequestSource, WeightSource


@dataclass(slots=True)
class WholeCopy:
    """Wraps an engine; gathers sharded weights once, for the full copy and for the engine."""

    engine: Engine
    copy: NativeCopy

    @property
    def info(self) -> EngineInfo:
        """Properties of the wrapped engine."""
        return self.engine.info

    def run(self, requests: RequestSource) -> None:
        """Generate until the source has no more requests."""
        self.engine.run(requests)

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Update the full copy, and send the changed weights from the copy to the engine."""
        changed: list[str] = []

        def noted() -> Iterable[tuple[str, torch.Tensor]]:
            for name, weight in weights():
                changed.append(name)
                yield name, weight

        self.copy.load_weights(noted, version)
        own = dict(self.copy.model.model.named_parameters())
        self.engine.load_weights(lambda: [(name, own[name]) for name in changed], version)

    def events(self) -> list[str]:
        """Return the failures that the wrapped engine has repaired."""
        return self.engine.events()

    def close(self) -> None:
        """Free the wrapped engine's resources."""
        self.engine.close()
