"""Rendering chat templates in a process of their own, which a template may take down.

A chat template comes with a downloaded tokenizer and is a program in Jinja. transformers keeps it
from Python's objects, but not from loops without end or texts of gigabytes. So the process has a
limit on the time and the memory of every render, kept by the kernel: no template can hold it up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
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
"""Processor time for one render; templates take milliseconds."""
MEGABYTES = 1024
LONGEST = 64 * 2**20
"""Bytes of a rendered prompt."""


FAILED = 1
"""What Python exits with after an error of its own."""


class Renders:
    """The process, started when it is first needed and again after a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def render(self, request: Mapping[str, Any]) -> str:
        """Render one conversation; jinja2.TemplateError: the template refuses it."""
        # What JSON does not know, such as a token with properties, the template sees as text.
        data = json.dumps(request, default=str).encode()
        with self._lock:
            try:
                connection = self._connection or self._start()
                connection.send_bytes(data)
                reply = json.loads(connection.recv_bytes(LONGEST))
            except (EOFError, OSError):
                raise _unusable(self._end()) from None
            except BaseException:  # an interrupt: what comes next would be the old reply
                self._end()
                raise
        if "error" in reply:
            raise jinja2.TemplateError(reply["error"])
        return str(reply["text"])

    def start(self) -> None:
        """Start the process, if it is not running: it needs a second until it renders."""
        with self._lock:
            if self._connection is None:
                self._start()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> Connection:
        here, there = Pipe()
        command = module_command(
            "covey.models.render_worker", str(there.fileno()), str(SECONDS), str(MEGABYTES)
        )
        self._process = subprocess.Popen(
            command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        there.close()
        self._connection = here
        return here

    def _end(self) -> int:
        """End the process and return its exit code: its own, if it has ended already."""
        if self._connection is None or self._process is None:
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
        return ModelError("model: the process that renders chat templates does not start")
    why = f"took longer than {SECONDS:g} seconds" if code == -SIGPROF else "took too much memory"
    return ModelError(
        f"model: its chat template {why} for one prompt; set model.template = 'plain', or a text "
        "with {question}"
    )


_RENDERS = Renders()
atexit.register(_RENDERS.close)


def start_rendering() -> None:
    """Start what renders templates beside whatever else takes its time."""
    _RENDERS.start()


def render(template: str, messages: Sequence[Message], told: Mapping[str, Any]) -> str:
    """Render a conversation by a chat template, which is told of other things by name."""
    return _RENDERS.render({"template": template, "messages": list(messages), "told": dict(told)})
