"""Worker process that renders chat templates.

The command is `python -m covey.models.template_worker FD SECONDS MB`. FD is the file descriptor of
the worker's connection, SECONDS is the CPU time limit of a request, and MB is the memory limit. The
worker reads one JSON request after another, and ends when the connection closes. The worker
compiles templates as transformers does, but does not import transformers or torch, which would take
a second.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import signal
import sys
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

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


if __name__ == "__main__":
    os.environ.clear()  # a template that leaves Jinja's sandbox finds no secrets
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
