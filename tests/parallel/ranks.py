"""Real ranks for tests: forked processes that join over gloo, and what they return."""

from __future__ import annotations

import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import PATIENCE, forked


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def start_ranks(size: int, work: Callable[[int], int], folder: Path) -> list[int]:
    """Start processes that each do `work` as one of several ranks; return their ids."""
    import torch.distributed.checkpoint  # noqa: F401 - once here, and not in every rank

    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)

    def as_rank(rank: int) -> Callable[[], int]:
        def begin() -> int:
            os.environ.update(environment(rank, size, port))
            try:
                return work(rank)
            except BaseException:
                traceback.print_exc()
                raise

        return begin

    return [forked(as_rank(rank), folder / f"{rank}.log") for rank in range(size)]


def codes_of(ranks: list[int], patience: float = 4 * PATIENCE) -> list[int]:
    """Wait for processes; return their exit codes, as a shell has them."""
    limit, codes = time.monotonic() + patience, {}
    while len(codes) < len(ranks):
        for pid in ranks:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    code = os.waitstatus_to_exitcode(status)
                    codes[pid] = code if code >= 0 else 128 - code
        assert time.monotonic() < limit, "a rank hangs"
        time.sleep(0.01)
    return [codes[pid] for pid in ranks]


def run_ranks(size: int, work: Callable[[int], Any], folder: Path) -> list[Any]:
    """Do `work` as each of several ranks, and return what they return."""

    def kept(rank: int) -> int:
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(work(rank)))
        return 0

    codes = codes_of(start_ranks(size, kept, folder))
    logs = "".join((folder / f"{rank}.log").read_text() for rank in range(size))
    assert codes == [0] * size, logs
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]
