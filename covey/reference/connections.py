"""Connections to a reference server: how many there may be, and how long each may take.

A client that opens connections and says nothing, or says it a byte at a time, must cost the others
nothing. So a request's head has to be there soon, and where connections are at their limit the one
that has said least, and for longest, makes room. Bodies have a time limit in server.py, which can
still answer them; here is what ends connections that cannot be answered.
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

Phase = Literal["head", "body", "answer"]
"""What a connection waits for: a request, the rest of one, or the reply."""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

CONNECTION = "covey.connection"
"""Where a request's scope has its connection."""
LINGER = 30.0
"""Seconds for a client to take what it was sent, before its connection is cut."""
LOG_SECONDS = 10.0
"""The same line is written once in so many seconds; how often it came is added."""


@dataclass(slots=True, kw_only=True)
class Door:
    """Every open connection, by what it waits for, the longest there first."""

    most: int
    """Connections that may be open."""
    head_seconds: float
    """For a request's head, from the opening of a connection or the last reply on."""
    answer_seconds: float
    """For a whole request. The application has a limit of its own, which should come first."""
    phases: dict[Phase, dict[Connection, None]] = field(
        default_factory=lambda: {"head": {}, "body": {}, "answer": {}}
    )

    def entered(self, connection: Connection) -> None:
        """Take a connection in; where there are too many, one that has said less makes room."""
        if sum(map(len, self.phases.values())) >= self.most:
            # A whole request is never given up; and the newest is most likely in earnest.
            unheard = next((c for p in ("head", "body") for c in self.phases[p]), connection)
            unheard.transport.abort()
            self.left(unheard)
            if unheard is connection:
                return
        self.turned(connection, "head")

    def turned(self, connection: Connection, phase: Phase) -> None:
        """Note what a connection waits for now, and for how long it may."""
        if connection.transport.is_closing() and phase == "head":
            return  # the reply was its last
        self.left(connection)
        self.phases[phase][connection] = None
        seconds = self.head_seconds if phase == "head" else self.answer_seconds
        loop = asyncio.get_running_loop()
        connection.timer = loop.call_later(seconds, self._end, connection)

    def left(self, connection: Connection) -> None:
        """Forget a connection."""
        if connection.timer is not None:
            connection.timer.cancel()
        for waiting in self.phases.values():
            waiting.pop(connection, None)

    def _end(self, connection: Connection) -> None:
        """Close a connection whose time is up; what is still to be sent has a little longer."""
        transport = connection.transport
        transport.close()
        connection.timer = asyncio.get_running_loop().call_later(LINGER, transport.abort)


class Connection(H11Protocol):
    """A connection that its door knows of, and that the requests on it know of."""

    door: Door
    """Given by `_protocol`."""
    timer: asyncio.TimerHandle | None = None

    def __init__(
        self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Come in."""
        super().connection_made(transport)
        self.door.entered(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Go."""
        self.door.left(self)
        super().connection_lost(exc)


def _protocol(door: Door) -> type[Connection]:
    return type("Connection", (Connection,), {"door": door})


def _followed(application: Application) -> Application:
    """Return the application; a connection's door hears of what each request comes to."""

    async def follow(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        connection: Connection = scope["state"][CONNECTION]
        connection.door.turned(connection, "body")

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                connection.door.turned(connection, "answer")
            return message

        try:
            await application(scope, received, send)
        finally:
            connection.door.turned(connection, "head")

    return follow


class LogLines(logging.Handler):
    """Writes records as single lines, of bounded length and number, with nothing hidden in them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.WARNING)
        self.stream = stream
        self.last: dict[str, float] = {}
        self.held_back = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless the same was written just now."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        line, now = printable_line(text), time.monotonic()
        self.last = {k: at for k, at in self.last.items() if now - at < LOG_SECONDS}
        # However many different lines there are, only so many are written.
        if line in self.last or len(self.last) >= 100:
            self.held_back += 1
            return
        self.last[line] = now
        more = f" (and {self.held_back} lines like those before)" if self.held_back else ""
        self.held_back = 0
        print(f"covey: reference: {line}{more}", file=self.stream, flush=True)


def server(application: Any, door: Door) -> uvicorn.Server:
    """Return a server of an application behind a door."""
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], False
    logging.getLogger("uvicorn.error").addHandler(LogLines(sys.stderr))
    config = uvicorn.Config(
        _followed(application),
        http=_protocol(door),
        ws="none",  # an upgraded connection would be out of the door's sight
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)
