"""The process that renders chat templates, and the worker's side of it.

The command is `python -m covey.models.template_worker FD SECONDS MB`. FD is the file descriptor of
the worker's connection, SECONDS is the CPU time limit of a request, and MB is the memory limit. The
worker reads one JSON request after another, and ends when the connection closes. The worker
compiles templates as transformers does, but does not import transformers or torch, which would take
a second.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from covey.errors import ModelError
from covey.subprocesses import PipedProcess

TODAY = datetime.date(2024, 7, 26)
"""The date that chat templates print as today's date. The printed date never changes, so that a
resumed run renders the same prompts."""


TOO_BIG = 3
"""Exit code of a worker that exceeded the memory limit."""


class _Generation(Extension):
    """Jinja extension for the tag {% generation %}, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return str(caller())


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON, without the HTML escapes that Jinja's `tojson` adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": TODAY.strftime}
    return environment.from_string(template)


def render(request: dict[str, Any]) -> dict[str, str]:
    """Return the rendered conversation as `text`, or the template's error as `error`."""
    try:
        known = {"tools": None, "documents": None, "add_generation_prompt": False}
        text = _compiled(request["template"]).render(
            messages=request["messages"], **{**known, **request["arguments"]}
        )
    except MemoryError:
        sys.exit(TOO_BIG)
    except Exception as error:  # a template is a program and may raise anything
        name = type(error).__name__
        own = type(error).__module__.startswith("jinja2")
        return {"error": str(error) if own else f"{name}: {error}"}
    return {"text": text}


def serve(connection: Connection, seconds: float, megabytes: int) -> None:
    """Render one request after another until the connection closes.

    The operating system enforces the time limit and the memory limit.
    """
    limit = megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        request = json.loads(connection.recv_bytes())
        # Without a handler the signal ends the process, even inside one long operation.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = json.dumps(render(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(reply)


# Chat template rendering in a separate process with limits on time and memory.
#
# A chat template is a Jinja program that comes with a downloaded tokenizer. Jinja's sandbox
# protects Python objects, but does not prevent endless loops or gigabytes of output. A separate
# process therefore renders the templates, and the operating system limits its time and memory.

ADVICE = "set model.template to 'plain', or to a text with the field {question}"
SECONDS = 5.0
"""Maximum CPU seconds to render one conversation; ordinary templates take milliseconds."""
MEGABYTES = 1024
LONGEST = 64 * 2**20
"""Maximum size of a rendered prompt in bytes."""
TO_START = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
"""The environment variables that the process gets, because Python may not start without them."""
FAILED = 1
"""Python's exit code after an uncaught exception."""


class RenderProcess:
    """The process that renders templates; it starts on first use and restarts if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: PipedProcess | None = None
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
                code = self._end()
                if code == FAILED:
                    raise ModelError(
                        "model: the process that renders chat templates failed to start"
                    ) from None
                limit = (
                    f"longer than {SECONDS:g} seconds"
                    if code == -signal.SIGPROF
                    else "too much memory"
                )
                raise ModelError(
                    f"model: the chat template cannot render a prompt: it took {limit}; {ADVICE}"
                ) from None
            except BaseException:  # otherwise the next request would read the old reply
                self._end()
                raise
        if "error" in reply:
            raise TemplateError(reply["error"])
        return str(reply["text"])

    def start(self) -> None:
        with self._lock:
            self._connected()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _connected(self) -> Connection:
        # After a fork, parent and child share the pipe and could read each other's replies.
        if self._child is None or self._owner != os.getpid():
            self._child = PipedProcess(
                "covey.models.template_worker",
                str(SECONDS),
                str(MEGABYTES),
                environment={name: os.environ[name] for name in TO_START if name in os.environ},
            )
            self._owner = os.getpid()
        return self._child.connections[0]

    def _end(self) -> int:
        child = self._child
        if child is None or self._owner != os.getpid():
            return 0
        child.connections[0].close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(0.2)
        child.kill()
        self._child = None
        return child.process.returncode


RENDERER = RenderProcess()
atexit.register(RENDERER.close)


if __name__ == "__main__":
    os.environ.clear()  # a template that leaves Jinja's sandbox finds no secrets
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
