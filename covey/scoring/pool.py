"""The scoring pool: worker processes that score completions under a time limit.

Each worker process has its own manager thread, which sends the process a few jobs at a time and
receives the results. If a job takes too long or the process dies, the manager thread starts a new
process. The completions of the job that failed get no reward. Jobs that the process had received
but not started return to the front of the queue. If the process ran several jobs at the same time,
each of these jobs runs again, one at a time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial

from covey.errors import ConfigError, RewardError
from covey.rewards.identity import identity
from covey.rewards.score import Reward, max_seconds
from covey.scoring.job import READY, InlineScorer, Job, Scorer, ScoreResult
from covey.subprocesses import PipedProcess, pickled

START_SECONDS = 120.0
GRACE_SECONDS = 1.0
"""Time in seconds for a worker process to cancel its concurrent jobs, after the time limit."""
MOST_JOBS = 64
BATCH_SECONDS = 0.01
"""Target duration of a batch of jobs in seconds. A batch has many quick jobs or one slow job."""

QueuedJob = tuple[Job, "Future[list[ScoreResult]]"]


class Worker(PipedProcess):
    """A worker process, and the pool's connection to it."""

    def __init__(
        self,
        payload: bytes,
        gigabytes: float,
        timeout: float,
        module: str = "covey.scoring.pool_worker",
    ) -> None:
        super().__init__(module)
        (self.connection,) = self.connections
        self._setup = (sys.path, payload, gigabytes, timeout)

    def load(self) -> None:
        """Wait until the process has loaded the reward, or raise an error if loading fails."""
        try:
            self.connection.send(self._setup)
            loaded = self.connection.poll(START_SECONDS)
            reply = self.connection.recv() if loaded else "it did not start"
        except (EOFError, OSError):
            reply = f"it ended {self.how_ended()}"
        if reply != READY:
            raise RewardError(f"reward: a scoring process cannot load the reward: {reply}")


class Pool:
    """A pool of worker processes that take scoring jobs from one queue, in order."""

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
        self.bounds = reward.bounds
        self._concurrent = bool(getattr(reward, "is_async", False))
        self._again = partial(
            Pool, reward, identity, workers=workers, timeout=timeout, gigabytes=gigabytes
        )
        self._payload = pickled(reward, f"reward {identity}")
        self._workers = workers
        self._timeout = timeout
        self._gigabytes = gigabytes
        self._queue: deque[QueuedJob] = deque()
        self._suspects: deque[QueuedJob] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._running: set[Worker] = set()
        self._killed: set[Future[list[ScoreResult]]] = set()
        """Jobs that run a second time, because their worker process was killed, for example by the
        OOM killer."""
        self._happened: list[str] = []

    def copy(self) -> Pool:
        """Return a new pool with this pool's settings but its own worker processes."""
        return self._again()

    def start(self) -> None:
        """Start the worker processes, and wait until the first process has loaded the reward.

        Raises RewardError if the first process cannot load the reward.
        """
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
                raise RewardError(
                    "reward: cannot score completions, because the scoring processes are closed"
                )
            self._queue.append((job, future))
            self._changed.notify()
        return future

    def events(self) -> list[str]:
        """Return a message for each worker process that was replaced since the last call."""
        with self._changed:
            happened, self._happened = self._happened, []
        return happened

    def close(self) -> None:
        """Kill the worker processes and cancel all jobs that have not started."""
        with self._changed:
            self._closed = True
            for _, future in (*self._suspects, *self._queue):
                future.cancel()
            self._suspects.clear()
            self._queue.clear()
            self._changed.notify_all()
            for worker in self._running:
                worker.signal_kill()
        for thread in self._threads:
            thread.join(timeout=5)

    def _new_worker(self) -> Worker:
        """Start a worker process and register it at once, so that `close` can kill it."""
        with self._changed:
            if self._closed:
                raise RewardError(
                    "reward: cannot score completions, because the scoring processes are closed"
                )
            try:
                worker = Worker(self._payload, self._gigabytes, self._timeout)
            except OSError as error:  # out of memory, processes or file descriptors
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

    def _take(self, most: int) -> list[QueuedJob]:
        """Wait for jobs, and return a fair share of the queue, or [] if the pool is closed."""
        with self._changed:
            while not (self._queue or self._suspects or self._closed):
                self._changed.wait()
            if self._suspects:
                return [self._suspects.popleft()]
            # Concurrent jobs mostly wait, so take a full share. Of other jobs, leave some for idle
            # workers.
            shares = self._workers if self._concurrent else 2 * self._workers
            fair = -(-len(self._queue) // shares)
            return [self._queue.popleft() for _ in range(min(fair, most))]

    def _put_back(self, jobs: list[QueuedJob], queue: deque[QueuedJob]) -> None:
        with self._changed:
            if self._closed:
                for _, future in jobs:
                    future.cancel()
                return
            queue.extendleft(reversed(jobs))
            self._changed.notify_all()

    def _serve(self, ready: Future[None]) -> None:
        """Manage one worker process.

        The thread that runs this method also starts the process, because a worker process dies with
        the thread that started it.
        """
        worker: Worker | None = None
        try:
            worker = self._new_worker()
            ready.set_result(None)
        except RewardError as error:
            ready.set_exception(error)
        most = MOST_JOBS if self._concurrent else 1
        while jobs := self._take(most):
            begun = time.monotonic()
            if worker is not None and worker.process.poll() is not None:
                self._note_end(worker.how_ended())  # the process died while it was idle
                self._end(worker)
                worker = None
            try:
                worker = worker or self._new_worker()
            except RewardError as error:
                for queued in jobs:
                    _fail(queued, str(error))
                continue
            if not self._run(worker, jobs):
                self._end(worker)
                worker = None
            if not self._concurrent:
                seconds_each = (time.monotonic() - begun) / len(jobs)
                most = max(1, min(MOST_JOBS, int(BATCH_SECONDS / seconds_each)))
        if worker is not None:
            self._end(worker)

    def _run(self, worker: Worker, jobs: list[QueuedJob]) -> bool:
        """Let a worker process run jobs, and return whether the process can run more jobs."""
        waiting = dict(enumerate(jobs))
        too_long = f"took longer than {self._timeout:g} seconds"
        usable = True
        try:
            worker.connection.send([job for job, _ in jobs])
            while waiting:
                grace = GRACE_SECONDS if self._concurrent else 0.0
                if not worker.connection.poll(self._timeout + grace):
                    self._give_up(waiting, too_long)
                    return False
                number, results = worker.connection.recv()
                if results is None:  # cancelled, but threads that the job started may still run
                    usable = False
                    _fail(waiting.pop(number), too_long)
                else:
                    waiting.pop(number)[1].set_result(results)
        except (EOFError, OSError):
            self._lost(waiting, worker.how_ended())
            return False
        except Exception as error:  # a reward may send anything on the connection
            why = f"the scoring process sent an invalid message: {type(error).__name__}"
            self._give_up(waiting, why)
            return False
        return usable

    def _note_end(self, how: str) -> None:
        with self._changed:
            self._happened.append(f"a scoring process ended {how}, and was replaced")

    def _lost(self, waiting: dict[int, QueuedJob], how: str) -> None:
        """Retry or fail the unfinished jobs of a worker process that died.

        If the process was killed, for example by the OOM killer, each unfinished job runs a second
        time.
        """
        first = next(iter(waiting.values()), None)
        if how.endswith("SIGKILL") and first is not None and first[1] not in self._killed:
            self._killed.add(first[1])
            self._note_end(how)
            self._put_back(list(waiting.values()), self._suspects)
            return
        self._give_up(waiting, f"the scoring process ended {how}")

    def _give_up(self, waiting: dict[int, QueuedJob], why: str) -> None:
        """Mark the job that hung or crashed as failed, and put the other jobs back into the queue.

        If the worker ran several jobs concurrently, all these jobs return to the queue and run
        again, one at a time.
        """
        jobs = list(waiting.values())
        if self._concurrent and len(jobs) > 1:
            self._put_back(jobs, self._suspects)
            return
        for queued in jobs[:1]:
            _fail(queued, why)
        self._put_back(jobs[1:], self._queue)


def _fail(queued: QueuedJob, why: str) -> None:
    job, future = queued
    future.set_result([ScoreResult(error=why)] * len(job.texts))


def make_scorer(
    name: str, reward: Reward, *, workers: int = 0, timeout: float = 30.0, gigabytes: float = 8.0
) -> Scorer:
    """Return an inline scorer for a quick reward, or a pool of workers for any other reward.

    With `workers` = 0, the pool has one worker per core. The pool starts at once, so that Covey
    reports early if the workers cannot load the reward.
    """
    reward_identity = identity(name, reward)
    if reward.quick:
        return InlineScorer(reward, reward_identity, timeout)
    check_timeout(name, reward, timeout)
    workers = workers or os.cpu_count() or 1
    pool = Pool(reward, reward_identity, workers=workers, timeout=timeout, gigabytes=gigabytes)
    pool.start()
    return pool


def check_timeout(name: str, reward: Reward, timeout: float) -> None:
    """Raise ConfigError if `scoring.timeout` is shorter than the reward's own time limit."""
    longest = max_seconds(reward)
    if timeout < longest:
        raise ConfigError(
            f"config: scoring.timeout = {timeout:g} is less than the {longest:g} seconds that the "
            f"reward {name} may take; raise scoring.timeout, or lower total_seconds if the reward "
            "has this option"
        )
