"""Starts subprocesses that run a module of covey, and ends subprocesses when the parent ends."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from covey.errors import ConfigError

ROOT = str(Path(__file__).parent.parent)
WATCH_SECONDS = 0.5
EXIT_SECONDS = 5.0
"""Maximum seconds to wait for a process to end after its connection has closed."""
START = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of covey from any working directory.

    The command does not use `python -m`, which searches the working directory first. In a
    downloaded folder, `python -m` could run an untrusted file such as json.py.
    """
    return [sys.executable, "-P", "-c", START, ROOT, module, *arguments]


class PipedProcess:
    """A child process that runs a module of covey, and pipes to exchange messages with it.

    The module's arguments are the file descriptors of the child's ends of the pipes, followed by
    `arguments`. The child also inherits the file descriptors in `inherited`. `environment` replaces
    the environment variables of this process.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        pipes: int = 1,
        inherited: tuple[int, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        pairs = [Pipe() for _ in range(pipes)]
        self.connections = [own for own, _ in pairs]
        descriptors = [other.fileno() for _, other in pairs]
        self.process = subprocess.Popen(
            module_command(module, *map(str, descriptors), *arguments),
            stdin=subprocess.DEVNULL,
            pass_fds=[*descriptors, *inherited],
            env=environment,
            start_new_session=True,  # only the trainer gets Ctrl-C, and ends the child in order
        )
        for _, other in pairs:
            other.close()

    def signal_kill(self) -> None:
        """Send SIGKILL to the process and all its children, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and all its children, and close the pipes."""
        self.signal_kill()
        self.process.wait()
        for connection in self.connections:
            connection.close()

    def how_ended(self) -> str:
        """Return how the process ended. Call this method only after a connection has closed."""
        try:
            code = self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "the connection"
        names = {number.value: number.name for number in signal.Signals}
        return f"by signal {names.get(-code, -code)}" if code < 0 else f"with code {code}"


def end_with_parent(parent: int, clean_up: Callable[[], object] = lambda: None) -> None:
    """Start a thread that kills this process and its children when the process `parent` ends.

    Without this thread, the child processes of a killed trainer would keep running and occupy
    memory and GPUs. This process must be a session leader, because the thread kills the whole
    process group.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        clean_up()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def pickled(thing: Any, name: str) -> bytes:
    """Pickle an object for another process; error messages call the object `name`."""
    why = "it is defined in the main script, which every process would run again"
    try:
        payload = pickle.dumps(thing)
        if b"__main__" not in payload:
            return payload
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = str(error)
    raise ConfigError(
        f"{name} cannot be sent to a worker process ({why}); define the function or class in a "
        "module, or set the attribute `quick = True` if the function or class is always fast"
    )
