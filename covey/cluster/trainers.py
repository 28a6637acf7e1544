"""Starts the trainer ranks in Ray actors, connects and watches them, and ends them together."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from covey.cluster.rank_actor import Output, Place, RankActor
from covey.cluster.ray_client import (
    STARTED_BY,
    Need,
    check_cluster,
    reachable,
    translated,
)
from covey.errors import EngineError
from covey.stopping import stopping_signals

CALLS = 3
"""The number of concurrent calls to an actor: one that waits for output, and others that control
the rank."""
POLL_SECONDS = 0.2
END_SECONDS = 40.0
"""After a rank has died, the other ranks have this many seconds to report the death and to end."""


def run_ranks(
    arguments: Sequence[str], *, ranks: int, need: Need, patience: float, threads: int
) -> int:
    """Run a `covey` command as several ranks in Ray actors. Return the exit code of the run."""
    import ray

    group = _placed(ranks, need, patience)
    try:
        run = _Ranks([_actor(group, number, need) for number in range(ranks)])
        run.start(arguments, threads)
        return run.followed()
    finally:
        if reachable():
            ray.util.remove_placement_group(group)  # ends the actors, and with them the ranks


def _placed(ranks: int, need: Need, patience: float) -> Any:
    """Reserve resources for all ranks together, on as few nodes as possible."""
    import ray

    bundle = {"CPU": need.cpus, "GPU": need.gpus}
    bundle = {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}
    group = ray.util.placement_group([bundle] * ranks, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=patience)
    except ray.exceptions.GetTimeoutError:
        ray.util.remove_placement_group(group)
        raise EngineError(
            f"cluster: Ray found no free resources for {ranks} trainer ranks in {patience:g} s; "
            "`ray status` shows the free resources"
        ) from None
    return group


def _actor(group: Any, number: int, need: Need) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    return need.actor(RankActor, scheduling_strategy=place, max_concurrency=CALLS)


def variables_of(places: Sequence[Place], threads: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun would set for each rank.

    Each rank sees the GPUs of all ranks on its node. Each rank uses the GPU whose index equals the
    local rank.
    """
    nodes = [place.node for place in places]
    alone = len(set(nodes)) == 1
    shared = {
        "WORLD_SIZE": str(len(places)),
        "MASTER_ADDR": "127.0.0.1" if alone else places[0].address,
        "MASTER_PORT": str(places[0].port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    found = []
    for rank, place in enumerate(places):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(nodes[:rank].count(place.node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(place.node)),
        }
        gpus = [gpu for other in places if other.node == place.node for gpu in other.gpus]
        found.append(
            {**shared, **own, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
        )
    return found


@dataclass(slots=True)
class _Ranks:
    """Starts the ranks of a run, prints their output and forwards signals to them."""

    actors: list[Any]
    """The Ray actors of the ranks. After `start`, the actor at index i runs rank i."""
    codes: dict[int, int] = field(default_factory=dict)
    """The exit codes of ended ranks, which are negative after a signal or the death of the
    actor."""
    said: SimpleQueue[tuple[int, Output]] = field(default_factory=SimpleQueue)
    received: list[int] = field(default_factory=list)
    """The signals that this process has received but not yet sent to the ranks."""

    def start(self, arguments: Sequence[str], threads: int) -> None:
        """Number the ranks node by node, starting with this machine, and start all ranks."""
        import ray

        try:
            places: list[Place] = ray.get([actor.place.remote() for actor in self.actors])
            here = ray.get_runtime_context().get_node_id()
            order = sorted(
                range(len(places)), key=lambda n: (places[n].node != here, places[n].node)
            )
            self.actors = [self.actors[number] for number in order]
            variables = variables_of([places[number] for number in order], threads)
            shared = {STARTED_BY: ray.get_runtime_context().gcs_address}
            started = [
                actor.start.remote(list(arguments), {**own, **shared}, os.getcwd())
                for actor, own in zip(self.actors, variables, strict=True)
            ]
            ray.get(started)
        except ray.exceptions.RayError as error:
            raise translated(error, "a trainer rank") from None

    def followed(self) -> int:
        """Print the output of the ranks until all ranks have ended. Return the run's exit code."""
        for rank in range(len(self.actors)):
            threading.Thread(target=self._follow, args=(rank,), daemon=True).start()
        limit = float("inf")
        with self._signals():
            while len(self.codes) < len(self.actors) and time.monotonic() < limit:
                self._pass_on()
                self._hear()
                check_cluster()
                if any(self.codes.values()):
                    limit = min(limit, time.monotonic() + END_SECONDS)
        return self._code()

    def _follow(self, rank: int) -> None:
        import ray

        while True:
            try:
                found: Output = ray.get(self.actors[rank].output.remote())
            except ray.exceptions.RayError:
                found = -signal.SIGKILL  # the rank's actor or node is gone
            self.said.put((rank, found))
            if isinstance(found, int):
                return

    def _hear(self) -> None:
        """Wait a short time for a rank's output or exit code.

        Print a rank's output, or store its exit code.
        """
        try:
            rank, found = self.said.get(timeout=POLL_SECONDS)
        except Empty:
            return
        if isinstance(found, int):
            self.codes[rank] = found
            return
        stream = sys.stdout if found[0] == "stdout" else sys.stderr
        stream.flush()
        stream.buffer.write(found[1])  # the output may end in the middle of a multi-byte character
        stream.buffer.flush()

    def _code(self) -> int:
        """Return the run's exit code.

        Raise an error if a rank died and no rank reported an error.
        """
        ended = [self.codes[rank] for rank in sorted(self.codes)]
        if len(ended) == len(self.actors) and not any(ended):
            return 0
        if told := [code for code in ended if code > 0]:
            return told[0]
        rank = next(rank for rank, code in sorted(self.codes.items()) if code)
        raise EngineError(
            f"rank {rank} died, because its process was killed or its node is down; resume from "
            "the last checkpoint with --resume"
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Forward signals to the ranks, which then save a checkpoint and end."""

        def keep(number: int, frame: FrameType | None) -> None:
            self.received.append(number)

        previous = {number: signal.signal(number, keep) for number in stopping_signals()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _pass_on(self) -> None:
        while self.received:
            number = self.received.pop(0)
            for rank, actor in enumerate(self.actors):
                if rank not in self.codes:
                    actor.send.remote(number)
