"""HTTP client of one vLLM server, for generation, weight updates and server information.

The client checks the token ids and log-probabilities that the server sends. The client raises
`Unavailable` if the server cannot be reached, fails or does not reply; a restart may then help. If
the server rejects a request or sends invalid data, the client raises `EngineError`, which ends the
run with a one-line message.
"""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from covey.errors import EngineError
from covey.escape import printable
from covey.http_client import check_url, connect, error_message, headers
from covey.types import Finish, VersionSpan

HEALTH_SECONDS = 30.0
PREEMPTIONS = "vllm:num_preemptions_total{"
"""Text with which a line with a preemption count begins in a server's metrics. The metrics have one
such line per engine core."""
FINISH: Mapping[str, Finish] = {"stop": "stop", "length": "length"}


class Unavailable(Exception):
    """Raised if the server of a client cannot be reached, fails or does not reply."""

    def __init__(self, problem: str, client: Client) -> None:
        super().__init__(problem)
        self.client = client


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A completion that a server generated."""

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    finish: Finish
    versions: tuple[VersionSpan, ...]


@dataclass(slots=True)
class Client:
    """The client of one server; several threads may use it at once."""

    url: str
    timeout: float
    local: threading.local = field(default_factory=threading.local, init=False)
    """One HTTP connection per thread, which stays open between requests."""
    opened: set[http.client.HTTPConnection] = field(default_factory=set, init=False)

    @staticmethod
    def at(url: str, timeout: float) -> Client:
        """Return a client of the server at `url`; reject a malformed address."""
        check_url(url, "config: engine.vllm.urls", "http://127.0.0.1:8000")
        return Client(url.rstrip("/"), timeout)

    def close(self) -> None:
        """Close all connections, so that requests in progress fail."""
        for connection in list(self.opened):
            connection.close()

    def healthy(self) -> bool:
        """Return whether the server reports that it is healthy."""
        asking = Client(self.url, HEALTH_SECONDS)
        try:
            asking.send("GET", "/health")
        except (Unavailable, EngineError):
            return False
        finally:
            asking.close()
        return True

    def get(self, path: str) -> Any:
        """Send a GET request to a path, and return the parsed JSON reply."""
        return self._json("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a POST request with a JSON body, and return the parsed JSON reply."""
        return self._json("POST", path, body or {})

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            return json.loads(self.send(method, path, body))
        except (ValueError, RecursionError):
            raise self.error(f"sent a reply that is not JSON from {path}") from None

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Send a request with an optional JSON body, and return the body of the reply."""
        data = None if body is None else json.dumps(body).encode()
        try:
            status, text = self._request(method, path, data)
        except TimeoutError:
            raise Unavailable(f"did not reply to {path} within {self.timeout:g} s", self) from None
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"cannot be reached: {error or type(error).__name__}", self) from None
        if status >= 500:
            raise Unavailable(f"failed with {status} at {path}: {error_message(text)}", self)
        if status != 200:
            raise self.error(f"replied {status} to {path}: {error_message(text)}")
        return text

    def _request(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        """Send one request on this thread's connection; reconnect if this connection was closed."""
        sent = headers("application/json")
        kept = getattr(self.local, "connection", None)
        for connection in ([kept] if kept is not None else []) + [None]:
            connection = connection or self._connect()
            try:
                connection.request(method, urlsplit(self.url).path + path, data, sent)
                response = connection.getresponse()
                text = response.read()
            except (ConnectionError, http.client.BadStatusLine):
                self._drop(connection)
                if connection is not kept:
                    raise
            except BaseException:
                self._drop(connection)
                raise
            else:
                return response.status, text
        raise AssertionError("the last attempt returns or raises")

    def _connect(self) -> http.client.HTTPConnection:
        connection = connect(self.url, self.timeout)
        self.local.connection = connection
        self.opened.add(connection)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        self.opened.discard(connection)
        self.local.connection = None

    def error(self, problem: str) -> EngineError:
        """Return an `EngineError` that names this server and the problem."""
        return EngineError(
            f"engine: the vLLM server {self.url} cannot be used: it {printable(problem)}"
        )

    def version(self) -> str:
        """Return the version of vLLM."""
        version = value_at(self.get("/version"), "version")
        if not isinstance(version, str):
            raise self.error("is not a vLLM server: it does not report its version")
        return version

    def configuration(self) -> dict[str, Any]:
        """Return the server's vLLM configuration as nested dictionaries."""
        data = value_at(self.get("/server_info?config_format=json"), "vllm_config")
        if not isinstance(data, dict):
            raise self.error(
                "does not show its configuration; start it with VLLM_SERVER_DEV_MODE=1"
            )
        return data

    def models(self) -> list[dict[str, Any]]:
        """Return the models that the server serves."""
        found = value_at(self.get("/v1/models"), "data")
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise self.error("is not a vLLM server: /v1/models lists no models")
        return found

    def generate(self, tokens: tuple[int, ...], params: Mapping[str, Any], model: str) -> Reply:
        """Generate one completion; `model` is the adapter's name, or empty without an adapter."""
        body: dict[str, Any] = {"token_ids": list(tokens), "sampling_params": params}
        body |= {"model": model} if model else {}
        return self._reply(self.post("/inference/v1/generate", body))

    def preemptions(self) -> int:
        """Return the number of times that a full KV cache made the server pause a completion."""
        lines = self.send("GET", "/metrics").decode("utf-8", "replace").splitlines()
        counts = (line.rpartition(" ")[2] for line in lines if line.startswith(PREEMPTIONS))
        try:
            return sum(int(float(count)) for count in counts)
        except (ValueError, OverflowError):
            raise self.error("sent a malformed count of preemptions") from None

    def _reply(self, data: Any) -> Reply:
        try:
            (choice,) = data["choices"]
            tokens = tuple(choice["token_ids"])
            logp = tuple(float(one["logprob"]) for one in choice["logprobs"]["content"])
            finish = FINISH[choice["finish_reason"]]
            versions = tuple(
                VersionSpan(int(one["start"]), int(one["end"]), int(one["version"]))
                for one in choice["weight_versions"]
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"sent a completion that is malformed: {type(error).__name__} {error}"
            raise self.error(what) from None
        if (
            not tokens
            or len(logp) != len(tokens)
            or not all(type(token) is int and token >= 0 for token in tokens)
            or not all(math.isfinite(value) and value <= 1e-3 for value in logp)
        ):
            raise self.error("sent a completion whose tokens and log-probs do not match")
        return Reply(tokens=tokens, logp=logp, finish=finish, versions=versions)


def value_at(data: Any, *keys: str) -> Any:
    """Return the value at nested keys of parsed JSON; None if a key is missing."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data
