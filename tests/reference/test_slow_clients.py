"""Clients that hold a server up: a real server process, and real sockets."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import pytest
import torch

from covey.cli.reference import _bound, _serve
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.policy.policy import batch_logp
from covey.reference.client import Address, ServerReference
from covey.reference.connections import LogLines
from covey.reference.fingerprint import tokenizer_digest
from covey.reference.server import ServerSettings, make_app
from tests.conftest import make_batch
from tests.processes import forked, wait_until
from tests.reference.servers import Server, wait_for_text

HEAD = b"POST /logp HTTP/1.1\r\nHost: x\r\n"
CONNECTIONS = 40
PATIENCE = 2.0
"""Seconds that the server waits for a head or a body; who waits for slow clients waits as long."""


@pytest.fixture(scope="module")
def impatient(
    tmp_path_factory: pytest.TempPathFactory, embedded: LanguageModel
) -> Iterator[tuple[Server, Path]]:
    """A server that waits two seconds for a head and for a body, with few connections."""
    settings = ServerSettings(
        name="embedded", connections=CONNECTIONS, head_seconds=PATIENCE, body_seconds=PATIENCE
    )
    output = tmp_path_factory.mktemp("server") / "output"

    def serve() -> int:
        model = load_language_model("embedded", device="cpu")
        _serve(make_app(model, settings), _bound("127.0.0.1", 0), settings)
        return 0

    pid = forked(serve, output)
    yield Server(pid, wait_for_text(output, r"http://\S+")), output
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def opened(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def until_closed(connection: socket.socket) -> tuple[float, bytes]:
    """Return when the server ended a connection, and what it had said by then."""
    started, said = time.monotonic(), b""
    try:
        while piece := connection.recv(65536):
            said += piece
    except ConnectionError:
        pass
    return time.monotonic() - started, said


def serves_well(server: Server, model: LanguageModel) -> None:
    """A good client gets right numbers, and does not wait for slow clients."""
    batch, started = make_batch(), time.monotonic()
    reference = ServerReference(
        address=Address(url=server.url, patience=0),
        temperature=1.0,
        tokenizer=tokenizer_digest(model),
    )
    found = reference.logp(batch).logp
    assert time.monotonic() - started < PATIENCE
    with torch.no_grad():
        assert torch.allclose(found, batch_logp(model, batch).logp, atol=1e-4)


def test_a_head_that_does_not_come_is_not_waited_for(
    impatient: tuple[Server, Path], embedded: LanguageModel
) -> None:
    server, _ = impatient
    with opened(server) as silent, opened(server) as slow:
        for byte in HEAD[:20]:  # each byte is a sign of life, and does not count
            slow.sendall(bytes([byte]))
            time.sleep(0.02)
        serves_well(server, embedded)
        assert until_closed(slow)[0] < 2 * PATIENCE
        assert until_closed(silent)[0] < 2 * PATIENCE


def test_a_second_head_on_a_connection_has_no_more_time_than_the_first(
    impatient: tuple[Server, Path],
) -> None:
    with opened(impatient[0]) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /heal")
        taken, said = until_closed(connection)
    assert PATIENCE / 2 < taken < 2 * PATIENCE
    assert said.count(b"HTTP/1.1") == said.count(b"200 OK") == 1


def test_a_slow_body_is_refused_with_the_reason(
    impatient: tuple[Server, Path], embedded: LanguageModel
) -> None:
    server, _ = impatient
    with opened(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        for _ in range(5):
            connection.sendall(b"x")
            time.sleep(0.05)
        serves_well(server, embedded)
        taken, said = until_closed(connection)
    assert taken < 2 * PATIENCE
    assert said.startswith(b"HTTP/1.1 408")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"] == (
        "the body arrives too slowly: 5 bytes in 2 s"
    )


def test_a_length_that_is_only_claimed_costs_nothing(
    impatient: tuple[Server, Path], embedded: LanguageModel
) -> None:
    server, _ = impatient
    memory = Path(f"/proc/{server.pid}/status")

    def kilobytes() -> int:
        return next(int(s.split()[1]) for s in memory.read_text().splitlines() if "VmRSS" in s)

    before = kilobytes()
    with ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(opened(server))
            connection.sendall(HEAD + b"Content-Length: 1000000000000\r\n\r\nx")
        serves_well(server, embedded)
        assert until_closed(connection)[1].startswith(b"HTTP/1.1 408")
    assert kilobytes() - before < 20_000


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\nx"])
def test_two_hundred_idle_connections_are_not_in_the_way(
    sent: bytes, impatient: tuple[Server, Path], embedded: LanguageModel
) -> None:
    server, _ = impatient
    folder = Path(f"/proc/{server.pid}/fd")
    before = len(list(folder.iterdir()))  # a forked server has its parent's open files too
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(opened(server)).sendall(sent)
        serves_well(server, embedded)
        # Their sockets, and a few other files.
        wait_until(lambda: len(list(folder.iterdir())) < before + CONNECTIONS + 20)
    serves_well(server, embedded)


def test_bad_requests_do_not_fill_the_log(impatient: tuple[Server, Path]) -> None:
    server, output = impatient
    for _ in range(50):
        with opened(server) as connection:
            connection.sendall(b"\x1b[31m\x00garbage\r\n\r\n")
            assert until_closed(connection)[1].startswith(b"HTTP/1.1 400")
    log = output.read_bytes()
    assert log.count(b"Invalid HTTP request") == 1
    assert b"\x1b" not in log


def test_a_line_of_the_log_is_short_and_holds_nothing_hidden() -> None:
    stream = StringIO()
    lines = LogLines(stream)

    def write(text: str, error: Exception | None = None) -> None:
        info = (type(error), error, None) if error else None
        lines.emit(logging.LogRecord("x", logging.ERROR, "", 0, text, None, info))

    write("a\n\x1b[31m" + "b" * 10**6)
    write("failed", ValueError("\u202e\r\nx"))
    for number in range(1000):
        write(f"line {number}")
    first, second, *others = stream.getvalue().splitlines()
    assert first.startswith(r"covey: reference: a \x1b[31mbbb")
    assert len(first) < 600
    assert second == r"covey: reference: failed: ValueError: \u202e x"
    assert len(others) == 98
