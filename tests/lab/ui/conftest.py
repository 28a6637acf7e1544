from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from covey.lab.ui.server import Server
from covey.lab.ui.views import Site
from tests.lab.ui.browser import CHROMIUM, Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    page = Browser()
    yield page
    page.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[tuple[Server, threading.Thread]] = []

    def start(*roots: Path, host: str = "127.0.0.1") -> Server:
        server = Server(host, 0, Site(list(roots)))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.stop()
        thread.join()
