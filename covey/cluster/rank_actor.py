"""A Ray actor that starts one trainer rank as a process on its node, as torchrun does.

The rank runs in its own process, because a rank handles signals itself, and because the GPUs must
be chosen before torch is imported.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from covey.errors import ConfigError
from covey.subprocesses import module_command

LAST_OUTPUT_SECONDS = 2.0
"""Maximum number of seconds to read a rank's output after the rank has ended, while child processes
of the rank keep the pipes open."""
Output = tuple[str, bytes] | int
"""Either a piece of a rank's output, as (stream name, bytes), or the rank's exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The location of an actor: its node, network address and GPUs."""

    node: str
    address: str
    port: int
    """A free port, to which all ranks connect if this actor runs rank 0."""
    gpus: tuple[str, ...]
    """The indices of the actor's GPUs, as Ray numbers them."""


class RankActor:
    """An actor that runs a trainer rank, returns its output and sends it signals."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.written: SimpleQueue[Output] = SimpleQueue()

    def place(self) -> Place:
        """Return the node, network address and GPUs of this actor."""
        import ray

        with socket.create_server(("", 0)) as server:
            port = int(server.getsockname()[1])
        return Place(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            port=port,
            gpus=tuple(str(number) for number in ray.get_gpu_ids()),
        )

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], folder: str) -> int:
        """Start the rank in the working directory `folder`, and return its process id."""
        if not Path(folder).is_dir():
            raise ConfigError(
                f"cluster: the node {socket.gethostname()} has no folder {folder}; put runs, "
                "models and data on a file system that all nodes share"
            )
        command = module_command("covey.cluster.rank_process", str(os.getpid()), *arguments)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=self._follow, args=(self.process,), daemon=True).start()
        return self.process.pid

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        streams = {"stdout": process.stdout, "stderr": process.stderr}
        threads = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in streams.items()
        ]
        for thread in threads:
            thread.start()
        code = process.wait()
        for thread in threads:
            thread.join(LAST_OUTPUT_SECONDS)
        self.written.put(code)

    def _read(self, name: str, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 65536):
            self.written.put((name, data))

    def output(self) -> Output:
        """Wait for the rank's next output or its exit code, which is negative after a signal."""
        return self.written.get()

    def send(self, number: int) -> None:
        """Send a signal to the rank's process."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
