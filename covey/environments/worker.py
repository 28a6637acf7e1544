"""A worker process that runs environments, started by `python -m covey.environments.worker FD`.

The worker process first receives the factory of the environments, and then commands. The process
sends each reply as soon as the reply is ready. Steps of different episodes run at the same time,
each in a thread. The async methods of all environments share one event loop.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from covey.environments.drive import Driver, Reply, chained
from covey.environments.environment import prepare as prepare_factory
from covey.scoring.pool_worker import loaded, prepare

THREADS = 256


def serve(connection: Connection) -> None:
    """Run the commands that arrive, until the connection closes.

    The command `None` removes all episodes.
    """
    factory, _ = loaded(connection, prepare_factory)
    episodes: dict[int, Driver] = {}
    sending = threading.Lock()

    def run(key: int, op: str, message: Any, history: Any) -> None:
        """Run a command and send the reply; with a `history`, first replay the episode."""
        past, reply = None, Reply()
        if history is not None:
            prompt, seed, messages = history
            episodes[key] = driver = Driver(factory)
            reply, past = driver.start(prompt, seed), ""
            for earlier in messages:
                past, reply = chained(past, reply), driver.step(earlier)
            past = past if op == "start" else chained(past, reply)
        if op == "step":
            reply = episodes[key].step(message)
        elif op == "end":
            reply = episodes[key].end()
        if reply.done:
            episodes.pop(key, None)
        data = json.dumps({"key": key, "reply": asdict(reply), "past": past}).encode()
        with sending:
            connection.send_bytes(data)

    pool = ThreadPoolExecutor(THREADS)
    while True:
        command = connection.recv()
        if command is None:
            episodes.clear()
        else:
            pool.submit(run, *command)


if __name__ == "__main__":
    prepare()
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        serve(Connection(int(sys.argv[1])))
