"""A client for OpenAI-compatible chat endpoints, with retries, rate limits and a cache."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from covey.errors import RewardError
from covey.escape import printable_line
from covey.http_client import error_message, headers, retry_delay

LARGEST_REPLY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Time limits and retries of a request, with fields as in the class `Judge`."""

    timeout: float
    total_seconds: float
    retries: int
    backoff: float


def complete_chat(base_url: str, key: str, body: Mapping[str, Any], policy: RetryPolicy) -> str:
    """Send the request `body`, and return the reply of the model.

    If the server is busy (429), failing (5xx) or unreachable, the request is retried within the
    limits of `policy`. Malformed replies and all other errors are not retried.

    Raises RewardError if the server sends no valid reply.
    """
    url = f"{base_url.rstrip('/')}/chat/completions"
    data = json.dumps(body).encode()
    ends = time.monotonic() + policy.total_seconds
    for attempt in range(policy.retries + 1):
        retry_after, again = None, True
        try:
            patience = min(policy.timeout, max(ends - time.monotonic(), 0.01))
            status, retry_after, read = _post(url, data, key, patience)
        except httpx.HTTPError as error:
            problem = (
                f"cannot be reached: {printable_line(str(error) or type(error).__name__, 200)}"
            )
        else:
            # Hide the key, because servers repeat a wrong key in their error, which is logged.
            content = read.replace(key.encode(), b"***") if key else read
            if status == 200:
                return _content(content)
            problem = f"replied {status}: {error_message(content)}"
            again = status == 429 or status >= 500
        if not again or attempt == policy.retries:
            break
        delay = retry_delay(retry_after, policy.backoff, attempt)
        if time.monotonic() + delay >= ends:
            problem += f"; no time for another try in total_seconds = {policy.total_seconds:g}"
            break
        time.sleep(delay)
    raise RewardError(f"the request to {url} failed: the server {problem} (tries: {attempt + 1})")


@cache
def _client() -> httpx.Client:
    # A redirect could leak the API key, so none is followed, which is the default of httpx.
    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


def _post(url: str, data: bytes, key: str, timeout: float) -> tuple[int, str | None, bytes]:
    """Return the status, the header Retry-After and the body of a reply."""
    deadline = time.monotonic() + timeout
    # Without compression, the size of the reply is the number of bytes read.
    sent = {**headers("application/json", key), "Accept-Encoding": "identity"}
    with _client().stream("POST", url, content=data, headers=sent, timeout=timeout) as response:
        body = b""
        for piece in response.iter_raw():
            body += piece
            if len(body) > LARGEST_REPLY:
                break
            if time.monotonic() > deadline:  # the timeout of httpx is that of a single read
                raise httpx.ReadTimeout("timed out")
        return response.status_code, response.headers.get("Retry-After"), body


def _content(body: bytes) -> str:
    try:
        choice = json.loads(body)["choices"][0]
        content, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        content, finish = None, None
    if not isinstance(content, str):
        raise RewardError(f"the reply is not a chat completion: {error_message(body)!r}")
    if finish == "length":
        # A truncated reply may end within a number.
        raise RewardError(
            f"the reply was truncated at max_tokens: {printable_line(content, 200)!r}; raise "
            "max_tokens"
        )
    return content


# Rate limits of an endpoint, which all scoring processes of a machine share.
#
# A file lists the requests of the last minute. A process locks the file to add a request, and waits
# if the request would exceed a limit.

WINDOW = 60.0
"""Length in seconds of the sliding window in which requests and tokens are counted."""
SHORTEST_WAIT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """Maximum number of requests and tokens per minute, where 0 means no limit."""

    endpoint: str
    """The URL of the endpoint and the name of the model. All processes of a user that send requests
    to this endpoint share the limits."""
    requests: int = 0
    tokens: int = 0

    def wait(self, tokens: int, until: float) -> float:
        """Wait until the limits allow a request of `tokens` tokens, and return the seconds waited.

        Raises RewardError if the limits do not allow the request before `until`. `until` is a time
        of the clock `time.monotonic`, which all processes of a machine share.
        """
        waited = 0.0
        if not self.requests and not self.tokens:
            return waited
        if self.tokens and tokens > self.tokens:
            raise RewardError(
                f"a request of {tokens} tokens exceeds tokens_per_minute = {self.tokens}; raise "
                "tokens_per_minute, or lower max_chars"
            )
        while (delay := self._take(tokens)) > 0:
            if time.monotonic() + delay >= until:
                raise RewardError(
                    f"requests_per_minute = {self.requests} and tokens_per_minute = {self.tokens} "
                    "delay a request beyond its time limit; raise one of these rate limits, raise "
                    "total_seconds and scoring.timeout, or lower scoring.workers"
                )
            time.sleep(delay)
            waited += delay
        return waited

    def _take(self, tokens: int) -> float:
        """Record a request and return 0 if the limits allow it, else return the seconds to wait."""
        # Refuse a link, because any user may write into the folder.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        name = hashlib.sha256(self.endpoint.encode()).hexdigest()[:16]
        path = os.path.join(tempfile.gettempdir(), f"covey-rate-{os.getuid()}-{name}.json")
        with os.fdopen(os.open(path, flags, 0o600), "r+", encoding="utf-8") as file:
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
        """Return the seconds until the rate limits allow the request, or 0 if they allow it now."""
        for gone in range(len(recent) + 1):
            used = sum(spent for _, spent in recent[gone:])
            few = not self.requests or len(recent) - gone < self.requests
            if few and (not self.tokens or used + tokens <= self.tokens):
                return 0.0 if not gone else max(recent[gone - 1][0] + WINDOW - now, SHORTEST_WAIT)
        raise AssertionError("without other requests, any that is small enough fits")


def _rows(text: str) -> list[tuple[float, int]]:
    """Parse the saved requests, or return [] if a killed process left the file incomplete."""
    try:
        return [(float(started), int(tokens)) for started, tokens in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []


# A cache of an endpoint's replies: one file per request, named by a digest of the request.


@dataclass(frozen=True, slots=True)
class ReplyCache:
    """A folder of cached replies, which several processes may use at once."""

    folder: str

    def read(self, url: str, body: Mapping[str, Any]) -> str | None:
        """Return the saved reply to a request, or None if the file is missing or damaged."""
        try:
            reply = json.loads(self._file(url, body).read_text(encoding="utf-8"))["reply"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return reply if isinstance(reply, str) else None

    def write(self, url: str, body: Mapping[str, Any], reply: str) -> None:
        """Save a reply atomically."""
        file = self._file(url, body)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as temporary:
                json.dump({"reply": reply}, temporary)
            os.replace(name, file)
        except OSError as error:
            raise RewardError(
                f"cannot write a reply to the cache folder {self.folder!r}: {error}"
            ) from None

    def _file(self, url: str, body: Mapping[str, Any]) -> Path:
        sent = json.dumps([url, body], sort_keys=True).encode()
        name = hashlib.sha256(sent).hexdigest()
        return Path(self.folder) / name[:2] / f"{name}.json"
