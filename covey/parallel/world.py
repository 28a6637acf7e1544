"""The class `World`, which is the interface to the ranks of a run and the implementation for one
rank.

The subclass for several ranks is `Ranks` in training/parallel/ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from covey.objective.diagnostics import Meter, summary
from covey.stopping import StopSignal

_T = TypeVar("_T")


class World:
    """The processes (ranks) that train one policy together; this base class has a single rank."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    """Number of ranks on this machine."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes to the run folder and prints output."""
        return self.rank == 0

    def share(self, items: Sequence[_T]) -> list[_T]:
        """Return the items that this rank processes."""
        return list(items)

    def unshare(self, done: Sequence[_T]) -> list[_T]:
        """Gather the results of all ranks, in the order of the items given to `share`."""
        return list(done)

    def gather(self, item: _T) -> list[_T]:
        """Return one item from every rank, in the order of the ranks."""
        return [item]

    def from_main(self, make: Callable[[], _T]) -> _T:
        """Call `make` on rank 0, and return its result on every rank."""
        return make()

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""

    def mean(self, meter: Meter) -> dict[str, float]:
        """Return the mean of each metric over the observations of all ranks."""
        return summary(meter.measured())

    def agree(self, stop: StopSignal) -> bool:
        """Return on every rank whether any rank has received a stop signal."""
        return stop.received is not None

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`."""

    def device(self, name: str) -> str:
        """Return the device of this rank, given the device name in the configuration."""
        return name


ALONE = World()
"""The world of a run with a single rank."""
