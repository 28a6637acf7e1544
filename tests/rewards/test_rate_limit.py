"""Rate limits and kept replies of a judge."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from covey.errors import RewardError
from covey.rewards import judge
from covey.rewards.judge import RateLimit, ReplyCache

WINDOW = 0.6
"""Length of the test's minute, in seconds."""


class Clock:
    """A clock that only `sleep` moves, so that a busy machine changes no time."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(judge, "WINDOW", WINDOW)
    monkeypatch.setattr(judge, "time", clock)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return clock


def taken(clock: Clock, limit: RateLimit, count: int, tokens: int = 1) -> list[float]:
    start, times = clock.now, []
    for _ in range(count):
        limit.wait(tokens, start + 30)
        times.append(clock.now - start)
    return times


def within(times: list[float], window: float) -> int:
    """Return the most requests in any window."""
    return max(sum(t <= u < t + window for u in times) for t in times)


def test_no_window_has_more_requests_than_allowed(clock: Clock) -> None:
    times = taken(clock, RateLimit(endpoint="a", requests=3), 7)
    assert within(times, WINDOW - 1e-6) == 3
    assert times == pytest.approx([0, 0, 0, 0.6, 0.6, 0.6, 1.2], abs=0.05)


def test_no_window_has_more_tokens_than_allowed(clock: Clock) -> None:
    times = taken(clock, RateLimit(endpoint="a", tokens=100), 3, tokens=60)
    assert within(times, WINDOW - 1e-6) == 1
    assert times == pytest.approx([0, 0.6, 1.2], abs=0.05)


def work(times: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    limit = RateLimit(endpoint="shared", requests=4)
    for _ in range(4):
        limit.wait(1, time.monotonic() + 30)
        times.put(time.monotonic())


def test_processes_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "time", time)
    context = multiprocessing.get_context("fork")
    times = context.Queue()
    workers = [context.Process(target=work, args=(times,)) for _ in range(2)]
    start = time.monotonic()
    for worker in workers:
        worker.start()
    found = sorted(times.get(timeout=30) for _ in range(8))
    for worker in workers:
        worker.join()
    # The fifth request waits for the first to be a window old, however late a process reads its time.
    assert found[4] - start >= WINDOW


def test_a_limit_that_leaves_no_time_is_an_error(clock: Clock) -> None:
    limit = RateLimit(endpoint="b", requests=1)
    limit.wait(1, clock.now + 1)
    with pytest.raises(RewardError, match="requests_per_minute = 1"):
        limit.wait(1, clock.now + 0.1)
    with pytest.raises(RewardError, match="exceeds tokens_per_minute"):
        RateLimit(endpoint="b", tokens=5).wait(6, clock.now + 1)


def test_a_damaged_file_counts_as_empty(tmp_path: Path, clock: Clock) -> None:
    limit = RateLimit(endpoint="c", requests=1)
    taken(clock, limit, 1)
    (file,) = tmp_path.glob("covey-rate-*")
    file.write_text("[[1.0,")
    assert taken(clock, limit, 1) == [0.0]


def test_replies_are_kept_by_all_that_was_sent(tmp_path: Path) -> None:
    cache = ReplyCache(str(tmp_path / "replies"))
    assert cache.read("http://a", {"x": 1}) is None
    cache.write("http://a", {"x": 1}, "seven")
    assert cache.read("http://a", {"x": 1}) == "seven"
    assert cache.read("http://b", {"x": 1}) is None
    assert cache.read("http://a", {"x": 2}) is None
    (file,) = (tmp_path / "replies").rglob("*.json")
    file.write_text('{"reply": ')
    assert cache.read("http://a", {"x": 1}) is None
