"""The batcher: the thread that owns a server's model and answers queued requests in batches."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp
from covey.models.micro_batches import micro_batches
from covey.reference.wire import LogpRequest, joined, padded_tokens, to_device


@dataclass(slots=True)
class QueuedRequest:
    """A request in the queue of a reference server, and its result."""

    request: LogpRequest
    result: Future[LogProbs] = field(default_factory=Future)


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counters of the batcher's finished work. Only the batcher's thread writes the counters."""

    batches: int = 0
    tokens: int = 0
    seconds: float = 0.0


class QueueFullError(Exception):
    """Raised if the request queue is full."""


class Batcher:
    """Answers requests in order of arrival, in batches with other queued requests.

    Rows of a batch do not attend to each other. So other requests in a batch change a result only
    by rounding, up to 1e-5 in float32 on a CPU.
    """

    def __init__(
        self, model: LanguageModel, *, max_tokens: int, waiting: int, logits_megabytes: float = 256
    ) -> None:
        self.model = model
        self.max_tokens = max_tokens
        self.logits_megabytes = logits_megabytes
        self.counts = Counts()
        self._queue: queue.Queue[QueuedRequest] = queue.Queue(maxsize=waiting)
        self._left_over: QueuedRequest | None = None
        model.model.requires_grad_(False).eval()
        threading.Thread(target=self._run, name="reference", daemon=True).start()

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return self._queue.qsize()

    def submit(self, request: LogpRequest) -> Future[LogProbs]:
        """Queue a request. Raises QueueFullError if too many requests wait."""
        queued = QueuedRequest(request)
        try:
            self._queue.put_nowait(queued)
        except queue.Full:
            raise QueueFullError from None
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
        """Wait for a request; return it with further requests that fit in the same batch."""
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
        self.counts.batches += 1
        self.counts.seconds += time.perf_counter() - started
        for queued, result in zip(batch, results, strict=True):
            self.counts.tokens += int(queued.request.batch.mask.sum())
            queued.result.set_result(result)

    @torch.no_grad()
    def _compute(self, requests: Sequence[LogpRequest]) -> list[LogProbs]:
        batch = joined([r.batch for r in requests])
        whole = LogProbs(logp=torch.zeros(batch.mask.shape), entropy=torch.zeros(batch.mask.shape))
        for index in micro_batches(batch, self.max_tokens):
            part = batch_logp(
                self.model,
                to_device(batch.rows(index), self.model.device),
                temperature=requests[0].temperature,
                logits_megabytes=self.logits_megabytes,
            )
            for target, values in zip(whole, part, strict=True):
                target[index, : values.shape[1]] = values.float().cpu()
        results, start = [], 0
        for request in requests:
            rows, width = request.batch.tokens.shape
            cells = slice(start, start + rows), slice(0, width)
            results.append(LogProbs(logp=whole.logp[cells], entropy=whole.entropy[cells]))
            start += rows
        return results
