"""The reference server, which serves the log-probabilities of a model over HTTP.

    POST /logp      rows of a batch -> log-probabilities and entropies (see wire.py)
    GET  /health    the model, its digests, and the limits of a request
    GET  /metrics   counters for Prometheus

The server needs fastapi and uvicorn: pip install 'covey[server]'.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import queue
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from covey._version import __version__
from covey.escape import printable_line
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp
from covey.parallel.passes import micro_batches
from covey.reference.fingerprint import Fingerprint, fingerprint
from covey.reference.wire import (
    Bounds,
    LogpRequest,
    WireError,
    check_values,
    decode_request,
    encode_reply,
    joined,
    padded_tokens,
    to_device,
)

DISCARD_FACTOR = 4
"""If a request body is too large, the server reads and discards at most `DISCARD_FACTOR` times the
size limit."""
BODY_RATE = 2**18
"""The minimum upload rate in bytes per second. A request body that arrives at this rate or faster
never times out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of a reference server."""

    name: str
    """The model's name, as the user gave it."""
    token: str = ""
    """The bearer token that clients must send, or "" if clients need no token."""
    max_megabytes: float = 64.0
    max_tokens: int = 131_072
    timeout: float = 120.0
    """The time limit for a request in seconds, including the upload and the waiting time in the
    queue."""
    waiting: int = 64
    """Maximum number of requests in the queue."""
    connections: int = 256
    """Maximum number of open connections."""
    head_seconds: float = 10.0
    """The time limit in seconds for receiving the head of a request."""
    body_seconds: float = 20.0
    """The time limit in seconds for receiving a request's body. The time limit grows by one second
    for every `BODY_RATE` bytes that the server receives."""

    @property
    def max_bytes(self) -> int:
        """Maximum size of a request's body in bytes."""
        return int(self.max_megabytes * 2**20)


class RefusedError(Exception):
    """An error that the server answers with an HTTP error status."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


@dataclass(slots=True, kw_only=True)
class Service:
    """The state of the server, and the functions that answer its HTTP routes."""

    settings: ServerSettings
    batcher: Batcher
    fingerprint: Fingerprint
    bounds: Bounds
    started: float = field(default_factory=time.monotonic)
    requests: int = 0
    errors: Counter[int] = field(default_factory=Counter)

    async def logp(self, request: Request) -> Response:
        """Answer POST /logp."""
        try:
            async with asyncio.timeout(self.settings.timeout):
                limit = self.settings.max_bytes
                body = await self._body(request, keep=limit)
                if body is None:
                    raise RefusedError(
                        413, f"the body is larger than {limit} bytes (--max-megabytes)"
                    )
                # Checking reads every token, and must not block the event loop.
                wanted = await asyncio.to_thread(decode_request, body, self.bounds)
                if wanted.tokenizer != self.fingerprint.tokenizer:
                    raise RefusedError(422, "the client's tokenizer differs from this model's")
                values = await asyncio.wrap_future(self.batcher.submit(wanted))
        except WireError as error:
            raise RefusedError(422, str(error)) from None
        except queue.Full:
            raise RefusedError(503, "the queue is full") from None
        except TimeoutError:
            raise RefusedError(503, f"not done within {self.settings.timeout:g} s") from None
        try:
            check_values(values, wanted.temperature)
        except WireError as error:
            raise RefusedError(500, f"the model gives invalid log-probabilities: {error}") from None
        reply = encode_reply(values, self.fingerprint.weights)
        return Response(reply, media_type="application/octet-stream")

    async def health(self) -> Response:
        """Answer GET /health."""
        return JSONResponse(
            {
                "model": self.settings.name,
                "fingerprint": asdict(self.fingerprint),
                "version": __version__,
                "seconds": round(time.monotonic() - self.started, 3),
                "max_bytes": self.settings.max_bytes,
                "max_tokens": self.settings.max_tokens,
            }
        )

    async def metrics(self) -> Response:
        """Answer GET /metrics."""
        values = {
            "requests_total": self.requests,
            "tokens_total": self.batcher.tokens,
            "batches_total": self.batcher.batches,
            "seconds_total": self.batcher.seconds,
            "queue_length": self.batcher.waiting,
        }
        lines = []
        for name, value in values.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE covey_reference_{name} {kind}", f"covey_reference_{name} {value}"]
        lines.append("# TYPE covey_reference_errors_total counter")
        for status, count in sorted(self.errors.items()):
            lines.append(f'covey_reference_errors_total{{status="{status}"}} {count}')
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _body(self, request: Request, keep: int) -> bytes | None:
        """Read the body of a request. Return None if the body is larger than `keep` bytes.

        If a body is slightly larger than the size limit, the server reads the whole body before it
        replies. Otherwise, the client would get a broken connection instead of an error message.
        The server stops reading if the body is far above the size limit or arrives too slowly.
        """
        body, seen = bytearray(), 0
        until = asyncio.get_running_loop().time() + self.settings.body_seconds
        try:
            async with asyncio.timeout_at(until) as limit:
                async for piece in request.stream():
                    seen += len(piece)
                    limit.reschedule(until + seen / BODY_RATE)
                    if seen <= keep:
                        body += piece
                    elif seen > DISCARD_FACTOR * self.settings.max_bytes:
                        break
        except TimeoutError:
            line = f"the body arrives too slowly: {seen} bytes in {self.settings.body_seconds:g} s"
            raise RefusedError(408, line) from None
        return bytes(body) if seen <= keep else None

    async def guard(
        self, request: Request, handle: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Check the bearer token before the body is read, and send errors as one line of JSON."""
        self.requests += 1
        given = request.headers.get("authorization", "").encode()
        wanted = f"Bearer {self.settings.token}".encode()
        try:
            if self.settings.token and not hmac.compare_digest(given, wanted):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.settings.timeout):
                        await self._body(request, keep=0)
                raise RefusedError(401, "the bearer token is missing or wrong")
            response = await handle(request)
        except RefusedError as refused:
            response = JSONResponse({"error": str(refused)}, status_code=refused.status)
            if refused.status == 503:
                response.headers["Retry-After"] = "1"
            if refused.status in (401, 408, 413):
                # Otherwise, the server would read the rest of the body.
                response.headers["Connection"] = "close"
        except Exception as error:
            line = printable_line(f"{type(error).__name__}: {error}", 300)
            response = JSONResponse({"error": line}, status_code=500)
        if response.status_code >= 400:
            self.errors[response.status_code] += 1
        return response


def make_app(model: LanguageModel, settings: ServerSettings) -> FastAPI:
    """Return the web application that serves a loaded model."""
    service = Service(
        settings=settings,
        batcher=Batcher(model, max_tokens=settings.max_tokens, waiting=settings.waiting),
        fingerprint=fingerprint(model),
        bounds=Bounds(
            vocabulary=model.model.config.vocab_size,
            context=model.context,
            tokens=settings.max_tokens,
        ),
    )
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.post("/logp")(service.logp)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics)
    app.middleware("http")(service.guard)
    return app


# The batcher: the thread that owns a server's model and answers queued requests in batches.


@dataclass(slots=True)
class QueuedRequest:
    """A request in the queue of a reference server, and its result."""

    request: LogpRequest
    result: Future[LogProbs] = field(default_factory=Future)


class Batcher:
    """Answers queued requests in order of arrival, with several requests in each batch.

    The rows of a batch do not attend to each other. The result of a request therefore depends on
    the other requests in the batch only by rounding errors. In float32 on a CPU, the rounding
    errors are at most 1e-5.
    """

    def __init__(self, model: LanguageModel, *, max_tokens: int, waiting: int) -> None:
        self.model = model
        self.max_tokens = max_tokens
        # Counters of finished work, which only the batcher's thread writes.
        self.batches = self.tokens = 0
        self.seconds = 0.0
        self._queue: queue.Queue[QueuedRequest] = queue.Queue(maxsize=waiting)
        self._left_over: QueuedRequest | None = None
        model.model.requires_grad_(False).eval()
        threading.Thread(target=self._run, name="reference", daemon=True).start()

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return self._queue.qsize()

    def submit(self, request: LogpRequest) -> Future[LogProbs]:
        """Put a request into the queue. Raise queue.Full if the queue is full."""
        queued = QueuedRequest(request)
        self._queue.put_nowait(queued)
        return queued.result

    def _run(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)  # the current device is per thread
        while True:
            # Clients that gave up have cancelled their results, which are not computed.
            batch = [q for q in self._next() if q.result.set_running_or_notify_cancel()]
            if batch:
                self._finish(batch)

    def _next(self) -> list[QueuedRequest]:
        """Wait for a request, and return a list of this request and further requests for the same
        batch."""
        first = self._left_over or self._queue.get()
        self._left_over = None
        batch, tokens = [first], padded_tokens(first.request.batch)
        while not self._queue.empty():
            queued = self._queue.get()
            tokens += padded_tokens(queued.request.batch)
            same = queued.request.temperature == first.request.temperature
            if not same or tokens > self.max_tokens:
                self._left_over = queued
                break
            batch.append(queued)
        return batch

    def _finish(self, batch: list[QueuedRequest]) -> None:
        started = time.perf_counter()
        try:
            results = self._compute([queued.request for queued in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0].result.set_exception(error)
                return
            # The batch may have been too large: compute each request alone.
            for queued in batch:
                self._finish([queued])
            return
        self.batches += 1
        self.seconds += time.perf_counter() - started
        for queued, result in zip(batch, results, strict=True):
            self.tokens += int(queued.request.batch.mask.sum())
            queued.result.set_result(result)

    @torch.no_grad()
    def _compute(self, requests: Sequence[LogpRequest]) -> list[LogProbs]:
        batch = joined([r.batch for r in requests])
        whole = torch.zeros((len(LogProbs._fields), *batch.mask.shape))
        for index in micro_batches(batch, self.max_tokens):
            rows = to_device(batch.rows(index), self.model.device)
            part = batch_logp(self.model, rows, temperature=requests[0].temperature)
            for target, values in zip(whole, part, strict=True):
                target[index, : values.shape[1]] = values.float().cpu()
        results, start = [], 0
        for request in requests:
            count, width = request.batch.tokens.shape
            results.append(LogProbs(*whole[:, start : start + count, :width]))
            start += count
        return results
