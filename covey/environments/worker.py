"""A worker process that runs environments: `python -m covey.environments.worker FD`.

The process first receives the factory that makes environments, and then receives commands. The
process sends each reply as soon as the reply is ready. Steps of different episodes run at the same
time, each in a thread. The async methods of all environments share one event loop.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from covey.environments.drive import Driver, Reply, chained
from covey.environments.environment import Factory
from covey.environments.environment import prepare as prepare_factory
from covey.environments.host import settle
from covey.scoring.pool_worker import loaded, prepare

THREADS = 256


@dataclass(slots=True)
class Server:
    """The server that runs the episodes of this process."""

    connection: Connection
    factory: Factory
    episodes: dict[int, Driver] = field(default_factory=dict)
    sending: threading.Lock = field(default_factory=threading.Lock)

    def run(self, key: int, op: str, message: Any, history: Any) -> None:
        """Run a command and send its reply.

        If the command has a `history`, first replay the episode from that history.
        """
        past, reply = None, Reply()
        if history is not None:
            prompt, seed, messages = history
            self.episodes[key] = driver = Driver(self.factory, settle)
            reply, past = driver.start(prompt, seed), ""
            for earlier in messages:
                past, reply = chained(past, reply), driver.step(earlier)
            past = past if op == "start" else chained(past, reply)
        if op == "step":
            reply = self.episodes[key].step(message)
        elif op == "end":
            reply = self.episodes[key].end()
        if reply.done:
            self.episodes.pop(key, None)
        data = json.dumps({"key": key, "reply": asdict(reply), "past": past}).encode()
        with self.sending:
            self.connection.send_bytes(data)


def serve(connection: Connection) -> None:
    """Run commands until the connection closes. The command `None` removes all episodes."""
    factory, _ = loaded(connection, prepare_factory)
    server = Server(connection, factory)
    pool = ThreadPoolExecutor(THREADS)
    while True:
        command = connection.recv()
        if command is None:
            server.episodes.clear()
        else:
            pool.submit(server.run, *command)


if __name__ == "__main__":
    prepare()
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        serve(Connection(int(sys.argv[1])))
