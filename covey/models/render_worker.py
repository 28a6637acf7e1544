"""A process that renders chat templates: `python -m covey.models.render_worker FD SECONDS MB`.

It reads one request after the other, as JSON, and ends when the other side goes away. No torch.
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
"""What templates that print the date are told, so that a run resumed tomorrow asks the same."""


TOO_BIG = 3
"""The exit code after a render that took too much memory."""


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Render one conversation, or say why the template does not take it."""
    try:
        (text,), _ = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=request["template"],
            strftime_now=TODAY.strftime,
            **request["told"],
        )
    except MemoryError:
        sys.exit(TOO_BIG)
    except Exception as error:  # a template is a program, and goes wrong as programs do
        name = type(error).__name__
        known = type(error).__module__.startswith("jinja2")
        return {"error": str(error) if known else f"{name}: {error}"}
    return {"text": text}


def serve(connection: Connection, seconds: float, megabytes: int) -> None:
    """Render until the other side goes away; the kernel ends what takes too much."""
    limit = megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        request = json.loads(connection.recv_bytes())
        # Without a handler the signal ends the process, even inside of one long operation.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = json.dumps(answer(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(reply)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
