"""An engine elsewhere, for a sharded policy: the whole weights are kept here too.

Checkpoints of a sharded policy are written from a whole copy of it, which the native engine
generates with. With another engine nothing else would renew that copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from covey.engines.native.engine import NativeCopy
from covey.engines.protocol import Engine, EngineInfo, RequestSource, WeightSource


@dataclass(slots=True)
class WholeCopy:
    """Loads weights into the copy, and from there into the engine: they are gathered once."""

    engine: Engine
    copy: NativeCopy

    @property
    def info(self) -> EngineInfo:
        """That of the engine."""
        return self.engine.info

    def run(self, requests: RequestSource) -> None:
        """Generate until the source has no more requests."""
        self.engine.run(requests)

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Renew the copy, and give the engine those weights of it that have changed."""
        changed: list[str] = []

        def noted() -> Iterable[tuple[str, torch.Tensor]]:
            for name, weight in weights():
                changed.append(name)
                yield name, weight

        self.copy.load_weights(noted, version)
        own = dict(self.copy.model.model.named_parameters())
        self.engine.load_weights(lambda: [(name, own[name]) for name in changed], version)

    def events(self) -> list[str]:
        """Return what the engine repaired."""
        return self.engine.events()

    def close(self) -> None:
        """Free what the engine holds."""
        self.engine.close()
