"""Rate limits of an endpoint, which all scoring processes of a machine share.

A file lists the requests of the last minute. Every process locks this file and then adds its own
requests. If a request would exceed a limit, the process waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass

from covey.errors import RewardError

WINDOW = 60.0
"""The period to which a limit applies, in seconds."""
SHORTEST_WAIT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """Maximum requests and tokens per minute; 0 means no limit."""

    endpoint: str
    """The address of the endpoint; processes with the same endpoint and user share the limit."""
    requests: int = 0
    tokens: int = 0

    def wait(self, tokens: int, until: float) -> float:
        """Wait until a request of this many tokens is allowed; return the seconds waited.

        Raises RewardError if the rate limits do not allow the request before the time `until`. The
        time `until` is in seconds of `time.monotonic`, which is the same for all processes of a
        machine.
        """
        waited = 0.0
        if not self.requests and not self.tokens:
            return waited
        if self.tokens and tokens > self.tokens:
            raise RewardError(
                f"a request of {tokens} tokens exceeds tokens_per_minute = {self.tokens}"
            )
        while (delay := self._take(tokens)) > 0:
            if time.monotonic() + delay >= until:
                raise RewardError(
                    f"requests_per_minute = {self.requests} and tokens_per_minute = {self.tokens} "
                    "delay a request beyond its time limit; raise these rate limits, raise "
                    "total_seconds and scoring.timeout, or lower scoring.workers"
                )
            time.sleep(delay)
            waited += delay
        return waited

    def _take(self, tokens: int) -> float:
        """Record a request if the limits allow it. Return the seconds to wait before another try.

        The result is 0 if the request was recorded.
        """
        # Refuse a link, because any user may write into the folder.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._path(), flags, 0o600), "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            now = time.monotonic()
            recent = [row for row in _rows(file.read()) if now - WINDOW < row[0] <= now]
            delay = self._delay(recent, tokens, now)
            if delay <= 0:
                recent.append((now, tokens))
                file.seek(0)
                file.truncate()
                json.dump(recent, file)
            return delay

    def _delay(self, recent: list[tuple[float, int]], tokens: int, now: float) -> float:
        """Return the seconds until enough recent requests are older than a minute, or 0."""
        for gone in range(len(recent) + 1):
            if self._fits(recent[gone:], tokens):
                return 0.0 if not gone else max(recent[gone - 1][0] + WINDOW - now, SHORTEST_WAIT)
        raise AssertionError("without other requests, any that is small enough fits")

    def _fits(self, recent: list[tuple[float, int]], tokens: int) -> bool:
        used = sum(spent for _, spent in recent)
        few = not self.requests or len(recent) < self.requests
        return few and (not self.tokens or used + tokens <= self.tokens)

    def _path(self) -> str:
        name = hashlib.sha256(self.endpoint.encode()).hexdigest()[:16]
        return os.path.join(tempfile.gettempdir(), f"covey-rate-{os.getuid()}-{name}.json")


def _rows(text: str) -> list[tuple[float, int]]:
    """Return the requests in a file; [] if a process was killed while it wrote."""
    try:
        return [(float(started), int(tokens)) for started, tokens in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []
