"""Joins and leaves the process group of a run."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from covey.config import Config, to_toml
from covey.errors import ConfigError, CoveyError
from covey.parallel.lifeline import (
    Loss,
    RankError,
    Reported,
    accept,
    connect,
    listen,
)
from covey.parallel.world import ALONE, RankInfo, Ranks, World, rank_info
from covey.records.folder import changed_settings

Say = Callable[[str], None]
_stores: dict[tuple[str, str], Any] = {}
"""The connection to the torch.distributed store at an address and port. It stays open until the
process ends, because a script may train again while another rank still leaves the first run."""
TELL_SECONDS = 10.0
"""Seconds to wait for a response of rank 0 if this rank failed before it joined."""


class _Left:
    runs = 0
    """Number of runs that this process has left; each run has its own keys in the store."""


@contextmanager
def joined_world(config: Config, say: Say = lambda text: None) -> Iterator[World]:
    """Join the process group that the environment variables define, and leave it at exit.

    If one rank fails, all ranks end, and rank 0 prints one line with the reason.
    """
    here = rank_info()
    if here.size == 1 and config.parallel.strategy == "ddp":
        yield ALONE
        return
    world = _join(here, config, say)
    try:
        check_alike(world, "settings", to_toml(config))
        yield world
        world.barrier()
    except CoveyError as error:
        _fail(world, str(error), error.exit_code)
        if world.is_main or not str(error) or isinstance(error, RankError):
            raise
        reported = Reported("")
        reported.exit_code = error.exit_code
        raise reported from None
    except BaseException as error:
        _fail(world, f"{type(error).__name__}: {error}".strip(": "), 1)
        raise
    if world.lifeline is not None:
        world.lifeline.close()
    _distributed().destroy_process_group()
    _Left.runs += 1


def check_alike(world: World, what: str, mine: str) -> None:
    """Raise ConfigError if the text `mine`, such as the settings, differs between ranks."""
    all_of_them = world.gather(mine)
    for rank, other in enumerate(all_of_them):
        if other != all_of_them[0]:
            difference = ""
            if what == "settings":
                changed = changed_settings(*map(tomllib.loads, (all_of_them[0], other)))
                for key, (first, second) in list(changed.items())[:1]:
                    difference = f": {key} is {second!r}, and {first!r} on rank 0"
            raise ConfigError(
                f"ranks: rank {rank} and rank 0 have different {what}{difference}; start every "
                f"rank with the same {what}"
            )


def _join(here: RankInfo, config: Config, say: Say) -> Ranks:
    import torch
    import torch.distributed as dist

    timeout = config.parallel.timeout
    wants_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    world = Ranks(here, None, timeout)
    if wants_gpu and here.size > 1:
        torch.cuda.set_device(world.device(config.model.device))
    backend = "cpu:gloo,cuda:nccl" if wants_gpu else "gloo"
    limit = timedelta(seconds=timeout)
    if here.size == 1:
        dist.init_process_group(
            backend, store=_distributed().HashStore(), rank=0, world_size=1, timeout=limit
        )
        return world
    store = _store(here, timeout)
    _wait_for_all(store, here, timeout, say)
    address = os.environ["MASTER_ADDR"]
    if here.rank == 0:
        server, where = listen(address)
        store.set("lifeline", where)
        lifeline = accept(server, where.split()[1], here.size)
    else:
        port, secret = store.get("lifeline").decode().split()
        lifeline = connect(address, int(port), secret, here.rank)
    try:
        dist.init_process_group(
            backend, store=store, rank=here.rank, world_size=here.size, timeout=limit
        )
    except (RuntimeError, ValueError) as error:
        lifeline.fail(str(error))
        why = str(error).splitlines()[0]
        raise RankError(f"ranks: the ranks cannot connect to each other: {why}") from None
    return Ranks(here, lifeline, timeout)


def _distributed() -> Any:
    """Return torch.distributed as `Any`, because type checkers do not know its store classes."""
    import torch.distributed

    return torch.distributed


def told_by_main(text: str, code: int) -> bool:
    """Tell rank 0 why this rank failed before joining, so that only rank 0 prints the reason.

    Return whether rank 0 has responded.
    """
    try:
        here = rank_info()
        if here.size == 1:
            return False
        if here.rank == 0 and not _agent():
            return False
        store = _store(here, TELL_SECONDS)
        if here.rank == 0:
            store.set("told", "")
            return False
        if not store.check(["told"]):
            store.set("failed", json.dumps({"rank": here.rank, "text": text, "code": code}))
        store.wait(["told"], timedelta(seconds=TELL_SECONDS))
    except (CoveyError, RuntimeError):
        return False
    return True


def _agent() -> bool:
    """Return whether torchrun, instead of rank 0, hosts the torch.distributed store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(here: RankInfo, timeout: float) -> Any:
    dist = _distributed()
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        if (address, port) not in _stores:
            _stores[address, port] = dist.TCPStore(
                address, int(port), is_master=here.rank == 0 and not _agent(),
                wait_for_workers=False, timeout=timedelta(seconds=timeout),
            )  # fmt: skip
        store = _stores[address, port]
        store.set_timeout(timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        what = str(error).splitlines()[0]
        raise RankError(
            f"ranks: rank {here.rank} cannot reach rank 0 at {address}:{port}: {what}"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"covey/{attempt}/{_Left.runs}", store)


def _wait_for_all(store: Any, here: RankInfo, timeout: float, say: Say) -> None:
    """Wait until every rank has joined; raise an error for a duplicate or missing rank."""
    if store.add(f"rank/{here.rank}", 1) > 1:
        raise ConfigError(
            f"ranks: two processes have RANK={here.rank}; every process needs its own RANK"
        )
    store.add("ranks", 1)
    limit, told = time.monotonic() + timeout, False
    while (count := store.add("ranks", 0)) < here.size:
        if store.check(["failed"]):
            loss = Loss(**json.loads(store.get("failed")))
            if here.rank == 0:
                store.set("told", "")
                time.sleep(0.5)  # let ranks read the store, which may end with this process
            raise loss.error(here.rank == 0)
        if time.monotonic() > limit:
            missing = [str(r) for r in range(here.size) if not store.add(f"rank/{r}", 0)]
            raise RankError(
                f"ranks: {count} of {here.size} ranks started within {timeout:g} seconds; rank "
                f"{', '.join(missing)} is missing; start the missing ranks, or set WORLD_SIZE "
                "(torchrun --nproc-per-node and --nnodes) to the number of ranks"
            )
        if not told and time.monotonic() > limit - timeout + 5.0:
            say(f"waiting for {here.size - count} of {here.size} ranks")
            told = True
        time.sleep(0.05)


def _fail(world: World, text: str, code: int) -> None:
    if isinstance(world, Ranks) and world.lifeline is not None:
        world.lifeline.fail(text, code)
