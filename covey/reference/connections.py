"""Limits the number and the duration of connections to a reference server.

A client that opens connections and sends nothing, or one byte at a time, must not block other
clients. A request's head (request line and headers) must therefore arrive within a short time. If
there are too many connections, the oldest connection without a complete request is closed. The
module server.py limits the time for request bodies and sends error replies. If no reply can be
sent, this module closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from covey.escape import printable_line

Phase = Literal["head", "body", "reply"]
"""The phase of a connection. The server waits for a request (`head`), receives its body (`body`),
or prepares and sends the reply (`reply`)."""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

CONNECTION = "covey.connection"
"""The key of the `Connection` object in the state of a request's ASGI scope."""
LINGER = 30.0
"""Time limit in seconds for a client to read its reply, before the server aborts the connection."""
LOG_SECONDS = 10.0
"""Minimum number of seconds between two equal log lines. Repeats of a log line within this time are
counted, but not written."""


@dataclass(slots=True, kw_only=True)
class ConnectionLimiter:
    """Tracks all open connections, and closes connections that exceed a limit."""

    most: int
    """Maximum number of open connections."""
    head_seconds: float
    """The time limit for receiving a request's head. The time limit starts when the connection
    opens, and again after each reply."""
    request_seconds: float
    """The time limit for a whole request, which must be longer than the web application's own time
    limit."""
    phases: dict[Phase, dict[Connection, None]] = field(
        default_factory=lambda: {"head": {}, "body": {}, "reply": {}}
    )

    def opened(self, connection: Connection) -> None:
        """Add a connection. If there are too many connections, close one of them.

        The oldest connection that waits for a request is closed first. If no connection waits for a
        request, the oldest connection with an incomplete request body is closed. If the requests of
        all open connections are complete, the new connection is closed.
        """
        if sum(map(len, self.phases.values())) >= self.most:
            # A complete request is never dropped, and the newest client is the most likely to send
            # one.
            dropped = next((c for p in ("head", "body") for c in self.phases[p]), connection)
            dropped.transport.abort()
            self.closed(dropped)
            if dropped is connection:
                return
        self.enter_phase(connection, "head")

    def enter_phase(self, connection: Connection, phase: Phase) -> None:
        """Move a connection to a phase, and start the time limit of this phase."""
        if connection.transport.is_closing() and phase == "head":
            return  # the connection closes after this reply
        self.closed(connection)
        self.phases[phase][connection] = None
        seconds = self.head_seconds if phase == "head" else self.request_seconds
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(seconds, self._end, connection)

    def closed(self, connection: Connection) -> None:
        """Remove a connection."""
        if connection.timer is not None:
            connection.timer.cancel()
        for waiting in self.phases.values():
            waiting.pop(connection, None)

    def _end(self, connection: Connection) -> None:
        """Close a connection that timed out.

        The connection is aborted if the client does not read its reply within `LINGER` seconds.
        """
        transport = connection.transport
        transport.close()
        connection.timer = asyncio.get_running_loop().call_later(LINGER, transport.abort)


class Connection(H11Protocol):
    """An HTTP connection that reports its phase to the limiter."""

    limiter: ConnectionLimiter
    """The server's limiter. The function `make_server` sets this attribute in a subclass."""
    timer: asyncio.TimerHandle | None = None

    def __init__(
        self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register this connection with the limiter."""
        super().connection_made(transport)
        self.limiter.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove this connection from the limiter."""
        self.limiter.closed(self)
        super().connection_lost(exc)


def _tracked(application: Application) -> Application:
    """Wrap the ASGI application so that the limiter knows the phase of each request."""

    async def track(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        connection: Connection = scope["state"][CONNECTION]
        connection.limiter.enter_phase(connection, "body")

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                connection.limiter.enter_phase(connection, "reply")
            return message

        try:
            await application(scope, received, send)
        finally:
            connection.limiter.enter_phase(connection, "head")

    return track


class LogLines(logging.Handler):
    """A log handler that writes each record as one short escaped line, and limits repeats."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.WARNING)
        self.stream = stream
        self.last: dict[str, float] = {}
        self.suppressed = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record, unless an equal line was written less than LOG_SECONDS ago."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        line, now = printable_line(text), time.monotonic()
        self.last = {k: at for k, at in self.last.items() if now - at < LOG_SECONDS}
        # The number of different lines is limited too.
        if line in self.last or len(self.last) >= 100:
            self.suppressed += 1
            return
        self.last[line] = now
        more = f" ({self.suppressed} repeated lines suppressed)" if self.suppressed else ""
        self.suppressed = 0
        print(f"covey: reference: {line}{more}", file=self.stream, flush=True)


def make_server(application: Any, limiter: ConnectionLimiter) -> uvicorn.Server:
    """Return an HTTP server for the application, with limits on its connections."""
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], False
    logging.getLogger("uvicorn.error").addHandler(LogLines(sys.stderr))
    config = uvicorn.Config(
        _tracked(application),
        http=type("Connection", (Connection,), {"limiter": limiter}),
        ws="none",  # the limiter could not track an upgraded connection
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)
