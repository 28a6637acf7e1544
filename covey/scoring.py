"""Scoring of completions: in this process for quick rewards, otherwise in worker processes.

If a reward function raises an error, hangs or crashes, only the completion being scored gets no
reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from covey.errors import ConfigError, RewardError, users_error
from covey.rewards.identity import identity
from covey.rewards.score import NO_CALL, Call, Reward, Score, SkippedError, at_progress, max_seconds
from covey.types import Prompt
from covey.workers import Pool as WorkerPool

if TYPE_CHECKING:
    from covey.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A scoring job: one completion, or a whole group if the reward scores whole groups."""

    prompt: Prompt
    texts: tuple[str, ...]
    progress: float
    """The completed fraction of the run, from 0 to 1, on which reward weights may depend."""
    call: Call = NO_CALL
    """Optional arguments of a user's reward function, in addition to the prompt and the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """The score of a completion, or the error that prevented scoring.

    The result of a skipped completion has neither a score nor an error.
    """

    score: Score | None = None
    error: str = ""
    trace: str = ""
    """The traceback of the error, if an exception caused the error."""


class Pending(Protocol):
    """A handle, such as a Future, with which the caller waits for a scoring job's results."""

    def result(self) -> list[ScoreResult]:
        """Wait for the results, one for each completion of the job."""


class Scorer(Protocol):
    """An object that receives scoring jobs as completions finish, and returns the results later."""

    @property
    def identity(self) -> str:
        """Name, version and source hash of the reward."""

    @property
    def whole_groups(self) -> bool:
        """Whether a job must contain all completions of a group."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest reward, infinite if unknown."""

    def submit(self, job: Job) -> Pending:
        """Start or queue a scoring job."""

    def events(self) -> list[str]:
        """Return a message for each worker process that was replaced since the last call."""

    def close(self) -> None:
        """End all worker processes."""


def score_job(reward: Reward, job: Job) -> list[ScoreResult]:
    """Score every completion of a job. If scoring fails, the completion's result has the error."""
    reward = at_progress(reward, job.progress)
    # A reward class that scores whole groups in one call has `whole_groups = True`.
    if getattr(reward, "whole_groups", False) or getattr(reward, "takes_call", False):
        groups: Any = reward
        try:
            return _checked_group(groups.score_group(*_arguments(reward, job)), job, reward)
        except Exception as error:
            return failed(error, job.texts)
    results = []
    for text in job.texts:
        try:
            results.append(checked(reward(job.prompt, text)))
        except SkippedError:
            results.append(ScoreResult())
        except Exception as error:  # a user's function may raise anything; the error is counted
            results += failed(error, [text])
    return results


async def _score_job_async(reward: Any, job: Job) -> list[ScoreResult]:
    """Score every completion of a job with an async reward."""
    try:
        return _checked_group(await reward.score_group_async(*_arguments(reward, job)), job, reward)
    except Exception as error:
        return failed(error, job.texts)


def _arguments(reward: Any, job: Job) -> tuple[Any, ...]:
    own = (job.call,) if getattr(reward, "takes_call", False) else ()
    return (job.prompt, job.texts, *own)


def _checked_group(scores: Sequence[Score | None], job: Job, reward: Any) -> list[ScoreResult]:
    """Check the scores of a group one by one, so that an invalid score affects no other score."""
    texts, skips = job.texts, getattr(reward, "skips_none", False)
    if len(scores) != len(texts):
        raise ValueError(f"there are {len(scores)} scores for {len(texts)} completions")
    results = []
    for score, text in zip(scores, texts, strict=True):
        try:
            results.append(ScoreResult() if score is None and skips else checked(score))
        except Exception as error:
            results += failed(error, [text])
    return results


def checked(score: Score | None) -> ScoreResult:
    """Validate a score, and convert its numbers to plain floats for JSON."""
    if score is None:
        raise ValueError(
            "the function returned None; scoring.none_rewards = 'skip' allows it in a user's reward"
        )
    if not isinstance(score, Score):
        raise TypeError(f"a reward returns a Score, not {type(score).__name__}")
    if not math.isfinite(score.reward):
        raise ValueError(f"the reward is {score.reward}")
    parts = {str(name): float(value) for name, value in score.parts.items()}
    for name, value in parts.items():
        if not math.isfinite(value):
            raise ValueError(f"the part {name} is {value}")
    return ScoreResult(
        score=Score(
            reward=float(score.reward),
            success=bool(score.success),
            parts=parts,
            feedback=str(score.feedback),
        )
    )


def failed(error: Exception, texts: Sequence[str]) -> list[ScoreResult]:
    """Return a failed result for each completion, with the error message and traceback."""
    trace = "".join(traceback.format_exception(error))
    return [ScoreResult(error=users_error(error), trace=trace)] * len(texts)


class TooSlowError(BaseException):
    """Raised inside a job that takes too long. No `except Exception` of a reward catches it."""


def within(seconds: float, function: Callable[[], list[ScoreResult]]) -> list[ScoreResult]:
    """Call a function, and raise TooSlowError in it after `seconds`.

    In the main thread, a signal interrupts Python code and regex matching. In another thread, only
    Python code can be interrupted, because a regex keeps the interpreter's lock.
    """
    main = threading.current_thread() is threading.main_thread()
    # A handler or a timer of someone else, such as the user's script, is left alone.
    if main and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        return _within_by_signal(seconds, function)
    return _within_by_thread(seconds, function)


def _within_by_signal(
    seconds: float, function: Callable[[], list[ScoreResult]]
) -> list[ScoreResult]:
    running = True

    def interrupt(number: int, frame: object) -> None:
        if running:
            raise TooSlowError

    signal.signal(signal.SIGALRM, interrupt)
    try:
        # Again and again, in case a bare `except:` swallows the first one.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        return function()
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _within_by_thread(
    seconds: float, function: Callable[[], list[ScoreResult]]
) -> list[ScoreResult]:
    lock, thread = threading.Lock(), threading.get_ident()
    running, fired = True, False

    def interrupt() -> None:
        nonlocal fired
        with lock:
            if running:
                fired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(TooSlowError)
                )

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    arrived = False
    try:
        return function()
    except TooSlowError:
        arrived = True
        raise
    finally:
        timer.cancel()
        with lock:
            running = False
        if fired and not arrived:  # the exception is on its way, and must not arrive in the caller
            try:
                deadline = time.monotonic() + 1
                while time.monotonic() < deadline:
                    pass
            except TooSlowError:
                pass


@dataclass(frozen=True, slots=True)
class _Done:
    """The finished results of a job. A `Future` would be slower, because its locks take time."""

    results: list[ScoreResult]

    def result(self) -> list[ScoreResult]:
        return self.results


@dataclass(frozen=True, slots=True)
class InlineScorer:
    """A scorer that runs the reward in this process while the caller waits.

    A job that takes longer than `seconds` is interrupted, and its completions get no reward.
    """

    reward: Reward
    identity: str = ""
    seconds: float = 30.0

    @property
    def whole_groups(self) -> bool:
        """Whether the reward scores all completions of a group in one call."""
        return bool(getattr(self.reward, "whole_groups", False))

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of the reward."""
        return self.reward.bounds

    def submit(self, job: Job) -> Pending:
        """Score a job at once and return its results."""
        try:
            return _Done(within(self.seconds, lambda: score_job(self.reward, job)))
        except TooSlowError:
            why = f"took longer than {self.seconds:g} seconds"
            return _Done([ScoreResult(error=why)] * len(job.texts))

    def events(self) -> list[str]:
        """Return an empty list, because this scorer has no worker processes to report on."""
        return []

    def close(self) -> None:
        """Do nothing, because this scorer has no worker processes."""


@dataclass(frozen=True, slots=True)
class _Scoring:
    """What a worker process does: it scores jobs with a reward."""

    reward: Any

    def load(self) -> None:
        """Do nothing: the reward is loaded when it has been unpickled."""

    def serve(self, connection: Connection, timeout: float) -> None:
        while True:
            jobs: list[tuple[int, Job]] = connection.recv()
            if getattr(self.reward, "is_async", False):
                asyncio.run(self._score_at_once(connection, jobs, timeout))
                continue
            for number, job in jobs:
                connection.send((number, score_job(self.reward, job)))

    async def _score_at_once(
        self, connection: Connection, jobs: Sequence[tuple[int, Job]], timeout: float
    ) -> None:
        async def one(number: int, job: Job) -> None:
            results = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    results = await _score_job_async(self.reward, job)
            connection.send((number, results))

        await asyncio.gather(*(one(number, job) for number, job in jobs))


class Pool:
    """A scorer whose worker processes take jobs from one queue, in order."""

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
        self.copy = partial(
            Pool, reward, identity, workers=workers, timeout=timeout, gigabytes=gigabytes
        )
        """Make a pool with this pool's settings but its own worker processes."""
        self.pool = WorkerPool(
            _Scoring(reward),
            f"reward {identity}",
            workers=workers,
            timeout=timeout,
            gigabytes=gigabytes,
            process="the scoring process",
            late="took",
            cannot=lambda why: RewardError(
                f"reward: a scoring process cannot load the reward: {why}"
            ),
            at_once=bool(getattr(reward, "is_async", False)),
        )

    def start(self) -> None:
        """Start the worker processes, and wait until the first process has loaded the reward.

        Raises RewardError if the first process cannot load the reward.
        """
        self.pool.start(len(self.pool.lanes))

    def submit(self, job: Job) -> Future[list[ScoreResult]]:
        """Queue a job."""
        self.start()
        if self.pool.closed:
            raise RewardError(
                "reward: cannot score completions, because the scoring processes are closed"
            )
        return self.pool.submit(
            lambda _: (job, math.inf),
            lambda why: [ScoreResult(error=why)] * len(job.texts),
        )

    def events(self) -> list[str]:
        """Return a message for each worker process that was replaced since the last call."""
        return [f"a scoring process ended {how}, and was replaced" for how in self.pool.ended()]

    def close(self) -> None:
        """Kill the worker processes and cancel all jobs that have not finished."""
        self.pool.close()


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


def scorer_of(config: Config, reward: Reward | None = None, ranks: int = 1) -> Scorer:
    """Build the scorer, and start this rank's worker processes."""
    # Worker processes import this module, and need neither settings nor Ray.
    from covey.cluster.actors import ray_scorer
    from covey.config.resolve import reward_of
    from covey.rewards.user import FUNCTIONS, own_name, with_none

    reward = reward_of(config) if reward is None else reward
    reward = with_none(reward, config.scoring.none_rewards)
    name = own_name(reward) if config.reward.name == FUNCTIONS else config.reward.name
    if config.cluster.address and config.cluster.scoring_actors and not reward.quick:
        check_timeout(name, reward, config.scoring.timeout)
        return ray_scorer(config, reward, identity(name, reward))
    return make_scorer(
        name,
        reward,
        workers=config.scoring.workers or max(1, (os.cpu_count() or 1) // ranks),
        timeout=config.scoring.timeout,
        gigabytes=config.scoring.gigabytes,
    )
