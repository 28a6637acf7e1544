"""Judging in processes of its own, each under a time limit that nothing can ignore.

One thread looks after each process: it hands over a few jobs at a time, takes the answers, and
kills and replaces the process when one takes too long or dies. The job at fault has no reward;
those behind it go back to the front of the queue. Where jobs were waiting side by side nobody knows
which one it was: each is tried again alone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from covey.errors import ConfigError, RewardError
from covey.interpreter import module_command
from covey.rewards.score import Reward
from covey.scoring.result import READY, Job, ScoreResult

START_SECONDS = 120.0
HUNG_UP_SECONDS = 5.0
GRACE_SECONDS = 1.0
"""What a process gets beyond the time limit to stop those of its jobs that wait side by side."""
MOST_JOBS = 64
HANDED_SECONDS = 0.01
"""A process is handed about this much work at once: many quick jobs, or a single slow one."""

Task = tuple[Job, "Future[list[ScoreResult]]"]


class Worker:
    """A process that judges."""

    def __init__(self, payload: bytes, gigabytes: float, timeout: float) -> None:
        here, there = Pipe()
        self.connection: Connection = here
        self.process = subprocess.Popen(
            module_command("covey.scoring.worker", str(there.fileno())),
            pass_fds=[there.fileno()],
            start_new_session=True,  # Ctrl-C is for the trainer, which ends the others in order
        )
        there.close()
        self._first = (sys.path, payload, gigabytes, timeout)

    def load(self) -> None:
        """Wait until the process has loaded the reward; raise if it cannot."""
        try:
            self.connection.send(self._first)
            loaded = self.connection.poll(START_SECONDS)
            said = self.connection.recv() if loaded else "it did not start"
        except (EOFError, OSError):
            said = f"it ended {self.died()}"
        if said != READY:
            raise RewardError(f"reward: the scoring process cannot load it: {said}")

    def kill(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()

    def died(self) -> str:
        """Say how the process ended, which has hung up."""
        try:
            code = self.process.wait(HUNG_UP_SECONDS)
        except subprocess.TimeoutExpired:
            return "the conversation"
        names = {number.value: number.name for number in signal.Signals}
        return f"by signal {names.get(-code, -code)}" if code < 0 else f"with code {code}"


class Pool:
    """Scoring processes. Jobs are taken in order, and nobody waits for the one before."""

    def __init__(
        self,
        reward: Reward,
        identity: str,
        *,
        workers: int,
        timeout: float,
        gigabytes: float = 8.0,
    ) -> None:
        self.identity = identity
        self.whole_groups = bool(getattr(reward, "whole_groups", False))
        self._side_by_side = bool(getattr(reward, "is_async", False))
        self._reward = reward
        self._payload = _payload(reward, identity)
        self._workers = workers
        self._timeout = timeout
        self._gigabytes = gigabytes
        self._tasks: deque[Task] = deque()
        self._suspects: deque[Task] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._running: set[Worker] = set()

    def another(self) -> Pool:
        """Return the same with processes of its own."""
        return Pool(
            self._reward,
            self.identity,
            workers=self._workers,
            timeout=self._timeout,
            gigabytes=self._gigabytes,
        )

    def start(self) -> None:
        """Start the processes, and wait for the first; raise if it cannot load the reward."""
        with self._changed:
            if self._threads or self._closed:
                return
            ready: list[Future[None]] = [Future() for _ in range(self._workers)]
            for future in ready:
                thread = threading.Thread(target=self._serve, args=(future,), daemon=True)
                self._threads.append(thread)
                thread.start()
        try:
            ready[0].result()
        except BaseException:
            self.close()
            raise

    def submit(self, job: Job) -> Future[list[ScoreResult]]:
        """Queue a job."""
        self.start()
        future: Future[list[ScoreResult]] = Future()
        with self._changed:
            if self._closed:
                raise RewardError("reward: the scoring processes are closed")
            self._tasks.append((job, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Kill the processes. Jobs that nobody has begun are forgotten."""
        with self._changed:
            self._closed = True
            for _, future in (*self._suspects, *self._tasks):
                future.cancel()
            self._suspects.clear()
            self._tasks.clear()
            self._changed.notify_all()
            for worker in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
        for thread in self._threads:
            thread.join(timeout=5)

    def _new_worker(self) -> Worker:
        """Start a process. From the first moment it is one that `close` kills."""
        with self._changed:
            if self._closed:
                raise RewardError("reward: the scoring processes are closed")
            try:
                worker = Worker(self._payload, self._gigabytes, self._timeout)
            except OSError as error:  # no memory, no processes, no files
                raise RewardError(f"reward: cannot start a scoring process: {error}") from None
            self._running.add(worker)
        try:
            worker.load()
        except RewardError:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: Worker) -> None:
        with self._changed:
            self._running.discard(worker)
        worker.kill()

    def _take(self, most: int) -> list[Task]:
        """Wait for jobs and take a fair share of them; none: the pool is closed."""
        with self._changed:
            while not (self._tasks or self._suspects or self._closed):
                self._changed.wait()
            if self._suspects:
                return [self._suspects.popleft()]
            # Those that wait side by side cost nothing; of others, the last are left to be shared.
            shares = self._workers if self._side_by_side else 2 * self._workers
            fair = -(-len(self._tasks) // shares)
            return [self._tasks.popleft() for _ in range(min(fair, most))]

    def _put_back(self, tasks: list[Task], queue: deque[Task]) -> None:
        with self._changed:
            if self._closed:
                for _, future in tasks:
                    future.cancel()
                return
            queue.extendleft(reversed(tasks))
            self._changed.notify_all()

    def _serve(self, ready: Future[None]) -> None:
        """Look after one process. It is started here: it dies with the thread that started it."""
        worker: Worker | None = None
        try:
            worker = self._new_worker()
            ready.set_result(None)
        except RewardError as error:
            ready.set_exception(error)
        most = MOST_JOBS if self._side_by_side else 1
        while tasks := self._take(most):
            begun = time.monotonic()
            try:
                worker = worker or self._new_worker()
            except RewardError as error:
                for task in tasks:
                    _fail(task, str(error))
                continue
            if not self._converse(worker, tasks):
                self._end(worker)
                worker = None
            if not self._side_by_side:
                seconds_each = (time.monotonic() - begun) / len(tasks)
                most = max(1, min(MOST_JOBS, int(HANDED_SECONDS / seconds_each)))
        if worker is not None:
            self._end(worker)

    def _converse(self, worker: Worker, tasks: list[Task]) -> bool:
        """Have some jobs judged. Return whether the process is still good."""
        waiting = dict(enumerate(tasks))
        too_long = f"took longer than {self._timeout:g} seconds"
        good = True
        try:
            worker.connection.send([job for job, _ in tasks])
            while waiting:
                grace = GRACE_SECONDS if self._side_by_side else 0.0
                if not worker.connection.poll(self._timeout + grace):
                    self._give_up(waiting, too_long)
                    return False
                number, verdicts = worker.connection.recv()
                if verdicts is None:  # stopped; what it started may go on
                    good = False
                    _fail(waiting.pop(number), too_long)
                else:
                    waiting.pop(number)[1].set_result(verdicts)
        except (EOFError, OSError):
            self._give_up(waiting, f"the scoring process ended {worker.died()}")
            return False
        except Exception as error:  # a reward that has found the connection can say anything
            why = f"the scoring process said what nobody understands: {type(error).__name__}"
            self._give_up(waiting, why)
            return False
        return good

    def _give_up(self, waiting: dict[int, Task], why: str) -> None:
        """Fail the job at fault, and queue the others again."""
        tasks = list(waiting.values())
        if self._side_by_side and len(tasks) > 1:
            self._put_back(tasks, self._suspects)
            return
        for task in tasks[:1]:
            _fail(task, why)
        self._put_back(tasks[1:], self._tasks)


def _fail(task: Task, why: str) -> None:
    job, future = task
    future.set_result([ScoreResult(error=why)] * len(job.texts))


def _payload(reward: Reward, identity: str) -> bytes:
    why = "it stands in the main script, which every process would run again"
    try:
        payload = pickle.dumps(reward)
        if b"__main__" not in payload:
            return payload
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = str(error)
    raise ConfigError(
        f"reward {identity}: cannot be sent to a scoring process ({why}); put it into a module, "
        "or give it `quick = True` if it never takes long"
    )
