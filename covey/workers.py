"""Supervised worker processes: start, limits on time and memory, death, one retry and replay.

One manager thread serves all processes of a pool. If a process takes too long or dies, the call
that is to blame fails, and the other calls run again in a new process. If several calls were
running at the same time, nobody knows which one to blame, so each of them runs again, alone. If the
process was killed from outside, for example by the OOM killer, its calls also run again, alone.

A worker process is started as `python -m covey.workers FD`. It first receives a pickled `Work`.
Text that the work prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import resource
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from covey.subprocesses import PipedProcess, pickled

START_SECONDS = 120.0
GRACE_SECONDS = 1.0
"""Time in seconds for a worker process to cancel its concurrent calls, after the time limit."""
MOST_CALLS = 64
BATCH_SECONDS = 0.01
"""Target duration of a batch of calls in seconds. A batch has many quick calls or one slow call."""
LONGEST = 64 * 2**20
"""Maximum size of a reply, in bytes."""
PR_SET_PDEATHSIG = 1


class Work(Protocol):
    """What a worker process does. The pool sends it to the process."""

    def load(self) -> None:
        """Prepare the work; an exception is the reason why the process cannot start."""

    def serve(self, connection: Connection, timeout: float) -> None:
        """Answer calls until the connection closes.

        Each message is a list of pairs (number, message), and each reply is a pair (number, reply)
        in the bytes that the pool decodes. The reply None says that the call took too long. An
        empty list means that all state of earlier calls can be forgotten.
        """


@dataclass(slots=True, eq=False)
class _Call:
    message: Callable[[int], tuple[Any, float]]
    failed: Callable[[str], Any]
    future: Future[Any] = field(default_factory=Future)
    deadline: float = math.inf
    killed: bool = False
    """Whether the call runs a second time, because its process was killed."""

    def fail(self, why: str) -> None:
        self.future.set_result(self.failed(why))


@dataclass(slots=True)
class _Queue:
    calls: deque[_Call] = field(default_factory=deque)
    alone: deque[_Call] = field(default_factory=deque)
    """Calls of which one may have killed a process. They run again, each alone, before others."""

    def clear(self) -> list[_Call]:
        left = [*self.alone, *self.calls]
        self.alone.clear()
        self.calls.clear()
        return left


@dataclass(slots=True, eq=False)
class Lane:
    """One place of a pool for a worker process, with the calls that are in the process."""

    worker: PipedProcess | None = None
    number: int = 0
    """The number of processes that have ended in this lane: a new process knows nothing."""
    loaded: bool = False
    wanted: bool = False
    """Whether to start the process before there is a call for it."""
    begun: float = 0.0
    """When the process was started or the last batch was taken from the queue."""
    heard: float = 0.0
    """When the process replied last, or when the last batch was sent."""
    doomed: bool = False
    """Whether the process must not get further calls."""
    alone: bool = False
    own: _Queue = field(default_factory=_Queue)
    taken: list[_Call] = field(default_factory=list)
    """Calls that wait until the process has loaded."""
    running: dict[int, _Call] = field(default_factory=dict)
    sent: int = 0
    batch: int = 0
    """The number of calls in the last batch."""
    most: int = 1
    """Maximum number of calls in the next batch."""
    started: Future[None] = field(default_factory=Future)
    """The result of the first start."""


class Pool:
    """A pool of worker processes; `at_once` says that a process runs its calls concurrently.

    Without `stream`, a process gets a batch of calls from one queue when it has answered the batch
    before, and the time limit is for each reply. With `stream`, every call belongs to a lane and is
    sent at once, and the time limit is for each call.
    """

    def __init__(
        self,
        work: Work,
        name: str,
        *,
        workers: int,
        timeout: float,
        gigabytes: float,
        process: str,
        late: str,
        cannot: Callable[[str], Exception],
        at_once: bool = False,
        stream: bool = False,
        decode: Callable[[bytes], tuple[int, Any]] = pickle.loads,
    ) -> None:
        self.lanes = [Lane(most=MOST_CALLS if at_once else 1) for _ in range(workers)]
        self.closed = False
        self._payload = pickled(work, name)
        self._timeout, self._gigabytes = timeout, gigabytes
        self._process, self._late, self._cannot = process, late, cannot
        self._at_once, self._stream, self._decode = at_once, stream, decode
        self._shared = _Queue()
        self._ended: list[str] = []
        self._lock = threading.RLock()
        self._heard, self._alarm = Pipe(duplex=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._heard, selectors.EVENT_READ)
        self._started = self._woken = False
        self._thread: threading.Thread | None = None

    def start(self, workers: int) -> None:
        """Start processes, and wait until the first one has loaded the work.

        Raises the error that `cannot` makes if the first process cannot load the work.
        """
        with self._lock:
            if self._started or self.closed:
                return
            self._started = True
            for lane in self.lanes[:workers]:
                lane.wanted = True
            self._wake()
        try:
            self.lanes[0].started.result()
        except BaseException:
            self.close()
            raise

    def submit(
        self,
        message: Callable[[int], tuple[Any, float]],
        failed: Callable[[str], Any],
        lane: int | None = None,
    ) -> Future[Any]:
        """Queue a call, for any process or for the process of one lane.

        `message` gets the lane's `number` and returns the message and its time limit; it is called
        again if the call runs again. `failed` makes the future's result from the reason of a
        failure.
        """
        call = _Call(message, failed)
        with self._lock:
            if self.closed:
                call.future.cancel()
            else:
                queue = self._shared if lane is None else self.lanes[lane].own
                queue.calls.append(call)
                self._wake()
        return call.future

    def ended(self) -> list[str]:
        """Return how processes ended that were replaced since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def clear(self) -> None:
        """Forget all calls and all state; kill the processes in which a call is still running."""
        with self._lock:
            self._shared.clear()
            for lane in self.lanes:
                lane.own.clear()
                lane.taken.clear()
                if lane.running and lane.worker is not None:
                    lane.running.clear()
                    lane.doomed = True
                    lane.worker.signal_kill()
                elif lane.loaded and lane.worker is not None:
                    with contextlib.suppress(OSError):  # the process died while it was idle
                        lane.worker.connections[0].send([])
            self._wake()

    def close(self) -> None:
        """Kill the processes and cancel all calls."""
        self.closed = True
        for lane in self.lanes:  # without the lock: the manager may wait for one of the processes
            if (worker := lane.worker) is not None:
                worker.signal_kill()
        with self._lock:
            if self._thread is None:
                return
            self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _wake(self) -> None:
        if self._thread is None and not self.closed:
            # The thread starts the processes, because a process dies with the thread that made it.
            self._thread = threading.Thread(target=self._manage, daemon=True)
            self._thread.start()
        if not self._woken:
            self._woken = True
            self._alarm.send_bytes(b"")

    def _manage(self) -> None:
        try:
            while not self.closed:
                with self._lock:
                    for lane in self.lanes:
                        self._advance(lane)
                    now = time.monotonic()
                    seconds = max(0.0, min(map(self._deadline, self.lanes)) - now)
                ready = self._selector.select(None if seconds == math.inf else seconds)
                with self._lock:
                    for key, _ in ready:
                        if key.data is not None:
                            self._receive(key.data)
                        else:
                            self._heard.recv_bytes()
                            self._woken = False
                    for lane in self.lanes:
                        self._end_late(lane)
        finally:
            with self._lock:
                self.closed = True
                left = self._shared.clear()
                for lane in self.lanes:
                    left += [*lane.own.clear(), *lane.taken, *lane.running.values()]
                    self._end(lane)
                    if not lane.started.done():
                        lane.started.set_exception(self._cannot("it ended by signal SIGKILL"))
                self._selector.close()
                for call in left:
                    call.future.cancel()

    def _advance(self, lane: Lane) -> None:
        """Give a lane's process its next calls; start the process if there is none."""
        if lane.doomed and not lane.running:
            self._end(lane)
        if not lane.taken:
            lane.taken = self._next(lane)
        if not (lane.taken or lane.wanted):
            return
        idle = lane.worker is not None and lane.loaded and not lane.running
        if idle and lane.worker and lane.worker.process.poll() is not None:
            self._lost(lane)
        if lane.worker is None:
            lane.begun = time.monotonic()
            lane.wanted = False
            try:
                lane.worker = PipedProcess("covey.workers")
            except OSError as error:  # out of memory, processes or file descriptors
                self._not_loaded(lane, f"it cannot be started: {error}")
                return
            self._selector.register(lane.worker.connections[0], selectors.EVENT_READ, lane)
            setup = (sys.path, self._payload, self._gigabytes, self._timeout)
            # A thread, because the process reads large work only after its imports.
            threading.Thread(target=_send, args=(lane.worker, setup), daemon=True).start()
        elif lane.loaded and lane.taken:
            self._send(lane)

    def _next(self, lane: Lane) -> list[_Call]:
        """Take the next calls for a lane from the queues."""
        if lane.doomed or (lane.running and (lane.alone or not self._stream)):
            return []
        queue = lane.own if self._stream else self._shared
        if queue.alone and lane.running:
            return []
        lane.begun = time.monotonic() if lane.loaded else lane.begun
        lane.alone = bool(queue.alone)
        if lane.alone:
            return [queue.alone.popleft()]
        # Concurrent calls mostly wait, so take a full share. Of other calls, leave some for idle
        # workers.
        shares = len(self.lanes) * (1 if self._at_once else 2)
        fair = min(-(-len(queue.calls) // shares), lane.most)
        return [queue.calls.popleft() for _ in range(len(queue.calls) if self._stream else fair)]

    def _send(self, lane: Lane) -> None:
        assert lane.worker is not None
        lane.heard, lane.batch, messages = time.monotonic(), len(lane.taken), []
        for call in lane.taken:
            message, seconds = call.message(lane.number)
            call.deadline = lane.heard + seconds
            lane.sent += 1
            lane.running[lane.sent] = call
            messages.append((lane.sent, message))
        lane.taken = []
        try:
            lane.worker.connections[0].send(messages)
        except OSError:
            self._lost(lane)
        except Exception as error:  # a message may hold anything
            self._lost(lane, f"{self._process} got no message: {type(error).__name__}: {error}")

    def _receive(self, lane: Lane) -> None:
        """Take a reply that has arrived."""
        assert lane.worker is not None
        try:
            data = lane.worker.connections[0].recv_bytes(LONGEST)
            if lane.loaded:
                self._accept(lane, *self._decode(data))
            elif data:
                self._not_loaded(lane, data.decode(errors="replace"))
            else:
                lane.loaded = True
                lane.begun = time.monotonic()
                if not lane.started.done():
                    lane.started.set_result(None)
        except (EOFError, OSError):
            self._lost(lane)
        except Exception as error:  # the work may send anything on the connection
            self._lost(lane, f"{self._process} sent an invalid message: {type(error).__name__}")

    def _accept(self, lane: Lane, number: int, reply: Any) -> None:
        call = lane.running.pop(number)
        lane.heard = time.monotonic()
        if reply is None:  # cancelled, but threads that the call started may still run
            lane.doomed = True
            call.fail(self._too_late)
        else:
            call.future.set_result(reply)
        if not (lane.running or self._at_once):
            each = (lane.heard - lane.begun) / lane.batch
            lane.most = max(1, min(MOST_CALLS, int(BATCH_SECONDS / each)))

    @property
    def _too_late(self) -> str:
        return f"{self._late} longer than {self._timeout:g} seconds"

    def _deadline(self, lane: Lane) -> float:
        if lane.worker is not None and not lane.loaded:
            return lane.begun + START_SECONDS
        if not lane.running:
            return math.inf
        if self._stream:
            return min(call.deadline for call in lane.running.values())
        return lane.heard + self._timeout + (GRACE_SECONDS if self._at_once else 0.0)

    def _end_late(self, lane: Lane) -> None:
        if self._deadline(lane) > time.monotonic():
            return
        if lane.worker is not None and lane.worker.connections[0].poll():
            self._receive(lane)  # replies may have waited for this thread
            return
        now = time.monotonic()
        if not lane.loaded:
            self._not_loaded(lane, "it did not start")
            return
        running = lane.running.values()
        late = [call for call in running if call.deadline <= now] if self._stream else []
        self._lost(lane, self._too_late, late)

    def _lost(self, lane: Lane, why: str = "", late: Iterable[_Call] = ()) -> None:
        """Fail, or run again, the calls of a process that died, hangs or makes no sense."""
        assert lane.worker is not None
        how = "" if why else lane.worker.how_ended()
        calls, blamed = list(lane.running.values()), list(late)
        loaded, doomed = lane.loaded, lane.doomed
        self._end(lane)
        if not loaded:
            self._not_loaded(lane, why or f"it ended {how}")
            return
        if not calls:
            if not doomed:  # it died while it was idle
                self._ended.append(how or why)
            return
        queue = lane.own if self._stream else self._shared
        if how.endswith("SIGKILL") and not calls[0].killed:
            calls[0].killed = True
            self._ended.append(how)
            queue.alone.extendleft(reversed(calls))
            return
        if self._at_once and len(calls) > 1 and not blamed:
            queue.alone.extendleft(reversed(calls))
            return
        blamed = blamed or calls[:1]
        for call in blamed:
            call.fail(why or f"{self._process} ended {how}")
        queue.calls.extendleft(reversed([call for call in calls if call not in blamed]))

    def _not_loaded(self, lane: Lane, why: str) -> None:
        """Fail the calls that wait for a process that cannot load the work."""
        self._end(lane)
        error = self._cannot(why)
        for call in lane.taken:
            call.fail(str(error))
        lane.taken = []
        if not lane.started.done():
            lane.started.set_exception(error)

    def _end(self, lane: Lane) -> None:
        if lane.worker is not None:
            self._selector.unregister(lane.worker.connections[0])
            lane.worker.kill()
            lane.number += 1
        lane.worker, lane.loaded, lane.doomed = None, False, False
        lane.running.clear()


def _send(worker: PipedProcess, setup: object) -> None:
    with contextlib.suppress(OSError):  # reading the reply detects a process that has ended
        worker.connections[0].send(setup)


# The worker process.


def main(connection: Connection) -> None:
    """Load the work that the pool sends, and do it until the connection closes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The first target of the OOM killer is this process.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.dup2(2, 1)
    path, payload, gigabytes, timeout = connection.recv()
    # The work may be defined in a module on the parent's path, or in the working directory.
    sys.path[:] = [*path, os.getcwd()]
    limit, most = int(gigabytes * 2**30), resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.dont_write_bytecode = True  # bytecode of the user's modules: see trust.import_callable
    try:
        work: Work = pickle.loads(payload)
        work.load()
    except Exception as error:
        connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        sys.exit()
    connection.send_bytes(b"")
    work.serve(connection, timeout)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        main(Connection(int(sys.argv[1])))
