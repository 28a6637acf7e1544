"""Chat template rendering in a separate process with limits on time and memory.

A chat template comes with a downloaded tokenizer and is a Jinja program. The sandbox of Jinja
protects Python objects, but does not prevent endless loops or gigabytes of output. A separate
process therefore renders the templates. The operating system limits the time and memory of every
rendering.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from signal import SIGPROF
from typing import Any

import jinja2

from covey.errors import ModelError
from covey.subprocesses import module_command
from covey.types import Message

SECONDS = 5.0
"""Maximum CPU seconds to render one conversation; ordinary templates take milliseconds."""
MEGABYTES = 1024
LONGEST = 64 * 2**20
"""Maximum size of a rendered prompt in bytes."""


FAILED = 1
"""Python's exit code after an uncaught exception."""


class RenderProcess:
    """The process that renders templates; it starts on first use and restarts if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def render(self, request: Mapping[str, Any]) -> str:
        """Render one conversation; raise jinja2.TemplateError if the template refuses it."""
        # Values that are not JSON, such as a token with properties, reach the template as text.
        data = json.dumps(request, default=str).encode()
        with self._lock:
            try:
                connection = self._connected()
                connection.send_bytes(data)
                reply = json.loads(connection.recv_bytes(LONGEST))
            except (EOFError, OSError):
                raise _unusable(self._end()) from None
            except BaseException:  # otherwise the next request would read the old reply
                self._end()
                raise
        if "error" in reply:
            raise jinja2.TemplateError(reply["error"])
        return str(reply["text"])

    def start(self) -> None:
        """Start the process, which takes a second, unless it is already running."""
        with self._lock:
            self._connected()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _connected(self) -> Connection:
        if self._connection is None or self._owner != os.getpid():
            # After a fork, parent and child share the pipe and could read each other's replies.
            return self._start()
        return self._connection

    def _start(self) -> Connection:
        here, there = Pipe()
        command = module_command(
            "covey.models.template_worker", str(there.fileno()), str(SECONDS), str(MEGABYTES)
        )
        self._process = subprocess.Popen(
            command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        there.close()
        self._connection, self._owner = here, os.getpid()
        return here

    def _end(self) -> int:
        """End the process if it is still running, and return its exit code."""
        if self._connection is None or self._process is None or self._owner != os.getpid():
            return 0
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        self._process.kill()
        code = self._process.wait()
        self._process = self._connection = None
        return code


def _unusable(code: int) -> ModelError:
    if code == FAILED:
        return ModelError("model: the process that renders chat templates failed to start")
    why = f"took longer than {SECONDS:g} seconds" if code == -SIGPROF else "took too much memory"
    return ModelError(
        f"model: rendering one prompt with the chat template {why}; set model.template to 'plain', "
        "or to a text with the field {question}"
    )


_PROCESS = RenderProcess()
atexit.register(_PROCESS.close)


def start_rendering() -> None:
    """Start the rendering process in the background."""
    _PROCESS.start()


def render(template: str, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
    """Render a conversation with a chat template and further arguments."""
    return _PROCESS.render(
        {"template": template, "messages": list(messages), "arguments": dict(arguments)}
    )
