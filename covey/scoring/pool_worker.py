"""A worker process of a scoring pool, started as `python -m covey.scoring.pool_worker FD`.

The worker first receives the reward, and then batches of jobs. The worker sends the result of each
job as soon as the job is done. Text that a reward prints goes to stderr.
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
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from covey.scoring.job import READY, Job, score_job, score_job_async

PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """Make this process die with its parent, and make it the first target of the OOM killer."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.dup2(2, 1)


def _score_async(connection: Connection, reward: Any, jobs: list[Job], timeout: float) -> None:
    """Score jobs concurrently, each under the time limit. Send None for a job that times out."""

    async def one(number: int, job: Job) -> None:
        results = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                results = await score_job_async(reward, job)
        connection.send((number, results))

    async def run_all() -> None:
        await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs)))

    asyncio.run(run_all())


def loaded(
    connection: Connection, then: Callable[[Any], object] = lambda work: None
) -> tuple[Any, float]:
    """Receive a pickled object and a time limit, and return the unpickled object and the limit.

    The memory limit of this process is set before the object is unpickled. After unpickling, `then`
    is called with the object. If unpickling or `then` raises an exception, this process sends the
    exception's message to the pool and exits.
    """
    path, payload, gigabytes, timeout = connection.recv()
    # The object may be defined in a module on the parent's path, or in the working directory.
    sys.path[:] = [*path, os.getcwd()]
    limit, most = int(gigabytes * 2**30), resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.dont_write_bytecode = True  # bytecode of the user's modules: see trust.import_callable
    try:
        work = pickle.loads(payload)
        then(work)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        sys.exit()
    connection.send(READY)
    return work, timeout


def serve(connection: Connection) -> None:
    """Score jobs until the connection closes."""
    reward, timeout = loaded(connection)
    while True:
        jobs: list[Job] = connection.recv()
        if getattr(reward, "is_async", False):
            _score_async(connection, reward, jobs, timeout)
            continue
        for number, job in enumerate(jobs):
            connection.send((number, score_job(reward, job)))


if __name__ == "__main__":
    prepare()
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        serve(Connection(int(sys.argv[1])))
