"""Connects to Ray, and turns errors of Ray and its actors into one-line messages."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from covey.errors import ConfigError, CoveyError, EngineError
from covey.escape import printable, printable_line
from covey.notices import notice

LOCAL = "local"
"""The value of `cluster.address` that starts a Ray cluster on this machine for one run."""
STARTED_BY = "COVEY_RAY_ADDRESS"
"""The environment variable with the address of the Ray cluster that started this trainer rank."""
HOLD_SECONDS = 60.0
REACH_SECONDS = 10.0
LOOK_SECONDS = 1.0
"""Seconds of waiting for an actor between two checks that the Ray cluster still runs."""
GONE = (
    "cluster: the Ray cluster is gone: its processes on this machine or on the head node were "
    "killed; start Ray again, and continue with --resume"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The CPUs and GPUs that an actor needs."""

    cpus: float = 1.0
    gpus: float = 0.0

    def actor(self, kind: type, *arguments: Any, **options: Any) -> Any:
        """Start an actor of the class `kind`, and return its handle.

        The keyword arguments are Ray's options for actors, such as `max_concurrency`.
        """
        import ray

        if not reachable():  # Ray would start a cluster of its own
            raise EngineError(GONE)
        resources = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        return ray.remote(kind).options(**resources, **options).remote(*arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """The number of actors of one kind, such as engines, and the CPUs and GPUs of each actor."""

    name: str
    """The plural name of this kind of actor, such as `engines`."""
    count: int
    need: Need
    """The CPUs and GPUs of each actor."""

    @property
    def text(self) -> str:
        """The number and the name of the actors, such as `1 engine`."""
        return f"{self.count} {self.name.removesuffix('s') if self.count == 1 else self.name}"

    @property
    def whole_gpus(self) -> float:
        """The number of whole GPUs that these actors occupy.

        Several actors share one GPU if each actor needs only a part of a GPU.
        """
        share = self.need.gpus
        return math.ceil(self.count / (1 // share)) if 0 < share < 1 else self.count * share


def check_ray() -> None:
    """Raise an error if Ray is not installed. The error says how to install Ray."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("config: [cluster] needs Ray; install it with pip install 'covey[ray]'")


def connect(address: str, trainer_gpus: int = 0) -> None:
    """Connect to a Ray cluster, or start one on this machine.

    Actors never get the trainer's GPUs. If this function starts Ray, the trainer gets the first
    GPUs of this machine. In an existing cluster, Ray chooses the trainer's GPUs.
    """
    check_ray()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # no warning about GPUs
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get(STARTED_BY, address)
    _check_address(address)
    _Cluster.gone = False
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address == LOCAL:
            with _hidden_gpus(trainer_gpus):
                # Without an address, Ray would look for a cluster that may have ended long ago.
                ray.init(address=LOCAL, include_dashboard=False, **quiet)
            return
        ray.init(address=address, **quiet)
    except Exception as error:  # Ray raises a plain Exception if its processes start too slowly
        raise _unreachable(address, error) from None
    if trainer_gpus and "RANK" not in os.environ:  # torchrun assigns GPUs to its ranks
        _set_aside(trainer_gpus)


def _check_address(address: str) -> None:
    """Raise an error if an address accepts no connections, because Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> ConfigError:
    why = printable_line(str(error), 200)
    if address == LOCAL:
        return ConfigError(
            f"config: cluster.address = 'local', but Ray cannot start on this machine: {why}; "
            "check that `ray start --head` works"
        )
    return ConfigError(
        f"config: cluster.address = {address!r}, but this Ray cluster cannot be reached: {why}; "
        "start Ray with `ray start --head`, or set cluster.address = 'local'"
    )


@contextmanager
def _hidden_gpus(count: int) -> Iterator[None]:
    """Hide the first `count` GPUs from processes that start inside the `with` block."""
    name, before = "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count:
        yield
        return
    import torch

    seen = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
    os.environ[name] = ",".join(seen[count:])
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ |= {} if before is None else {name: before}


class Holder:
    """An actor that reserves GPUs on its node for the trainer, which is not a Ray actor."""

    def gpus(self) -> list[str]:
        """Return the indices of the reserved GPUs."""
        import ray

        return [str(number) for number in ray.get_gpu_ids()]


_held: list[Any] = []
"""References to the `Holder` actors, which keep the actors alive until this process ends."""


def _set_aside(count: int) -> None:
    """Let Ray choose the trainer's GPUs on this machine, before torch initializes CUDA."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    holder = Need(cpus=0, gpus=count).actor(Holder, scheduling_strategy=here)
    try:
        numbers = ray.get(holder.gpus.remote(), timeout=HOLD_SECONDS)
    except ray.exceptions.RayError:
        raise ConfigError(
            f"config: cluster.trainer_gpus = {count}, but Ray has fewer free GPUs on this machine; "
            "lower cluster.trainer_gpus, or free some GPUs"
        ) from None
    _held.append(holder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)


def check_room(actors: Sequence[Actors]) -> None:
    """Raise an error if actors need more CPUs or GPUs than the cluster has in total."""
    import ray

    total = ray.cluster_resources()
    for resource, unit in (("GPU", "gpus"), ("CPU", "cpus")):
        wanted = sum(each.count * getattr(each.need, unit) for each in actors)
        available = total.get(resource, 0.0)
        if wanted > available:
            kinds = ", ".join(each.text for each in actors if each.count)
            raise ConfigError(
                f"config: [cluster] needs {wanted:g} {resource}s for {kinds}, but the Ray cluster "
                f"has only {available:g}; configure fewer actors, or fewer {resource}s per actor"
            )


def answer(reference: Any) -> Any:
    """Return the result of a call of an actor; raise an error if the Ray cluster is gone."""
    import ray

    while True:
        try:
            return ray.get(reference, timeout=LOOK_SECONDS)
        except ray.exceptions.GetTimeoutError:
            check_cluster()


class _Cluster:
    gone = False
    """Whether the processes of the Ray cluster were killed. Calls of Ray would block."""
    looked = 0.0
    """The time of the last check."""


def reachable() -> bool:
    """Return whether this process is connected to a Ray cluster that was still there lately."""
    import ray

    return ray.is_initialized() and not _Cluster.gone


def check_cluster(*, now: bool = False) -> None:
    """Raise EngineError if Ray's processes no longer accept connections; look once a second.

    After the failure of an actor, `now` looks at once: the next call of Ray would end this process.

    Ray's client library ends this process ten seconds to a minute later, without a message and in
    the middle of whatever it does, so a notice is printed at once.
    """
    import ray

    if not reachable():
        raise EngineError(GONE)
    if not now and time.monotonic() < _Cluster.looked + LOOK_SECONDS:
        return
    _Cluster.looked = time.monotonic()
    gone = not _accepts(ray.get_runtime_context().gcs_address)
    # Ray has no public name for the socket of the process that manages this machine's workers.
    node = getattr(ray._private.worker, "_global_node", None)
    if gone or (node is not None and not _accepts(node.raylet_socket_name)):
        _Cluster.gone = True
        notice("Ray's processes were killed; the run ends")
        raise EngineError(GONE)


def _accepts(address: str) -> bool:
    """Return False if nobody listens at `HOST:PORT` or at the path of a socket.

    A network that is slow or away for a moment is left to Ray, which tries again for a minute.
    """
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        try:
            if port.isdecimal():
                socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
            else:
                with socket.socket(socket.AF_UNIX) as local:
                    local.settimeout(REACH_SECONDS)
                    local.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def dead(error: BaseException) -> bool:
    """Return whether an error of a Ray call means that the actor or its node has died."""
    from ray import exceptions

    kinds = (
        exceptions.RayActorError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
        exceptions.ObjectLostError,
        exceptions.OwnerDiedError,
    )
    return isinstance(error, kinds)


def translated(error: Exception, what: str) -> Exception:
    """Turn an error in an actor into a one-line error, with the actor's traceback in `details`."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, CoveyError):
        return cause
    text = COLOURS.sub("", str(error)).strip()
    last = text.splitlines()[-1].strip() if text else type(error).__name__
    line = f"{what} failed: {printable(last)[:300]}; its traceback is in the run's failure.txt"
    problem = EngineError(line)
    problem.details = text
    return problem
