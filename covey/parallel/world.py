"""The class `World`, which is the interface to the ranks of a run and the implementation for one
rank, and its subclass `Ranks` for several ranks.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from covey.errors import ConfigError, ModelError
from covey.objective.diagnostics import Measured, Meter, summary
from covey.parallel.lifeline import Lifeline, RankError
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


# Communication between the ranks of a run over torch.distributed.
#
# Every rank builds the same batch and makes the same decisions. Only the generation of rollouts and
# the passes through the model are divided among ranks. Ranks communicate to gather rollouts and
# log-probabilities, to sum gradients and metrics, and to agree on a stop signal.


# The rank of this process, from torchrun's environment variables.

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The rank of this process and the number of ranks, in the run and on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_info() -> RankInfo:
    """Read the rank from torchrun's environment variables; without them, return rank 0 of 1."""
    given = {name: os.environ[name] for name in NAMES if os.environ.get(name)}
    if not given.keys() & {"RANK", "WORLD_SIZE"}:
        return RankInfo()
    for name, text in given.items():
        if not text.isascii() or not text.isdigit():
            raise ConfigError(
                f"ranks: {name} = {text!r} is not a number; start the ranks with torchrun"
            )
    for name in NAMES[:2]:
        if name not in given:
            other = next(iter(given))
            raise ConfigError(
                f"ranks: the environment variable {other} is set, but {name} is not; start the "
                f"ranks with torchrun, or unset {other} to train with one process"
            )
    numbers = {name: int(text) for name, text in given.items()}
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    numbers = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, **numbers}
    for name, size_name in (NAMES[:2], NAMES[2:]):
        if numbers[name] >= numbers[size_name]:
            raise ConfigError(
                f"ranks: {name} = {numbers[name]} must be less than {size_name} = "
                f"{numbers[size_name]}, because ranks start at 0"
            )
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if size > 1 and lacking:
        raise ConfigError(
            f"ranks: the environment variable {lacking[0]} is not set; start the ranks with "
            "torchrun"
        )
    local_rank, local_size = numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"]
    return RankInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


# Several ranks over torch.distributed.
#
# While a rank waits for other ranks, it still handles signals and notices failed ranks
# (lifeline.py).


class Ranks(World):
    """The ranks of torch.distributed's default process group."""

    def __init__(self, info: RankInfo, lifeline: Lifeline | None, timeout: float) -> None:
        self.info, self.lifeline, self.timeout = info, lifeline, timeout
        self.rank, self.size, self.local_size = info.rank, info.size, info.local_size

    def share(self, items: Sequence[_T]) -> list[_T]:
        """Return every `size`-th item, beginning with the item at index `rank`."""
        return list(items[self.rank :: self.size])

    def unshare(self, done: Sequence[_T]) -> list[_T]:
        parts = self.gather(list(done))
        total = sum(len(part) for part in parts)
        return [parts[number % self.size][number // self.size] for number in range(total)]

    def gather(self, item: _T) -> list[_T]:
        data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        self.wait(dist.all_gather(sizes, torch.tensor([len(data)]), async_op=True))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self.wait(dist.all_gather(found, padded, async_op=True))
        return [
            pickle.loads(each[: int(size)].numpy().tobytes())
            for each, size in zip(found, sizes, strict=True)
        ]

    def from_main(self, make: Callable[[], _T]) -> _T:
        return self.gather(make() if self.is_main else None)[0]  # type: ignore[return-value]

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        self.wait(self.summing(tensor))

    def summing(self, tensor: torch.Tensor) -> Any:
        """Start to sum a tensor over the ranks; return a handle for `wait`."""
        self.check()
        try:
            return dist.all_reduce(tensor, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from None

    def mean(self, meter: Meter) -> dict[str, float]:
        return summary(Measured.joined(self.gather(meter.measured())))

    def agree(self, stop: StopSignal) -> bool:
        received = [name for name in self.gather(stop.received) if name is not None]
        if received and stop.received is None:
            stop.received = received[0]
        return bool(received)

    def barrier(self) -> None:
        self.gather(None)

    def device(self, name: str) -> str:
        """Return the device of this rank; each rank of a machine has its own GPU."""
        if self.size == 1:
            return name
        found = torch.cuda.device_count()
        if name == "cpu" or (name == "auto" and not found):
            return "cpu"
        if found <= self.info.local_rank:
            raise ModelError(
                f"model: rank {self.rank} has no GPU: this machine has {found} GPUs and "
                f"{self.local_size} ranks; start torchrun with --nproc-per-node {found or 1}, or "
                "set model.device = 'cpu'"
            )
        return f"cuda:{self.info.local_rank}"

    def check(self) -> None:
        if self.lifeline is not None:
            self.lifeline.check()

    def wait(self, work: Any) -> None:
        limit, pause = time.monotonic() + self.timeout, 0.0
        try:
            while not work.is_completed():
                self.check()
                if time.monotonic() > limit:
                    raise RankError(
                        f"rank {self.rank} has waited {self.timeout:g} seconds for the other "
                        "ranks; if their part of a step may take longer, raise parallel.timeout"
                    )
                time.sleep(pause)
                pause = min(0.002, pause + 2e-5)
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> Exception:
        """Return the error for a failed collective call, with the failed rank if it is known."""
        if isinstance(error, torch.OutOfMemoryError):
            return error
        limit = time.monotonic() + 5.0
        while self.lifeline is not None and time.monotonic() < limit:
            self.check()
            time.sleep(0.05)
        return RankError(f"ranks: communication failed: {str(error).splitlines()[0]}")
