"""A client that gets the log-probabilities of a reference policy from a server over HTTP.

If the server is restarting, overloaded or not yet up, the client retries for up to `patience`
seconds. A retry is safe because requests do not change the server's state. If a retry cannot fix an
error, such as a wrong bearer token, the run ends with the server's error message.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

from covey.errors import ModelError, RunError
from covey.http_client import check_url, connect, error_message, headers, retry_delay
from covey.models.logp import LogProbs
from covey.notices import notice
from covey.parallel.passes import padded_parts
from covey.reference.protocol import Reference
from covey.reference.wire import (
    BYTES_PER_TOKEN,
    HEADER_BYTES,
    WireError,
    decode_reply,
    encode_request,
    reply_bytes,
)
from covey.stopping import may_be_given_up
from covey.types import Batch

UNAVAILABLE = frozenset({502, 503, 504})
"""The HTTP statuses of a server or proxy that is temporarily unavailable."""
LARGEST_TEXT = 65_536
"""Maximum size in bytes of health reports and error replies, which contain no tensors."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
RECORD_FILE = "reference.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The URL of a reference server, its bearer token, and the time limits for its replies."""

    url: str
    token: str = ""
    timeout: float = 120.0
    """A request fails if the server sends no data for this many seconds."""
    patience: float = 300.0
    """The client retries for at most this many seconds while the server is unavailable."""

    def __post_init__(self) -> None:
        check_url(
            self.url,
            "config: reference.url",
            "http://127.0.0.1:8500",
            "; put the token in an environment variable, and set reference.token_env to its name",
        )


class _Reply(NamedTuple):
    status: int
    retry_after: str
    body: bytes


@dataclass(slots=True, kw_only=True)
class ServerReference(Reference):
    """A reference that gets log-probabilities from a server.

    `covey reference serve` starts the server.
    """

    address: Address
    temperature: float
    tokenizer: str
    """The digest of the policy's tokenizer. The server's tokenizer must have the same digest as the
    policy's tokenizer.
    """
    weights: str = ""
    """The digest that the server's weights must have. If `weights` is empty, the client takes the
    digest from the server's first reply."""
    note: Callable[[str], None] = notice
    budget: int = field(init=False)
    """Maximum number of padded tokens that the server accepts in one request."""

    def __post_init__(self) -> None:
        health = self._health()
        theirs = health["fingerprint"]
        if theirs["tokenizer"] != self.tokenizer:
            raise ModelError(
                f"reference: the model {health['model']} on {self.address.url} has another "
                "tokenizer than the policy; serve a model with the policy's tokenizer"
            )
        self._check_weights(theirs["weights"])
        by_bytes = (health["max_bytes"] - HEADER_BYTES) // BYTES_PER_TOKEN
        self.budget = max(1, min(health["max_tokens"], by_bytes))

    @property
    def identity(self) -> str:
        """The URL of the server, and the digest of its weights."""
        return f"server {self.address.url} {self.weights}"

    def logp(self, batch: Batch) -> LogProbs:
        """Ask the server for the log-probability and the entropy of every trained token."""
        whole = torch.zeros((len(LogProbs._fields), *batch.tokens.shape))
        for index in padded_parts(batch, self.budget):
            rows = batch.rows(index)
            body = encode_request(rows, temperature=self.temperature, tokenizer=self.tokenizer)
            shape = rows.tokens.shape
            with may_be_given_up():
                reply = self._ask("POST", "/logp", body, most=reply_bytes(shape))
            try:
                part, weights = decode_reply(reply, shape, self.temperature)
            except WireError as error:
                raise ModelError(
                    f"reference: the server {self.address.url} sent an invalid reply: {error}"
                ) from None
            self._check_weights(weights)
            for target, values in zip(whole, part, strict=True):
                target[index.cpu(), : values.shape[1]] = values
        return LogProbs(*whole.to(batch.tokens.device))

    def save(self, folder: Path, *, writes: bool = True) -> None:
        """Write the server's URL and the digest of its weights into the checkpoint."""
        if not writes:
            return
        record = {"url": self.address.url, "weights": self.weights}
        (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")

    def load(self, folder: Path) -> None:
        """Raise ModelError if the server's weights do not have the digest in the checkpoint."""
        try:
            before = json.loads((folder / RECORD_FILE).read_text())["weights"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"checkpoint {folder} has no valid record of its reference model: {error}; resume "
                "from another checkpoint"
            ) from None
        if before != self.weights:
            raise ModelError(self._other_weights(before, self.weights))

    def _check_weights(self, found: str) -> None:
        self.weights = self.weights or found
        if found != self.weights:
            raise ModelError(self._other_weights(self.weights, found))

    def _other_weights(self, wanted: str, found: str) -> str:
        return (
            f"reference: {self.address.url} has other weights: expected {wanted[:16]}..., "
            f"found {found[:16]}...; serve the model (and --dtype) that the run started with"
        )

    def _health(self) -> Mapping[str, Any]:
        body = self._ask("GET", "/health")
        try:
            health: dict[str, Any] = json.loads(body)
            for key, kind in (("max_bytes", int), ("max_tokens", int), ("model", str)):
                if not isinstance(health[key], kind):
                    raise TypeError
            for key in ("tokenizer", "weights"):
                health["fingerprint"][key].encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ModelError(
                f"reference: {self.address.url} is not a reference server; start a server with "
                "`covey reference serve`"
            ) from None
        return health

    def _ask(
        self, method: str, path: str, body: bytes | None = None, most: int = LARGEST_TEXT
    ) -> bytes:
        """Send a request and return the body of the reply.

        Retry while the server is unavailable.
        """
        deadline, noted = time.monotonic() + self.address.patience, False
        for attempt in count():
            retry_after = ""
            try:
                reply = _send(self.address, method, path, body, most)
            except (OSError, http.client.HTTPException) as error:
                problem = f"cannot be reached: {error or type(error).__name__}"
            else:
                if reply.status == 200:
                    if noted:
                        self.note(f"reference: {self.address.url} is back")
                    return reply.body
                problem = f"replied {reply.status}: {error_message(reply.body)}"
                retry_after = reply.retry_after
                if reply.status not in UNAVAILABLE:
                    raise ModelError(f"reference: {self.address.url} {problem}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise ModelError(
                    f"reference: {self.address.url} gave no valid reply within "
                    f"{self.address.patience:g} s: the server {problem}"
                )
            if not noted:
                self.note(f"reference: {self.address.url} {problem}; waiting up to {left:.0f} s")
                noted = True
            time.sleep(min(retry_delay(retry_after, FIRST_WAIT, attempt), LONGEST_WAIT, left))
        raise AssertionError("the loop ends with a return or an error")


def _send(address: Address, method: str, path: str, body: bytes | None, most: int) -> _Reply:
    """Send one request. Raise ModelError if a successful reply is larger than `most` bytes.

    The client does not follow redirects, because they would send the bearer token to another host.
    """
    connection = connect(address.url, address.timeout)
    sent = headers("application/octet-stream", address.token)
    try:
        connection.request(method, urlsplit(address.url).path.rstrip("/") + path, body, sent)
        response = connection.getresponse()
        most = most if response.status == 200 else LARGEST_TEXT
        read = response.read(most + 1)
        if len(read) > most and response.status == 200:
            raise ModelError(
                f"reference: the server {address.url} sent a reply of more than {most} bytes to "
                f"the request {path}"
            )
        if len(read) <= most and response.length:
            raise http.client.IncompleteRead(read, response.length)
        return _Reply(response.status, response.getheader("Retry-After", ""), read)
    finally:
        connection.close()
