"""The thread that owns a server's model: what waits at the same time is computed together."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from covey.models.language_model import LanguageModel
from covey.models.layout import micro_batches
from covey.models.logp import LogProbs, batch_logp
from covey.reference.wire import Request, joined, padded_tokens, to_device


@dataclass(slots=True)
class Work:
    """A request on its way, and where its result goes."""

    request: Request
    result: Future[LogProbs] = field(default_factory=Future)


@dataclass(slots=True, kw_only=True)
class Counts:
    """What the worker has done. Only its thread writes here."""

    batches: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Busy(Exception):
    """As many requests as may wait are waiting."""


class Worker:
    """Computes requests in the order of their arrival, several in one batch if several wait.

    Requests in a batch do not see each other, so a result does not depend on them, up to rounding:
    in float32 on a CPU to 1e-5.
    """

    def __init__(
        self, model: LanguageModel, *, max_tokens: int, waiting: int, logits_megabytes: float = 256
    ) -> None:
        self.model = model
        self.max_tokens = max_tokens
        self.logits_megabytes = logits_megabytes
        self.counts = Counts()
        self._queue: queue.Queue[Work] = queue.Queue(maxsize=waiting)
        self._left_over: Work | None = None
        model.model.requires_grad_(False).eval()
        threading.Thread(target=self._run, name="reference", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._queue.qsize()

    def submit(self, request: Request) -> Future[LogProbs]:
        """Hand over a request; Busy if too many wait."""
        work = Work(request)
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            raise Busy from None
        return work.result

    def _run(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)  # every thread has a current device of its own
        while True:
            # Results that nobody waits for any more were cancelled, and are not computed.
            works = [w for w in self._next() if w.result.set_running_or_notify_cancel()]
            if works:
                self._finish(works)

    def _next(self) -> list[Work]:
        """Wait for a request, and take with it those that wait and fit."""
        first = self._left_over or self._queue.get()
        self._left_over = None
        works, tokens = [first], padded_tokens(first.request.batch)
        while not self._queue.empty():
            work = self._queue.get()
            tokens += padded_tokens(work.request.batch)
            same = work.request.temperature == first.request.temperature
            if not same or tokens > self.max_tokens:
                self._left_over = work
                break
            works.append(work)
        return works

    def _finish(self, works: list[Work]) -> None:
        started = time.perf_counter()
        try:
            results = self._compute([w.request for w in works])
        except Exception as error:
            if len(works) == 1:
                works[0].result.set_exception(error)
                return
            # Too large together, perhaps; each stands or falls alone.
            for work in works:
                self._finish([work])
            return
        self.counts.batches += 1
        self.counts.seconds += time.perf_counter() - started
        for work, result in zip(works, results, strict=True):
            self.counts.tokens += int(work.request.batch.mask.sum())
            work.result.set_result(result)

    @torch.no_grad()
    def _compute(self, requests: Sequence[Request]) -> list[LogProbs]:
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
