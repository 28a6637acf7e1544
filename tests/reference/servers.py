"""Real servers in real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from covey.cli.main import run as covey
from covey.reference.client import Address, ServerReference
from tests.processes import forked

TOKEN = "a-secret-of-these-tests"
SMALL = ("--token-env", "TEST_TOKEN", "--max-tokens", "600", "--max-megabytes", "0.1")


@dataclass
class Server:
    """A process that serves a model."""

    pid: int
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def command(model: str, *flags: str, port: int = 0) -> list[str]:
    serve = ["reference", "serve", "--model", model, "--port", str(port), "--device", "cpu"]
    return [*serve, *flags]


@contextmanager
def new_process(model: str, *flags: str, port: int = 0) -> Iterator[Server]:
    """Serve as a user does: with `python -m covey`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "covey", *command(model, *flags, port=port)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TEST_TOKEN": TOKEN},
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield Server(process.pid, re.search(r"http://\S+", line).group())
        finally:
            process.kill()


def fork_server(output: Path, model: str, *flags: str, port: int = 0) -> Server:
    """Serve in a fork of this process, which is quicker, and wait until it listens."""

    def serve() -> int:
        os.environ["TEST_TOKEN"] = TOKEN
        return covey(command(model, *flags, port=port))

    child = forked(serve, output)
    return Server(child, wait_for_text(output, r"http://\S+"))


def wait_for_text(file: Path, pattern: str) -> str:
    limit = time.monotonic() + 120
    while True:
        found = re.search(pattern, file.read_text()) if file.exists() else None
        if found:
            return found.group()
        assert time.monotonic() < limit, file.read_text() if file.exists() else file
        time.sleep(0.01)


def connect(url: str, notes: list[str], patience: float) -> ServerReference:
    address = Address(url=url, patience=patience, timeout=5)
    return ServerReference(address=address, temperature=1.0, tokenizer="t", note=notes.append)


HEALTH = {
    "model": "m",
    "fingerprint": {"tokenizer": "t", "weights": "w"},
    "max_bytes": 10**6,
    "max_tokens": 10**6,
}
