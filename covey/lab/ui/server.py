"""Serves the web page of `covey ui` over HTTP, for one user.

By default, the server listens on the loopback address. On an address that other machines can reach,
the server requires an access token. Web pages of other sites can send requests even to the loopback
address: with DNS rebinding, an attacker's domain name resolves to the loopback address. The server
therefore checks the Host header, and requires a custom header in every POST request.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic_core import to_json

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


class Server(ThreadingHTTPServer):
    """The HTTP server, which has an access token and checks host names."""

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, host: str, port: int, site: Site) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        self.site, self.host = site, host
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        self.room = threading.BoundedSemaphore(CONNECTIONS)
        self.lock = threading.Lock()
        self.unproven: dict[Any, None] = {}
        """The connections, oldest first, that have sent no request that is welcome."""

    @property
    def url(self) -> str:
        """The URL to open in a browser, with the access token if the server requires one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        return f"http://{host}:{self.server_port}/{f'?token={self.token}' if self.token else ''}"

    def answers_to(self, host: str) -> bool:
        """Return whether the Host header of a request names this server."""
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            return False
        if port != self.server_port:
            return False
        if self.token:  # any IP address or host name of this machine
            return _is_address(name) or name in own_names() or name == self.host
        return name == "localhost" or (_is_address(name) and is_loopback(name))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request in a new thread, or close the connection if too many are open."""
        with self.lock:
            self.unproven[request] = None
            oldest = next(iter(self.unproven))
        if not self.room.acquire(blocking=False):
            # Whoever has not shown the token yet makes room, so that idle strangers block nobody.
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
            if oldest is request or not self.room.acquire(timeout=1.0):
                self.proved(request)
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a request, and afterwards allow one more open connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.proved(request)
            self.room.release()

    def proved(self, request: Any) -> None:
        """Note that a connection has shown the token, or has ended."""
        with self.lock:
            self.unproven.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections and timeouts; print other errors."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


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
    """Return the host names of this machine."""
    return {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}


class Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = SECONDS
    wbufsize = -1  # headers and body leave in one packet
    server_version, sys_version = "covey", ""

    def do_GET(self) -> None:
        """Send a file of the page, JSON data, or the report of a comparison."""
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query, max_num_fields=50))
        if not self._welcome(address.path, query):
            return
        if address.path in GET:
            self._data(GET[address.path], query)
        elif address.path == "/report":
            self._report(query)
        else:
            self._file(address.path.removeprefix("/") or "index.html")

    def do_POST(self) -> None:
        """Start a background job, whose arguments are in the URL and not in a request body."""
        self.close_connection = True
        address = urlsplit(self.path)
        if not self._welcome(address.path, {}):
            return
        if self.headers.get(ASKED) is None or address.path not in POST:
            self._text(403, f"the request has no header {ASKED}, or names no job")
            return
        self._data(POST[address.path], dict(parse_qsl(address.query, max_num_fields=50)))

    def _welcome(self, path: str, query: Query) -> bool:
        """Check the Host header and the token; if either is wrong, send an error response."""
        server = self.server
        if not server.answers_to(self.headers.get("Host", "")):
            self._text(421, "this server does not serve this host name")
            return False
        if not server.token or _equal(self._cookie(), server.token):
            server.proved(self.connection)
            return True
        if path == "/" and _equal(query.get("token", ""), server.token):
            cookie = f"{COOKIE}={server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(303, "text/plain", b"", {"Location": "/", "Set-Cookie": cookie})
        else:
            self._text(401, "open the address that covey ui printed, which contains the token")
        return False

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return ""
        return found.value if found else ""

    def _data(self, view: Callable[[Site, Query], Any], query: Query) -> None:
        try:
            status, data = 200, view(self.server.site, query)
        except CoveyError as error:
            status, data = (404 if isinstance(error, NotFound) else 400), {"error": str(error)}
        # JSON has no NaN. The JSON writer of pydantic is several times as fast as the json module.
        self._send(status, "application/json", to_json(printable_data(data), inf_nan_mode="null"))

    def _report(self, query: Query) -> None:
        try:
            page = views.report(self.server.site, query)
        except CoveyError as error:
            self._text(404 if isinstance(error, NotFound) else 400, str(error))
            return
        policy = {"Content-Security-Policy": REPORT_POLICY}
        self._send(200, "text/html", page.encode(), policy)

    def _file(self, name: str) -> None:
        found = static_file(name)
        if found is None:
            self._text(404, "there is no such page")
        else:
            self._send(200, TYPES[name.rpartition(".")[2]], found)

    def _text(self, status: int, text: str) -> None:
        self._send(status, "text/plain", f"{printable_data(text)}\n".encode())

    def _send(
        self, status: int, kind: str, body: bytes, more: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        headers = {**HEADERS, "Content-Security-Policy": POLICY, **(more or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, because the page sends a request every second."""


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
