"""The world: the ranks that train together, as the rest of covey knows them.

Every rank builds the same batch and takes the same decisions; only rollouts and passes through the
model are divided. So ranks meet in few places: rollouts are gathered, log-probabilities of the
whole batch put together, gradients and metrics summed, and a signal to stop agreed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from covey.objective.diagnostics import Meter, summary
from covey.stopping import StopSignal

_T = TypeVar("_T")


class World:
    """The processes that train one policy together. The defaults are those of a single one."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    """How many of them are on this machine."""

    @property
    def is_main(self) -> bool:
        """Whether this one writes the run folder and talks to the user."""
        return self.rank == 0

    def share(self, items: Sequence[_T]) -> list[_T]:
        """Return this rank's share of what is to be done."""
        return list(items)

    def unshare(self, done: Sequence[_T]) -> list[_T]:
        """Return what all ranks have made of their shares, in the order of the whole."""
        return list(done)

    def gather(self, item: _T) -> list[_T]:
        """Return the item of every rank, in the order of the ranks."""
        return [item]

    def from_main(self, make: Callable[[], _T]) -> _T:
        """Return what rank 0 makes, on every rank."""
        return make()

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""

    def mean(self, meter: Meter) -> dict[str, float]:
        """Return the metrics of all observations, whichever rank made them."""
        return summary(meter)

    def agree(self, stop: StopSignal) -> bool:
        """Return whether some rank has received a signal; all then know of it."""
        return stop.received is not None

    def barrier(self) -> None:
        """Wait for the other ranks."""

    def device(self, name: str) -> str:
        """Return the device of this rank, for the configured name."""
        return name
