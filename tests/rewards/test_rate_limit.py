"""Rate limits and kept replies of a judge."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from covey.errors import RewardError
from covey.rewards import chat_endpoint
from covey.rewards.chat_endpoint import RateLimit, ReplyCache


@pytest.fixture(autouse=True)
def short_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "WINDOW", 0.6)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def taken(limit: RateLimit, count: int, tokens: int = 1) -> list[float]:
    start, times = time.monotonic(), []
    for _ in range(count):
        limit.wait(tokens, start + 30)
        times.append(time.monotonic() - start)
    return times


def within(times: list[float], window: float) -> int:
    """Return the most requests in any window."""
    return max(sum(t <= u < t + window for u in times) for t in times)


def test_no_window_has_more_requests_than_allowed() -> None:
    times = taken(RateLimit(endpoint="a", requests=3), 7)
    assert within(times, 0.55) == 3
    assert times[6] >= 1.15  # the third window


def test_no_window_has_more_tokens_than_allowed() -> None:
    times = taken(RateLimit(endpoint="a", tokens=100), 3, tokens=60)
    assert within(times, 0.55) == 1


def work(folder: str, times: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    chat_endpoint.WINDOW = 0.6
    chat_endpoint.tempfile.tempdir = folder
    limit = RateLimit(endpoint="shared", requests=4)
    for _ in range(4):
        limit.wait(1, time.monotonic() + 30)
        times.put(time.monotonic())


def test_processes_share_a_limit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    times = context.Queue()
    workers = [context.Process(target=work, args=(str(tmp_path), times)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = sorted(times.get(timeout=30) for _ in range(8))
    for worker in workers:
        worker.join()
    # Times are read after the request was counted, so a window may seem a little fuller.
    assert within(found, 0.4) <= 4
    assert found[4] - found[0] >= 0.4


def test_a_limit_that_leaves_no_time_is_an_error() -> None:
    limit = RateLimit(endpoint="b", requests=1)
    limit.wait(1, time.monotonic() + 1)
    with pytest.raises(RewardError, match="requests_per_minute = 1"):
        limit.wait(1, time.monotonic() + 0.1)
    with pytest.raises(RewardError, match="exceeds tokens_per_minute"):
        RateLimit(endpoint="b", tokens=5).wait(6, time.monotonic() + 1)


def test_a_damaged_file_counts_as_empty(tmp_path: Path) -> None:
    limit = RateLimit(endpoint="c", requests=1)
    taken(limit, 1)
    (file,) = tmp_path.glob("covey-rate-*")
    file.write_text("[[1.0,")
    assert taken(limit, 1)[0] < 0.5


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
