from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.conftest import build
from tests.reference.servers import SMALL, Server, fork_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model behind a token, with small limits."""
    server = fork_server(tmp_path_factory.mktemp("server") / "output", "embedded", *SMALL)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random Qwen2 on disk."""
    folder = tmp_path_factory.mktemp("models") / "qwen"
    model = build("qwen2")
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def scripted() -> Iterator[tuple[str, list[tuple[int, bytes]]]]:
    """A server that sends scripted replies, one per connection, and is unavailable without any."""
    replies: list[tuple[int, bytes]] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                status, body = replies.pop(0) if replies else (0, b"")
                if status:
                    head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n"
                    connection.sendall(head.encode() + body)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", replies
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)
