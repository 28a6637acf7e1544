"""Worker process that renders chat templates.

The command is `python -m covey.models.template_worker FD SECONDS MB`. The worker reads one JSON
request after another, and ends when the connection closes. The worker does not import torch.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

TODAY = datetime.date(2024, 7, 26)
"""The date for templates that print it, fixed so that a resumed run renders the same prompts."""


TOO_BIG = 3
"""Exit code after a render that exceeded the memory limit."""


def render(request: dict[str, Any]) -> dict[str, str]:
    """Render one conversation, or return the template's error."""
    try:
        (text,), _ = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=request["template"],
            strftime_now=TODAY.strftime,
            **request["arguments"],
        )
    except MemoryError:
        sys.exit(TOO_BIG)
    except Exception as error:  # a template is a program and may raise anything
        name = type(error).__name__
        known = type(error).__module__.startswith("jinja2")
        return {"error": str(error) if known else f"{name}: {error}"}
    return {"text": text}


def serve(connection: Connection, seconds: float, megabytes: int) -> None:
    """Render requests until the connection closes; the kernel enforces the limits."""
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
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
