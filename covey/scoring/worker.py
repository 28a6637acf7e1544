"""A process that judges: `python -m covey.scoring.worker FD`.

It is told the reward once, then gets lists of jobs and answers each job as it is done. Whatever a
reward prints goes to standard error, so that it cannot end up in the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from covey.scoring.result import READY, Job, judge, judge_async

PR_SET_PDEATHSIG = 1


def _prepare() -> None:
    """Die with the parent, be the first to go when memory runs out, and keep off its terminal."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)


def _answer_async(connection: Connection, reward: Any, jobs: list[Job], timeout: float) -> None:
    """Judge jobs side by side, each under the time limit: None for one that takes longer."""

    async def one(number: int, job: Job) -> None:
        verdicts = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                verdicts = await judge_async(reward, job)
        connection.send((number, verdicts))

    async def together() -> None:
        await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs)))

    asyncio.run(together())


def serve(connection: Connection) -> None:
    """Judge until the other side goes away."""
    path, payload, gigabytes, timeout = connection.recv()
    # The reward may stand in a module that only the parent's path leads to, or beside the user.
    sys.path[:] = [*path, os.getcwd()]
    limit, most = int(gigabytes * 2**30), resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        reward = pickle.loads(payload)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(READY)
    while True:
        jobs: list[Job] = connection.recv()
        if getattr(reward, "is_async", False):
            _answer_async(connection, reward, jobs, timeout)
            continue
        for number, job in enumerate(jobs):
            connection.send((number, judge(reward, job)))


if __name__ == "__main__":
    _prepare()
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        serve(Connection(int(sys.argv[1])))
