"""Failure detection: each rank notices within seconds that another rank has failed or died.

A collective call waits for all ranks, and may take minutes to notice that a rank has failed. Every
rank therefore keeps a TCP connection to rank 0. The connection closes when the rank's process ends,
even after a crash. A rank that fails sends the reason for its failure to rank 0 before it ends.
Rank 0 forwards the reason for the failure to all other ranks. At its next collective call, the main
thread of each rank raises an error with the reason for the failure. If the main thread makes no
collective call within a few seconds, a background thread ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from covey.errors import CoveyError
from covey.escape import printable

GRACE_SECONDS = 8.0
"""Time limit in seconds for two actions of the main thread: to notice that a rank is lost, and then
to end the process."""
CONNECT_SECONDS = 60.0
LINE_BYTES = 4096
LOCAL = ("localhost", "127.0.0.1", "::1")


class RankError(CoveyError):
    """Raised if another rank has failed or died."""


class Reported(CoveyError):
    """Raised with an empty message if another rank already reports the failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The rank that failed or died first, and the reason."""

    rank: int
    text: str
    """Why the rank failed, in one line; empty if the rank died without a message."""
    code: int = 1

    def error(self, reporter: bool) -> CoveyError:
        """Return the error to raise; its message is empty if another rank prints the error."""
        if not reporter:
            error: CoveyError = Reported("")
        elif self.text:
            error = RankError(f"rank {self.rank}: {self.text}")
        else:
            error = RankError(
                f"rank {self.rank} is gone: its process was killed or its machine is down; "
                "all ranks end, and --resume continues the run from its last checkpoint"
            )
        error.exit_code = self.code
        return error


@dataclass(slots=True)
class Lifeline:
    """The connections of one rank.

    Rank 0 is connected to all other ranks, and every other rank is connected only to rank 0.
    """

    rank: int
    peers: dict[int, socket.socket]
    loss: Loss | None = None
    left: set[int] = field(default_factory=set)
    """Ranks that have ended normally."""
    closing: threading.Event = field(default_factory=threading.Event)
    noticed: threading.Event = field(default_factory=threading.Event)
    _buffers: dict[int, bytes] = field(default_factory=dict)

    def start(self) -> Lifeline:
        threading.Thread(target=self._watch, name="covey-lifeline", daemon=True).start()
        return self

    @property
    def reports(self) -> bool:
        """Whether this rank prints the error: rank 0 does, or rank 1 if rank 0 has died."""
        silent = self.loss is not None and self.loss.rank == 0 and not self.loss.text
        return self.rank == (1 if silent else 0)

    def check(self) -> None:
        if self.loss is not None:
            self.noticed.set()
            raise self.loss.error(self.reports)

    def fail(self, text: str, code: int = 1) -> None:
        self.closing.set()
        self._send({"rank": self.rank, "text": text[: LINE_BYTES // 2], "code": code})

    def close(self) -> None:
        """Tell the other ranks that this rank has ended normally, and close the connections."""
        self.closing.set()
        self._send({"rank": self.rank, "left": True})
        for peer in self.peers.values():
            peer.close()

    def _send(self, message: dict[str, Any]) -> None:
        for peer in list(self.peers.values()):
            with contextlib.suppress(OSError):  # that rank may have died too
                peer.sendall(json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self.peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while not self.closing.is_set() and self.loss is None:
                for key, _ in selector.select(timeout=0.5):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
        if self.loss is not None and not self.closing.is_set():
            self._end()

    def _read(self, rank: int) -> bool:
        """Read a message from a rank; return whether its connection is still open."""
        try:
            data = self.peers[rank].recv(LINE_BYTES)
        except OSError:
            data = b""
        *lines, rest = (self._buffers.get(rank, b"") + data).split(b"\n")
        self._buffers[rank] = rest[-LINE_BYTES:]
        for line in lines:
            try:
                message = json.loads(line)
                about, text = int(message["rank"]), str(message.get("text", ""))
                code = int(message.get("code", 1))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if message.get("left"):
                self.left.add(rank)
            elif self.loss is None:
                self.loss = Loss(rank=about, text=text, code=code)
                self._pass_on()
        if not data and rank not in self.left and self.loss is None:
            self.loss = Loss(rank=rank, text="")
            self._pass_on()
        return bool(data)

    def _pass_on(self) -> None:
        if self.rank == 0 and self.loss is not None:
            self._send({"rank": self.loss.rank, "text": self.loss.text, "code": self.loss.code})

    def _end(self) -> None:
        """End the process if the main thread does not end it in time."""
        assert self.loss is not None
        if not self.noticed.wait(GRACE_SECONDS):
            error = self.loss.error(self.reports)
            if str(error):
                print(f"covey: {printable(str(error))}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        if not self.closing.wait(GRACE_SECONDS):
            os._exit(self.loss.code)


def listen(address: str) -> tuple[socket.socket, str]:
    """Open the socket on which rank 0 accepts connections from the other ranks.

    Return the socket, and a text with the port and the secret that the other ranks need to connect.
    """
    server = socket.create_server((LOCAL[1] if address in LOCAL else "", 0))
    return server, f"{server.getsockname()[1]} {secrets.token_hex(16)}"


def accept(server: socket.socket, secret: str, size: int) -> Lifeline:
    """On rank 0, wait until all other ranks have connected."""
    peers: dict[int, socket.socket] = {}
    limit = time.monotonic() + CONNECT_SECONDS
    with server:
        while len(peers) < size - 1:
            server.settimeout(max(0.1, limit - time.monotonic()))
            try:
                peer, _ = server.accept()
                peer.settimeout(5.0)
                found, rank = peer.makefile("r").readline(100).split()
                number = int(rank)
            except TimeoutError:
                raise RankError(
                    f"ranks: not all ranks have connected to rank 0 within {CONNECT_SECONDS:g} "
                    "seconds; check the network between the machines"
                ) from None
            except (OSError, ValueError):
                continue
            if secrets.compare_digest(found, secret) and 0 < number < size:
                peer.settimeout(None)
                peers[number] = _kept_alive(peer)
    return Lifeline(0, peers).start()


def connect(address: str, port: int, secret: str, rank: int) -> Lifeline:
    try:
        peer = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        peer.sendall(f"{secret} {rank}\n".encode())
    except OSError as error:
        raise RankError(f"ranks: rank {rank} cannot connect to {address}:{port}: {error}") from None
    peer.settimeout(None)
    return Lifeline(rank, {0: _kept_alive(peer)}).start()


def _kept_alive(peer: socket.socket) -> socket.socket:
    """Turn on TCP keepalive, which detects within about 15 seconds that a machine is down."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer
