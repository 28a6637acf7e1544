"""Connections that send nothing keep nobody who has the token from the page."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.lab.ui.server import CONNECTIONS, Server
from covey.lab.ui.views import Site


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server("0.0.0.0", 0, Site([tmp_path]))  # reachable, so it has a token
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    server.site.close()


def status(connection: http.client.HTTPConnection, token: str) -> int:
    connection.request("GET", "/api/runs", headers={"Cookie": f"covey_token={token}"})
    reply = connection.getresponse()
    reply.read()
    return reply.status


def test_idle_strangers_make_room_for_the_user(server: Server) -> None:
    address = ("127.0.0.1", server.server_port)
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
