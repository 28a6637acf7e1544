"""The scheduler of the native engine, which queues requests, prefills prompts and fills slots."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
import torch

from covey.accel.packing import to_device
from covey.engines.native.backend import DecodeBackend
from covey.engines.native.prefill import read_completions, read_prompts
from covey.engines.native.sizes import PREFILL_TOKENS
from covey.engines.native.slots import Ending, Paused, Progress, Transcript, Written
from covey.engines.protocol import Completion, Request, RequestSource
from covey.errors import DataError
from covey.kept_sets import encode_kept
from covey.models.language_model import LanguageModel
from covey.rng import completion_uniforms
from covey.types import VersionSpan

REFILL_SHARE = 8
"""Slots are refilled once 1 / REFILL_SHARE of them are free, because many small prefills are slow.
"""
READ_TOKENS = 16
"""A completion's new tokens are read from the device once there are `READ_TOKENS` new tokens."""


class Scheduler:
    """Generates completions for the requests from one request source."""

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
        """Maps a request index to the token spans that earlier weights generated."""
        self.limits = limits = source.limits
        self.sampling = sampling = limits.sampling
        self.queue: deque[Request] = deque()
        self.prompts: dict[int, tuple[int, ...]] = {}
        """Maps the index of a prompt with unfinished requests to the prompt's tokens."""
        self.waiting: Counter[int] = Counter()
        """Maps a prompt index to the number of its requests that have no slot yet."""
        self.unfinished: Counter[int] = Counter()
        """Maps a prompt index to the number of its unfinished requests."""
        self.first_logits: dict[int, torch.Tensor] = {}
        """For each prompt with waiting requests, the logits of the first completion token."""
        self.paused: dict[int, Paused] = {}
        """Maps a request index to its paused completion, which waits for a free slot."""
        self.preemptions = 0
        """Number of times that a completion was paused."""
        self._pull()
        self.width = backend.width_for(min(sampling.max_concurrent, limits.requests))
        self.slots = backend.begin(limits, self.width)
        self.requests: dict[int, Request] = {}
        """Maps each occupied slot to its request."""
        self.taken = np.zeros(self.width, dtype=bool)
        """Whether each slot has a request."""
        self.transcripts: dict[int, Transcript] = {}
        """Maps each occupied slot to the transcript of its tokens that were read from the device.
        """
        self.counts, self.read, self.searched = np.zeros((3, self.width), dtype=np.int64)
        """Three token counts per slot: generated, read from the device, and searched for stop
        strings."""
        self.stop_ids = frozenset(model.stop_ids)
        self.stop_tokens = special_tokens(model, sampling.stop_strings)
        """Token ids of stop strings that are special tokens, which decoded text omits."""
        self.stop_reach = 1 + max((len(s.encode()) for s in sampling.stop_strings), default=0)

    def _pull(self) -> None:
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
        counts = {number: len(each.transcript.tokens) for number, each in self.paused.items()}
        for slot, request in self.requests.items():
            counts[request.number] = int(self.counts[slot])
        for number, count in counts.items():
            self._end_span(number, count)
        self.version = version

    def _end_span(self, number: int, count: int) -> list[VersionSpan]:
        """Record that the current weights generated a completion's tokens up to token `count`."""
        spans = self.spans.setdefault(number, [])
        spans.append(VersionSpan(spans[-1].stop if spans else 0, count, self.version))
        return spans

    @property
    def running(self) -> int:
        return len(self.requests)

    def run(self) -> Iterator[list[Completion]]:
        """Yield completions as they end, in batches.

        The caller processes a batch while the device generates tokens of the other completions.
        """
        ended: tuple[list[Ending], Written] | None = None
        while self.queue or self.running or ended:
            if self.queue and (requests := self._admitted()):
                self._refill(requests)
            elif self.running and not self.queue:
                self._shrink()
            progress = self._advance() if self.running else None
            if ended:
                endings, written = ended
                last = zip(endings, written.read(), strict=True)
                yield [ending.completed(self.stop_ids, new) for ending, new in last]
            ended = None if progress is None else self._take_finished(*progress.read())
            self._pull()

    def _advance(self) -> Progress:
        """Start the next decode steps; while the device runs, read earlier tokens."""
        self._make_room()
        unread = self.taken & (self.counts - self.read >= READ_TOKENS)
        slots = np.flatnonzero(unread).tolist() if self.backend.steps > 1 else []
        stops = self.counts[slots]
        written = self.slots.written(slots, self.read[slots], stops) if slots else None
        left = self.sampling.max_tokens - int(self.counts[self.taken].min())
        progress = self.backend.advance(self.slots, self.width, left)
        if written is not None:
            for slot, new in zip(slots, written.read(), strict=True):
                self.transcripts[slot].add(*new)
            self.read[slots] = stops
        return progress

    def _admitted(self) -> list[Request]:
        """Return the requests that get a slot now, and remove them from the queue."""
        free = self.width - self.running
        if free < min(max(1, self.width // REFILL_SHARE), len(self.queue)):
            return []
        first = list(islice(self.queue, free))
        counts = [
            len(self.paused[r.number].transcript.tokens) if r.number in self.paused else 1
            for r in first
        ]
        room = self.slots.cache.admits(self._positions(np.array(counts)))
        # The cache has room for at least one completion of full length.
        return [self.queue.popleft() for _ in range(room if self.running else max(1, room))]

    def _positions(self, counts: np.ndarray) -> np.ndarray:
        """Return how many cache positions completions of `counts` tokens need for the next steps.

        A token's key and value are computed one decode step after the token was sampled. A
        completion's last token therefore needs no cache position.
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
        """Pause an unfinished completion: free its slot, and queue its request again."""
        request, transcript = self.requests.pop(slot), self.transcripts.pop(slot)
        self.taken[slot] = False
        (new,) = self.slots.written([slot], self.read[[slot]], self.counts[[slot]]).read()
        transcript.add(*new)
        kept = [] if self.slots.kept is None else self.slots.kept[slot]
        self.paused[request.number] = Paused(transcript, int(self.searched[slot]), kept)
        self.preemptions += 1
        self.slots.close([slot])
        self.slots.cache.leave([slot])
        self.queue.appendleft(request)

    def _refill(self, requests: list[Request]) -> None:
        """Assign free slots to requests, and sample the first token of each new request."""
        free = np.flatnonzero(~self.taken)[: len(requests)].tolist()
        new = [request for request in requests if request.number not in self.paused]
        old = [request for request in requests if request.number in self.paused]
        pieces = self.model.pieces
        for slot, request in zip(free, [*new, *old], strict=True):
            self.requests[slot], self.transcripts[slot] = request, Transcript(pieces)
            self.taken[slot], self.counts[slot] = True, 1
            self.searched[slot] = self.read[slot] = 0
        if new:
            self._begin(free[: len(new)], new)
        if old:
            self._resume(free[len(new) :], old)

    def _begin(self, slots: list[int], requests: list[Request]) -> None:
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
        """Assign prompts and random numbers to slots; return the slots as a device tensor."""
        # The device may still run a prefill, for which `to_device` does not wait.
        drawn = completion_uniforms([r.address for r in requests], self.sampling.max_tokens)
        ready = [torch.tensor(slots), torch.from_numpy(drawn)]
        index, uniforms = to_device(ready, self.model.device)
        self.slots.cache.enter(slots, [r.prompt for r in requests])
        self.slots.open(index, uniforms)
        return index

    def _resume(self, slots: list[int], requests: list[Request]) -> None:
        paused = [self.paused.pop(request.number) for request in requests]
        index, cache = self._open(slots, requests), self.slots.cache
        tokens = [np.array(each.transcript.tokens, dtype=np.int32) for each in paused]
        logps = [np.array(each.transcript.logp, dtype=np.float32) for each in paused]
        counts = np.array([len(row) for row in tokens])
        # The next step computes key and value of the newest token.
        cache.reserve(np.array(slots), counts - 1)
        read_completions(
            self.model,
            cache,
            {slot: request.tokens for slot, request in zip(slots, requests, strict=True)},
            {slot: row[:-1].tolist() for slot, row in zip(slots, tokens, strict=True)},
        )
        self.slots.resume(index, tokens, logps)
        self.counts[slots] = self.read[slots] = counts
        for slot, each in zip(slots, paused, strict=True):
            self.searched[slot], self.transcripts[slot] = each.searched, each.transcript
            if self.slots.kept is not None:
                self.slots.kept[slot] = each.kept

    def _to_read(self, requests: Sequence[Request]) -> list[int]:
        """Return the prompts to prefill, beginning with the prompts of the given requests.

        The returned list is empty if all prompts of the given requests are already prefilled. If
        any prompt must be prefilled, prompts from the front of the queue are added until the
        prefill is full. On a GPU, a prefill takes as long for few prompts as for many, and decoding
        waits for the prefill.
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

    def _logits(self, requests: Sequence[Request]) -> torch.Tensor:
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
        self.requests = {new: self.requests[slot] for new, slot in enumerate(kept)}
        self.transcripts = {new: self.transcripts[slot] for new, slot in enumerate(kept)}
        self.searched, self.read, self.counts = (
            np.pad(each[kept], (0, width - len(kept)))
            for each in (self.searched, self.read, self.counts)
        )
        self.taken = np.arange(width) < len(kept)
        self.width = width

    def _take_finished(
        self, active: np.ndarray, counts: np.ndarray
    ) -> tuple[list[Ending], Written] | None:
        """Return the finished completions, and free their slots.

        The device waits for this function, so all work that can be done later is left to the
        caller.
        """
        self.counts = counts
        cut = self._stop_strings() if self.sampling.stop_strings else {}
        self.slots.close([slot for slot in cut if active[slot]])
        active[list(cut)] = False
        ended = np.flatnonzero(self.taken & ~active).tolist()
        if not ended:
            return None
        lengths = np.array([cut.get(slot, int(counts[slot])) for slot in ended])
        written = self.slots.written(ended, self.read[ended], lengths)
        self.taken[ended] = False
        self.slots.cache.leave(ended)
        rows = zip(ended, lengths.tolist(), strict=True)
        return [self._ending(slot, length, cut=slot in cut) for slot, length in rows], written

    def _ending(self, slot: int, length: int, *, cut: bool) -> Ending:
        """Remove a completion of `length` tokens from its slot; its last tokens are read later."""
        request, log = self.requests.pop(slot), self.slots.kept
        kept = "" if log is None else encode_kept(log[slot][:length])
        self.unfinished[request.prompt] -= 1
        if not self.unfinished[request.prompt]:
            del self.prompts[request.prompt]
            self.slots.cache.all_ended(request.prompt)
        spans = self._end_span(request.number, length)
        versions = tuple(span for span in spans if span.stop > span.start)
        del self.spans[request.number]
        return Ending(request, self.transcripts.pop(slot), cut, versions, kept)

    def _stop_strings(self) -> dict[int, int]:
        """Map each slot with a stop string to the number of tokens up to the end of this string."""
        found: dict[int, int] = {}
        slots = np.flatnonzero(self.taken).tolist()
        # A stop string of n bytes spans at most n tokens, unless they decode to nothing.
        starts = np.maximum(0, self.searched[slots] + 1 - self.stop_reach)
        written = self.slots.written(slots, starts, self.counts[slots])
        tails = [tokens.tolist() for tokens, _ in written.read()]
        texts = self.model.decode_many(tails)
        for slot, start, tail, text in zip(slots, starts.tolist(), tails, texts, strict=True):
            if self._stops(tail, text):
                found[slot] = start + self._first_stop(tail, int(self.searched[slot]) - start)
        self.searched[slots] = self.counts[slots]
        return found

    def _first_stop(self, tail: list[int], seen: int) -> int:
        """Return the number of tokens of `tail` up to the end of the first stop string.

        The first `seen` tokens are known to contain no stop string.
        """
        for length in range(seen + 1, len(tail)):
            tokens = tail[max(0, length - self.stop_reach) : length]
            if self._stops(tokens, self.model.decode(tokens)):
                return length
        return len(tail)

    def _stops(self, tokens: list[int], text: str) -> bool:
        found = any(stop in text for stop in self.sampling.stop_strings)
        return found or not self.stop_tokens.isdisjoint(tokens)


def check_length(request: Request, model: LanguageModel, most: int) -> None:
    """Raise an error if the prompt and `most` completion tokens exceed the model's context."""
    prompt, size = request.address.prompt, len(request.tokens)
    if not size:
        raise DataError(f"prompt {prompt} has no tokens")
    if size + most > model.context:
        raise DataError(
            f"prompt {prompt} has {size} tokens, so max_tokens = {most} would exceed the model's "
            f"context of {model.context} tokens"
        )


def special_tokens(model: LanguageModel, texts: Sequence[str]) -> frozenset[int]:
    """Return the special tokens whose text is one of the given texts."""
    if not texts:
        return frozenset()
    added = model.tokenizer.added_tokens_decoder
    return frozenset(i for i, token in added.items() if token.special and token.content in texts)
