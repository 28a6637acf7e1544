"""Helpers for the HTTP clients of judges, reference servers and vLLM servers."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import re
from datetime import UTC, datetime
from urllib.parse import urlsplit

from covey.errors import ConfigError
from covey.escape import printable_line

LONGEST_WAIT = 60.0
"""Maximum seconds to wait before a retry, even if the server requests a longer wait."""


def check_url(url: str, setting: str, example: str, secret: str = "") -> None:
    """Raise ConfigError for a URL that is malformed or contains a secret.

    The error message names `setting` and shows the valid URL `example`. If the URL contains a
    secret, the message ends with the argument `secret`, a hint about where secrets belong.
    """
    try:
        split = urlsplit(url)
        proper = split.scheme in ("http", "https") and split.hostname and split.port != 0
        hides = "@" in split.netloc or split.query or split.fragment
    except ValueError:
        proper = hides = None
    if hides:  # the URL is not shown, because it may contain a secret
        raise ConfigError(f"{setting} must not contain a password, a query or a fragment{secret}")
    if not proper or not re.fullmatch("[!-~]+", url):
        raise ConfigError(f"{setting} = {url!r} is not a URL such as {example}")


def headers(content_type: str, token: str = "") -> dict[str, str]:
    """Return the headers of a request; `token` is a bearer token or an API key."""
    given = {"Content-Type": content_type, "User-Agent": "covey"}
    return {**given, "Authorization": f"Bearer {token}"} if token else given


def connect(url: str, timeout: float) -> http.client.HTTPConnection:
    """Return a connection to the server of a URL. The first request opens the connection."""
    split = urlsplit(url)
    kind = http.client.HTTPSConnection if split.scheme == "https" else http.client.HTTPConnection
    return kind(split.hostname or "", split.port, timeout=timeout)


def retry_delay(retry_after: str | None, backoff: float, attempt: int) -> float:
    """Return the seconds to wait before a retry: the value of Retry-After, or `backoff *
    2**attempt`.

    >>> retry_delay("7", 0.5, 0), retry_delay(None, 0.5, 2), retry_delay("9999", 0.5, 0)
    (7.0, 2.0, 60.0)
    """
    delay = backoff * 2.0 ** min(attempt, 100)
    if retry_after and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", retry_after.strip()):
        delay = float(retry_after)
    elif retry_after:
        with contextlib.suppress(ValueError, OverflowError):
            until = email.utils.parsedate_to_datetime(retry_after)
            delay = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(delay, 0.0), LONGEST_WAIT)


def error_message(body: bytes) -> str:
    """Return the error message in a server's JSON reply, or the text of any other reply."""
    text = body[:10_000].decode("utf-8", "replace")
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        reply = json.loads(body)
        error = reply.get("error", reply.get("detail", reply))
        text = str(error["message"] if isinstance(error, dict) else error)
    return printable_line(text, 200)
