"""The reference policy in a Ray actor, which uses no memory of the trainer's GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from covey.cluster.ray_client import Need, answer, check_cluster, dead, translated
from covey.models.logp import LogProbs
from covey.reference.protocol import Reference
from covey.types import Batch


class ReferenceActor:
    """A Ray actor that holds a frozen reference policy."""

    def __init__(self, build: Callable[[], Reference]) -> None:
        self.reference = build()

    def identity(self) -> str:
        """Return a short description of the reference policy."""
        return self.reference.identity

    def logp(self, batch: Batch) -> LogProbs:
        """Return the log-probabilities and the entropies of a batch as CPU tensors."""
        return LogProbs(*(values.cpu() for values in self.reference.logp(batch)))


@dataclass(slots=True, kw_only=True)
class RayReference(Reference):
    """A reference policy in a Ray actor; if the actor dies, Covey starts a new actor."""

    build: Callable[[], Reference]
    need: Need
    restarts: int
    handle: Any = field(default=None, init=False)
    told: str = field(default="", init=False)
    died: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.handle = self.need.actor(ReferenceActor, self.build)
        self.told = self._ask("identity")

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        check_cluster()
        while True:
            try:
                found = answer(getattr(self.handle, method).remote(*arguments))
                self.died = 0
                return found
            except ray.exceptions.RayError as error:
                check_cluster(now=True)
                if not dead(error) or self.died >= self.restarts:
                    raise translated(error, "reference") from None
                self.died += 1
                self.handle = self.need.actor(ReferenceActor, self.build)

    @property
    def identity(self) -> str:
        """The description of the reference policy in the actor."""
        return self.told

    def logp(self, batch: Batch) -> LogProbs:
        """Return the log-probability and the entropy of every trained token under the reference."""
        found = self._ask("logp", batch.to("cpu"))
        return LogProbs(*(values.to(batch.tokens.device) for values in found))
