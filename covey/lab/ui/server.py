"""Serves the web page of `covey ui` over HTTP, for one user.

By default, the server listens on the loopback address. On an address that other machines can reach,
the server requires an access token. Web pages of other sites can send requests even to the loopback
address: with DNS rebinding, an attacker's domain name resolves to the loopback address. The server
therefore checks the Host header, and requires a custom header in every POST request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from covey.errors import CoveyError
from covey.escape import printable_data
from covey.lab.ui import group_views, views
from covey.lab.ui.views import NotFound, Query, Site

COOKIE = "covey_token"
ASKED = "X-Covey"
"""The header that every POST request must have, and that web pages of other sites cannot send."""
SECONDS = 30.0
"""The number of seconds after which the server closes a connection that sends nothing."""
CONNECTIONS = 64
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = "sandbox allow-scripts allow-downloads; frame-ancestors 'none'"
"""The content security policy of a comparison's HTML report. The word `sandbox` denies the report
access to other pages of the server."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
GET: Mapping[str, Callable[[Site, Query], Any]] = {
    "/api/runs": views.list_all,
    "/api/metrics": views.metrics,
    "/api/series": views.series,
    "/api/details": views.details,
    "/api/health": views.health,
    "/api/explore": views.explore,
    "/api/groups": group_views.groups,
    "/api/group": group_views.group,
    "/api/rollout": group_views.rollout,
}
POST: Mapping[str, Callable[[Site, Query], Any]] = {"/api/explain": group_views.start_explain}


class Connection(H11Protocol):
    """An HTTP connection, which makes room for others until it has shown the token."""

    opened: dict[Connection, bool]
    """The open connections, oldest first, and whether each has sent a request that is welcome."""
    timer: asyncio.TimerHandle | None = None
    unsent = 0

    def __init__(
        self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opened[self] = False
        self._wait()
        if len(self.opened) > CONNECTIONS:
            # Whoever has not shown the token yet makes room, so that idle strangers block nobody.
            oldest = next(each for each, welcome in self.opened.items() if not welcome)
            del self.opened[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.opened.pop(self, None)
        if self.timer is not None:
            self.timer.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.loop.call_later(SECONDS, self._idle)

    def _idle(self) -> None:
        before, self.unsent = self.unsent, self.transport.get_write_buffer_size()
        if self.unsent and self.unsent == before:
            self.transport.abort()
        elif self.unsent or (self.cycle is not None and not self.cycle.response_complete):
            self._wait()
        else:
            self.transport.close()


class Server(uvicorn.Server):
    """The HTTP server, which listens from the start, has an access token and checks host names."""

    def __init__(self, host: str, port: int, site: Site) -> None:
        self.site, self.host = site, host
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind((host, port))
            self.socket.listen(CONNECTIONS)
        except OSError:
            self.socket.close()
            raise
        self.port: int = self.socket.getsockname()[1]
        config = uvicorn.Config(
            application(self),
            http=type("Connection", (Connection,), {"opened": {}}),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # not of malformed requests
            access_log=False,  # the page sends a request every second
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(SECONDS),
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    def serve_forever(self) -> None:
        """Serve until `stop` is called, or raise KeyboardInterrupt at Ctrl-C; close the site."""
        try:
            self.run(sockets=[self.socket])
        finally:
            self.socket.close()
            self.site.close()

    def stop(self) -> None:
        """Let `serve_forever`, which runs in another thread, return."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.site.close()  # a request may wait for a process of the site
        await super().shutdown(sockets)

    @property
    def url(self) -> str:
        """The URL to open in a browser, with the access token if the server requires one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        return f"http://{host}:{self.port}/{f'?token={self.token}' if self.token else ''}"

    def answers_to(self, host: str) -> bool:
        # Starlette's TrustedHostMiddleware takes a list of names, but behind a router this machine
        # has addresses that it does not know. A name can be rebound, an address cannot.
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            return False
        if port != self.port:
            return False
        if self.token:  # any IP address or host name of this machine
            return _is_address(name) or name in own_names() or name == self.host
        return name == "localhost" or (_is_address(name) and is_loopback(name))

    def refusal(self, request: Request) -> Response | None:
        """Return the response to a request that is not welcome, and None for others."""
        if not self.answers_to(request.headers.get("Host", "")):
            return _text(421, "this server does not serve this host name")
        if self.token and not _equal(request.cookies.get(COOKIE, ""), self.token):
            given = request.query_params.get("token", "")
            if request.method == "GET" and request.url.path == "/" and _equal(given, self.token):
                cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
                return _reply(303, "text/plain", b"", {"Location": "/", "Set-Cookie": cookie})
            return _text(401, "open the address that covey ui printed, which contains the token")
        if request.method == "POST" and ASKED not in request.headers:
            return _text(403, f"the request has no header {ASKED}")
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def own_names() -> set[str]:
    return {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}


def application(server: Server) -> ASGIApp:
    """Return the web application: files of the page, JSON data, and reports of comparisons."""
    site = server.site

    def data(view: Callable[[Site, Query], Any]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:  # starlette calls it in a thread
            try:
                status, found = 200, view(site, dict(request.query_params))
            except CoveyError as error:
                status, found = _status(error), {"error": str(error)}
            # JSON has no NaN. pydantic's writer is several times as fast as the json module.
            body = to_json(printable_data(found), inf_nan_mode="null")
            return _reply(status, "application/json", body)

        return answer

    def report(request: Request) -> Response:
        try:
            page = views.report(site, dict(request.query_params))
        except CoveyError as error:
            return _text(_status(error), str(error))
        policy = {"Content-Security-Policy": REPORT_POLICY}
        return _reply(200, "text/html", page.encode(), policy)

    def file(request: Request) -> Response:
        name = request.path_params["name"] or "index.html"
        found = static_file(name)
        if found is None:
            return _text(404, "there is no such page")
        return _reply(200, TYPES[name.rpartition(".")[2]], found)

    pages = Starlette(
        routes=[
            *(Route(path, data(view)) for path, view in GET.items()),
            *(Route(path, data(view), methods=["POST"]) for path, view in POST.items()),
            Route("/report", report),
            Route("/{name:path}", file),
        ]
    )

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        refused = server.refusal(Request(scope))
        if refused is not None:
            await refused(scope, receive, send)
            return
        connection: Connection = scope["state"]["connection"]
        if connection in connection.opened:
            connection.opened[connection] = True
        await pages(scope, receive, send)

    return guarded


def _status(error: CoveyError) -> int:
    return 404 if isinstance(error, NotFound) else 400


def _text(status: int, text: str) -> Response:
    return _reply(status, "text/plain", f"{printable_data(text)}\n".encode())


def _reply(status: int, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> Response:
    headers = {**HEADERS, "Content-Security-Policy": POLICY, **(more or {})}
    return Response(body, status, headers, media_type=kind)


def _equal(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())


def static_file(name: str) -> bytes | None:
    """Return the content of a static file of the page, or None if there is no such file.

    Only names of files in the page's own folder are accepted, so that a request cannot open any
    other file.
    """
    if name == "report.css":  # reports and the page share this file, so that they look alike
        return files("covey.lab.page").joinpath(name).read_bytes()
    folder = files("covey.lab.ui").joinpath("static")
    names = {entry.name for entry in folder.iterdir()}
    known = name in names and name.rpartition(".")[2] in TYPES
    return folder.joinpath(name).read_bytes() if known else None
