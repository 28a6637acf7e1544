"""Connections that send nothing keep nobody who has the token from the page."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.lab.ui import server as server_module
from covey.lab.ui.server import CONNECTIONS, Server
from covey.lab.ui.views import Site


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server("0.0.0.0", 0, Site([tmp_path]))  # reachable, so it has a token
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.stop()
    thread.join()


def status(connection: http.client.HTTPConnection, token: str) -> int:
    connection.request("GET", "/api/runs", headers={"Cookie": f"covey_token={token}"})
    reply = connection.getresponse()
    reply.read()
    return reply.status


def test_idle_strangers_make_room_for_the_user(server: Server) -> None:
    address = ("127.0.0.1", server.port)
    with contextlib.ExitStack() as stack:

        def connected() -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection(*address, timeout=10)
            return stack.enter_context(contextlib.closing(connection))

        mine = connected()
        assert status(mine, server.token) == 200
        for _ in range(2 * CONNECTIONS):
            idle = stack.enter_context(socket.create_connection(address))
            idle.sendall(b"GET / HTTP/1.1\r\nHost:")
        assert status(connected(), server.token) == 200
        assert status(mine, server.token) == 200  # and it was not closed for a stranger
        assert status(connected(), "wrong") == 401


def test_a_connection_that_stops_in_the_middle_is_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as half:
        half.sendall(b"GET / HTTP/1.1\r\nHost:")
        assert half.recv(1) == b""
