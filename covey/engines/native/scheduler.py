"""The scheduler of the native engine, which queues requests, prefills prompts and fills slots."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch

from covey.accel.packing import to_device
from covey.engines.native.backend import DecodeBackend
from covey.engines.native.prefill import PREFILL_TOKENS, read_completions, read_prompts
from covey.engines.protocol import Request, RequestSource
from covey.errors import DataError
from covey.models.language_model import LanguageModel
from covey.rng import completion_uniforms
from covey.types import Finish, VersionSpan

REFILL_SHARE = 8
"""Slots are refilled when 1 / REFILL_SHARE of them are free, because small prefills are slow."""


class Finished(NamedTuple):
    """A finished completion, read from its slot."""

    request: Request
    tokens: np.ndarray
    logp: np.ndarray
    finish: Finish
    versions: tuple[VersionSpan, ...]
    kept: str = ""


class Paused(NamedTuple):
    """A completion that lost its slot because the KV cache was full, and continues later."""

    tokens: np.ndarray
    logp: np.ndarray
    searched: int
    """The number of tokens that were already searched for stop strings."""
    kept: list[np.ndarray]
    """For each token, the tokens that truncation kept, if recorded."""


class Scheduler:
    """Generates completions for the requests of one source."""

    def __init__(
        self,
        model: LanguageModel,
        backend: DecodeBackend,
        source: RequestSource,
        version: int = 0,
    ) -> None:
        self.model, self.backend, self.source = model, backend, source
        self.version = version
        """The version of the current weights."""
        self.spans: dict[int, list[VersionSpan]] = {}
        """Spans of tokens that earlier weights have generated, by request index."""
        self.limits = limits = source.limits
        self.sampling = sampling = limits.sampling
        self.queue: deque[Request] = deque()
        self.prompts: dict[int, tuple[int, ...]] = {}
        """Tokens of the prompts with unfinished requests, by prompt index."""
        self.waiting: Counter[int] = Counter()
        """Number of requests that have no slot yet, by prompt index."""
        self.unfinished: Counter[int] = Counter()
        """Number of requests that are not complete, by prompt index."""
        self.first_logits: dict[int, torch.Tensor] = {}
        """Logits of the first token after prompts that have waiting requests, by prompt index."""
        self.paused: dict[int, Paused] = {}
        """Paused completions, which wait for a slot again, by request index."""
        self.preemptions = 0
        """Number of times that a completion was paused."""
        self._pull()
        self.width = backend.width_for(min(sampling.max_concurrent, limits.requests))
        self.slots = backend.begin(
            width=self.width,
            prompts=limits.prompts,
            longest=limits.prompt_tokens,
            sampling=sampling,
            steady=limits.steady,
        )
        self.requests: list[Request | None] = [None] * self.width
        """The request of each slot."""
        self.taken = np.zeros(self.width, dtype=bool)
        """Whether each slot has a request."""
        self.counts = np.zeros(self.width, dtype=np.int64)
        """The number of tokens of each slot, as last read from the device."""
        self.searched = [0] * self.width
        """The number of tokens of each slot that were already searched for stop strings."""
        self.stop_ids = frozenset(model.stop_ids)
        self.stop_tokens = special_tokens(model, sampling.stop_strings)
        """Ids of stop strings that are special tokens, which decoding omits from the text."""
        self.stop_reach = 1 + max((len(s.encode()) for s in sampling.stop_strings), default=0)

    def _pull(self) -> None:
        """Queue the requests that are ready."""
        for request in self.source.take():
            check_length(request, self.model, self.sampling.max_tokens)
            self.queue.append(request)
            self.prompts[request.prompt] = request.tokens
            self.waiting[request.prompt] += 1
            self.unfinished[request.prompt] += 1

    def change_version(self, version: int) -> None:
        """Continue with new weights, and record which tokens the old weights generated."""
        if version == self.version:
            return
        counts = {number: len(paused.tokens) for number, paused in self.paused.items()}
        for slot in np.flatnonzero(self.taken).tolist():
            counts[self._request(slot).number] = int(self.counts[slot])
        for number, count in counts.items():
            spans = self.spans.setdefault(number, [])
            spans.append(VersionSpan(spans[-1].stop if spans else 0, count, self.version))
        self.version = version

    def _request(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None
        return request

    def _versions(self, request: Request, length: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of a completion of `length` tokens."""
        spans = self.spans.pop(request.number, [])
        last = VersionSpan(spans[-1].stop if spans else 0, length, self.version)
        return tuple(span for span in (*spans, last) if span.stop > span.start)

    @property
    def running(self) -> int:
        """The number of completions in progress."""
        return int(self.taken.sum())

    @property
    def left(self) -> int:
        """The number of tokens that can still be appended to the shortest completion."""
        return self.sampling.max_tokens - int(self.counts[self.taken].min())

    def run(self) -> Iterator[list[Finished]]:
        """Yield completions as they end, in batches.

        The caller processes a batch while the device decodes the next tokens of the other
        completions.
        """
        ended: list[Finished] = []
        while self.queue or self.running or ended:
            if self.queue and (requests := self._admitted()):
                self._refill(requests)
            elif self.running and not self.queue:
                self._shrink()
            if self.running:
                self._make_room()
                self.backend.advance(self.slots, self.width, self.left)
            if ended:
                yield ended
            ended = self._take_finished() if self.running else []
            self._pull()

    def _admitted(self) -> list[Request]:
        """Return the requests that get a slot now, and remove them from the queue."""
        free = self.width - self.running
        if free < min(max(1, self.width // REFILL_SHARE), len(self.queue)):
            return []
        first = list(islice(self.queue, free))
        counts = [
            len(self.paused[r.number].tokens) if r.number in self.paused else 1 for r in first
        ]
        room = self.slots.cache.admits(self._positions(np.array(counts)))
        # The cache has room for at least one completion of full length.
        return [self.queue.popleft() for _ in range(room if self.running else max(1, room))]

    def _positions(self, counts: np.ndarray) -> np.ndarray:
        """Return the number of cache positions that completions need after the next steps.

        `counts` are the current numbers of tokens. The decode step after a token computes the
        token's key and value, so the last token of a completion needs no position.
        """
        after: np.ndarray = np.minimum(counts + self.backend.steps, self.sampling.max_tokens)
        return after - 1

    def _make_room(self) -> None:
        """Reserve memory for the next steps; if memory is short, pause the shortest completions."""
        while True:
            slots = np.flatnonzero(self.taken)
            if self.slots.cache.reserve(slots, self._positions(self.counts[slots])):
                return
            self._pause(int(slots[np.argmin(self.counts[slots])]))

    def _pause(self, slot: int) -> None:
        """Free the slot of an unfinished completion, which continues when memory is free."""
        request, count, log = self._request(slot), int(self.counts[slot]), self.slots.kept
        (tokens,), (logp,) = self.slots.written([slot])
        kept = [] if log is None else log.slots[slot]
        paused = Paused(tokens[:count], logp[:count], self.searched[slot], kept)
        self.paused[request.number] = paused
        self.preemptions += 1
        self.slots.close([slot])
        self.slots.cache.leave([slot])
        self.requests[slot], self.taken[slot] = None, False
        self.queue.appendleft(request)

    def _refill(self, requests: list[Request]) -> None:
        """Assign free slots to requests, and sample the first token of each new request."""
        free = np.flatnonzero(~self.taken)[: len(requests)].tolist()
        new = [request for request in requests if request.number not in self.paused]
        old = [request for request in requests if request.number in self.paused]
        for slot, request in zip(free, [*new, *old], strict=True):
            self.requests[slot], self.searched[slot] = request, 0
            self.taken[slot], self.counts[slot] = True, 1
        if new:
            self._begin(free[: len(new)], new)
        if old:
            self._resume(free[len(new) :], old)

    def _begin(self, slots: list[int], requests: list[Request]) -> None:
        """Start new completions in free slots."""
        cache = self.slots.cache
        reading = [{p: self.prompts[p] for p in self._to_read(requests)}]
        if self.limits.steady and self.model.device.type == "cpu":  # padding changes rounding
            reading = [{prompt: tokens} for prompt, tokens in reading[0].items()]
        for prompts in reading:
            self.first_logits |= read_prompts(self.model, cache, prompts)
        index = self._open(slots, requests)
        self.slots.draw(index, self._logits(requests), self.sampling.distribution)
        for request in requests:
            self.waiting[request.prompt] -= 1
            if not self.waiting[request.prompt]:
                del self.first_logits[request.prompt]
                cache.all_entered(request.prompt)

    def _open(self, slots: list[int], requests: list[Request]) -> torch.Tensor:
        """Assign prompts and random numbers to slots; return the slot indices on the device."""
        # The device may still run a prefill. Sending completions does not wait for the prefill.
        ready = [torch.tensor(slots), torch.from_numpy(self._uniforms(requests))]
        index, uniforms = to_device(ready, self.model.device)
        self.slots.cache.enter(slots, [r.prompt for r in requests])
        self.slots.open(index, uniforms)
        return index

    def _resume(self, slots: list[int], requests: list[Request]) -> None:
        """Continue paused completions in free slots."""
        paused = [self.paused.pop(request.number) for request in requests]
        index, cache = self._open(slots, requests), self.slots.cache
        counts = np.array([len(each.tokens) for each in paused])
        # The next step computes key and value of the newest token.
        cache.reserve(np.array(slots), counts - 1)
        read_completions(
            self.model,
            cache,
            {slot: request.tokens for slot, request in zip(slots, requests, strict=True)},
            {slot: each.tokens[:-1].tolist() for slot, each in zip(slots, paused, strict=True)},
        )
        self.slots.resume(index, [each.tokens for each in paused], [each.logp for each in paused])
        self.counts[slots] = counts
        for slot, each in zip(slots, paused, strict=True):
            self.searched[slot] = each.searched
            if self.slots.kept is not None:
                self.slots.kept.slots[slot] = each.kept

    def _to_read(self, requests: Sequence[Request]) -> list[int]:
        """Return the prompts to prefill: prompts of the given requests that were not prefilled yet.

        If a prefill is needed, it also includes prompts from the front of the queue, as many as
        fit. On a GPU, a pass over few prompts takes as long as a pass over many, and all slots wait
        for the pass.
        """
        known = self.first_logits
        needed = {r.prompt for r in requests if r.prompt not in known}
        if not needed:
            return []
        room = min(PREFILL_TOKENS // self.limits.prompt_tokens, self.slots.cache.spare_prompts)
        coming = dict.fromkeys(
            r.prompt
            for r in chain(requests, self.queue)
            if r.prompt not in known and r.number not in self.paused
        )
        return list(coming)[: max(room, len(needed))]

    def _uniforms(self, requests: Sequence[Request]) -> np.ndarray:
        return completion_uniforms([r.address for r in requests], self.sampling.max_tokens)

    def _logits(self, requests: Sequence[Request]) -> torch.Tensor:
        """Return the logits [n, V] of the first token of each request."""
        prompts = dict.fromkeys(request.prompt for request in requests)
        rows = {prompt: row for row, prompt in enumerate(prompts)}
        logits = torch.stack([self.first_logits[prompt] for prompt in prompts])
        (index,) = to_device([torch.tensor([rows[r.prompt] for r in requests])], logits.device)
        return logits[index]

    def _shrink(self) -> None:
        """Reduce the number of slots if many are free, because free slots waste time."""
        width = self.backend.width_for(self.running)
        if self.limits.steady:  # more requests may come
            return
        if 2 * self.running > self.width or width >= self.width:
            return
        kept = np.flatnonzero(self.taken).tolist()
        self.slots.keep(kept)
        spare = width - len(kept)
        self.requests = [self.requests[slot] for slot in kept] + [None] * spare
        self.searched = [self.searched[slot] for slot in kept] + [0] * spare
        self.counts = np.pad(self.counts[kept], (0, spare))
        self.taken = np.arange(width) < len(kept)
        self.width = width

    def _take_finished(self) -> list[Finished]:
        """Return the finished completions, and free their slots.

        The device waits for this function, so all work that can be done later is left to the
        caller.
        """
        active, self.counts = self.slots.progress(self.width)
        cut = self._stop_strings() if self.sampling.stop_strings else {}
        self.slots.close([slot for slot in cut if active[slot]])
        active[list(cut)] = False
        ended = np.flatnonzero(self.taken & ~active).tolist()
        if not ended:
            return []
        tokens, logps = self.slots.written(ended)
        self.taken[ended] = False
        self.slots.cache.leave(ended)
        result = []
        for slot, row, row_logps in zip(ended, tokens, logps, strict=True):
            request, length = self._request(slot), cut.get(slot, int(self.counts[slot]))
            stopped = slot in cut or int(row[length - 1]) in self.stop_ids
            finish: Finish = "stop" if stopped else "length"
            versions = self._versions(request, length)
            log = self.slots.kept
            kept = "" if log is None else log.text(slot, length)
            result.append(
                Finished(request, row[:length], row_logps[:length], finish, versions, kept)
            )
            self.requests[slot] = None
            self.unfinished[request.prompt] -= 1
            if not self.unfinished[request.prompt]:
                del self.prompts[request.prompt]
                self.slots.cache.all_ended(request.prompt)
        return result

    def _stop_strings(self) -> dict[int, int]:
        """Return the length up to the first stop string, by slot, for completions that have one."""
        found: dict[int, int] = {}
        slots, counts = np.flatnonzero(self.taken).tolist(), self.counts.tolist()
        tokens, _ = self.slots.written(slots)
        # A stop string of n bytes spans at most n tokens, unless they decode to nothing.
        starts = [max(0, self.searched[slot] + 1 - self.stop_reach) for slot in slots]
        tails = [
            row[start : counts[slot]].tolist()
            for slot, start, row in zip(slots, starts, tokens, strict=True)
        ]
        texts = self.model.decode_many(tails)
        for slot, start, tail, text in zip(slots, starts, tails, texts, strict=True):
            if self._stops(tail, text):
                found[slot] = start + self._first_stop(tail, self.searched[slot] - start)
            self.searched[slot] = counts[slot]
        return found

    def _first_stop(self, tail: list[int], seen: int) -> int:
        """Return how many tokens of `tail` to keep: up to the first stop string.

        The first `seen` tokens are known to contain no stop string.
        """
        for length in range(seen + 1, len(tail)):
            tokens = tail[max(0, length - self.stop_reach) : length]
            if self._stops(tokens, self.model.decode(tokens)):
                return length
        return len(tail)

    def _stops(self, tokens: list[int], text: str) -> bool:
        """Return whether tokens or their text contain a stop string."""
        found = any(stop in text for stop in self.sampling.stop_strings)
        return found or not self.stop_tokens.isdisjoint(tokens)


def check_length(request: Request, model: LanguageModel, most: int) -> None:
    """Raise an error if the prompt and `most` completion tokens exceed the model's context."""
    prompt, size = request.address.prompt, len(request.tokens)
    if not size:
        raise DataError(f"prompt {prompt} has no tokens")
    if size + most > model.context:
        raise DataError(
            f"prompt {prompt} has {size} tokens, and with max_tokens = {most} it would exceed the "
            f"model's context of {model.context} tokens"
        )


def special_tokens(model: LanguageModel, texts: Sequence[str]) -> frozenset[int]:
    """Return the special tokens whose text is one of the given texts."""
    if not texts:
        return frozenset()
    added = model.tokenizer.added_tokens_decoder
    return frozenset(i for i, token in added.items() if token.special and token.content in texts)
