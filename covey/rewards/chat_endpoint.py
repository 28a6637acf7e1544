"""Asking a server that speaks OpenAI's chat protocol, with the standard library alone."""

from __future__ import annotations

import email.utils
import http.client
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from covey.errors import ConfigError, RewardError

LONGEST_WAIT = 60.0
"""Seconds before a retry at most, whatever the server asks for."""
LARGEST_REPLY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a server, and how often to ask again."""

    timeout: float
    """Seconds without a sign from the server, and seconds for the reply to be complete."""
    total_seconds: float
    """For all tries, and for the waits between them."""
    retries: int
    backoff: float
    """Seconds before the first retry, doubled each time, where the server does not say."""


def check_url(url: str, where: str) -> None:
    """Refuse what is not a plain web address, and one that holds a secret."""
    try:
        split = urllib.parse.urlsplit(url)
        proper = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:
        raise ConfigError(f"{where} = {url!r} is not a web address") from None
    if "@" in split.netloc or split.query or split.fragment:
        # Not shown: it may be a secret that is already in the wrong place.
        raise ConfigError(
            f"{where} must hold no password and no query; put the key in an environment variable "
            "and give that variable's name"
        )
    if not proper or not re.fullmatch("[!-~]+", url):
        raise ConfigError(f"{where} = {url!r} must be like http://localhost:8000/v1")


def retry_delay(asked: str | None, backoff: float, attempt: int) -> float:
    """Return the seconds to wait: what Retry-After asks for, or backoff · 2^attempt.

    >>> retry_delay("7", 0.5, 0), retry_delay(None, 0.5, 2), retry_delay("9999", 0.5, 0)
    (7.0, 2.0, 60.0)
    """
    delay = backoff * 2.0**attempt
    if asked is not None and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", asked.strip()):
        delay = float(asked)
    elif asked is not None:
        try:
            until = email.utils.parsedate_to_datetime(asked)
            delay = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):
            pass
    return min(max(delay, 0.0), LONGEST_WAIT)


def complete_chat(base_url: str, key: str, body: Mapping[str, Any], patience: Patience) -> str:
    """Return what the model says to `body`. RewardError if it says nothing that can be used.

    A server that is busy (429), broken (5xx) or out of reach is asked again while there is time.
    Every other refusal is final, and so is a reply that cannot be read: asked the same, the server
    would say the same.
    """
    url = f"{base_url.rstrip('/')}/chat/completions"
    headers = {"Content-Type": "application/json", "User-Agent": "covey"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    ends = time.monotonic() + patience.total_seconds
    for attempt in range(patience.retries + 1):
        asked, again = None, True
        try:
            reply = _post(request, min(patience.timeout, max(ends - time.monotonic(), 0.01)))
        except (OSError, http.client.HTTPException) as error:
            problem = f"cannot be reached: {one_line(str(error)) or type(error).__name__}"
        else:
            # Servers repeat a wrong key in their refusal, and errors end up in logs.
            said = reply.body.replace(key.encode(), b"***") if key else reply.body
            if reply.status == 200:
                return _content(said)
            problem = f"answered {reply.status}: {_server_message(said)}"
            asked, again = reply.retry_after, reply.status == 429 or reply.status >= 500
        if not again or attempt == patience.retries:
            break
        delay = retry_delay(asked, patience.backoff, attempt)
        if time.monotonic() + delay >= ends:
            problem += f"; another try is not within total_seconds = {patience.total_seconds:g}"
            break
        time.sleep(delay)
    raise RewardError(f"{url} {problem} (tries: {attempt + 1})")


def one_line(text: str) -> str:
    """Return a text as one line that is short enough for a message."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}..."


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Hands over every reply as it is: a redirect would take the key to another host."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_AnyStatus)


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    retry_after: str | None
    body: bytes


def _post(request: urllib.request.Request, timeout: float) -> _Reply:
    deadline = time.monotonic() + timeout
    with _opener().open(request, timeout=timeout) as response:
        body = b""
        while len(body) <= LARGEST_REPLY and (piece := response.read1(65536)):
            body += piece
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
        return _Reply(response.status, response.headers.get("Retry-After"), body)


def _server_message(body: bytes) -> str:
    """What the server says is wrong: the message of its JSON, or its text."""
    text = body.decode("utf-8", "replace")
    try:
        said = json.loads(text)
        error = said.get("error", said)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, RecursionError, LookupError, AttributeError):
        pass
    return one_line(text[:10_000])


def _content(body: bytes) -> str:
    try:
        choice = json.loads(body)["choices"][0]
        content, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        content, finish = None, None
    if not isinstance(content, str):
        raise RewardError(f"reply is not a chat completion: {_server_message(body)!r}")
    if finish == "length":
        # What is cut off may end within a number.
        raise RewardError(f"reply is cut off, raise max_tokens: {one_line(content)!r}")
    return content
