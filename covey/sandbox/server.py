"""The scoring server, which runs in a sandbox and forks one child process to score each text.

`Sandboxed` in `scorer.py` sends the server's code, and the modules that the server needs, into the
sandbox. The server imports slow packages once. For each request, the server forks a child process,
which scores one text and ends. Every text is scored in the same fresh state, so no text can change
how later texts are scored.

The server passes each text to a child process without parsing the text. The child process cannot
access the server, which is process 1 of the sandbox's namespace. The child process can neither send
signals to the server nor see the server's directory in /proc. The child process has only one pipe,
to which it writes the score of its text.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import pickle
import resource
import select
import sys
import time
from _signal import SIG_IGN, SIGINT, signal  # type: ignore[import-not-found]
from typing import Any

from covey.sandbox.harness import become, empty, end_all, lower, set_limits, write_all

READY = b"ready\n"
NO_SCORE = b"none\n"
FAILED = b"failed "
MOST_REPLY = 64
"""Maximum number of bytes of a score as text, which suffices for every float from 0 to 1."""


def main(job: dict[str, Any]) -> None:
    """Score texts until the client closes the connection."""
    signal(SIGINT, SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)  # keep output of modules off the reply channel
    if job["uid"] is not None:
        become(job["uid"])
    set_limits(job)
    sys.path += job["paths"]
    module = importlib.import_module(job["module"])
    module.load()
    gc.collect()
    gc.freeze()  # the GC skips these objects, so children share their memory
    write_all(replies, READY)
    while request := read_frame(0):
        trusted, text = pickle.loads(request)
        write_all(replies, serve(job, module, trusted, text, replies))
    os._exit(0)


def read_frame(file: int) -> bytes:
    """Read a frame: four bytes with the length, then the data. Return b"" at the end of file."""
    size = int.from_bytes(_read(file, 4), "big")
    return _read(file, size)


def _read(file: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(file, size - len(data))
        if not more:
            return b""
        data += more
    return data


def serve(job: dict[str, Any], module: Any, trusted: Any, text: str, replies: int) -> bytes:
    """Score one text in a child process, and return the reply line."""
    try:
        prepared = module.prepare(trusted)
    except Exception as error:  # a bug of Covey or the user, because the text is not involved
        line = f"{type(error).__name__}: {error}".encode(errors="replace")
        return FAILED + b" ".join(line[:2000].split()) + b"\n"
    deadline = time.monotonic() + job["wall_seconds"]
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        as_child(job, module, prepared, text, writes)
    os.close(writes)
    said = listen(reads, deadline, replies)
    os.close(reads)
    end_all(child, job["isolated"])
    if job["isolated"] and not empty(job["place"]):
        os._exit(1)  # the text gets no score, and the next text a new sandbox
    return line_of(said)


def listen(file: int, deadline: float, replies: int) -> bytes:
    """Return a child's output, or empty bytes if the output is too long or too late."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    poll.register(replies, 0)
    said = b""
    while len(said) <= MOST_REPLY:
        left = deadline - time.monotonic()
        events = poll.poll(1000 * left) if left > 0 else []
        if not events:
            return b""
        if events[0][0] == replies:
            os._exit(1)  # the client has closed the connection
        data = os.read(file, MOST_REPLY)
        if not data:
            return said
        said += data
    return b""


def line_of(said: bytes) -> bytes:
    """Return the reply line: the valid score in a child's output, or `none`."""
    try:
        score = float(said)
    except ValueError:
        return NO_SCORE
    return f"{score!r}\n".encode() if math.isfinite(score) and 0 <= score <= 1 else NO_SCORE


def as_child(job: dict[str, Any], module: Any, prepared: Any, text: str, writes: int) -> None:
    """Score the text in this child process, write the score to the pipe, and exit."""
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        os.closerange(3, writes)
        os.closerange(writes + 1, 1 << 12)
        cpu = job["cpu_seconds"]
        lower(resource.RLIMIT_CPU, cpu, cpu + 1)
        write_all(writes, repr(float(module.score(prepared, text))).encode())
        code = 0
    except BaseException:
        code = 1  # a text that breaks the scorer gets no score
    finally:
        os._exit(code)
