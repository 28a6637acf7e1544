"""Completions in progress: the state of every slot, and the transcript of sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from covey.accel.packing import row_of_each, to_device
from covey.engines.draw import Distribution, log_distribution, pick_from, pick_tokens
from covey.engines.native.kv_cache import KVCache
from covey.engines.protocol import Completion, Request, Sampling
from covey.errors import ModelError
from covey.models.language_model import Pieces, joined_bytes
from covey.types import VersionSpan


class HostCopy:
    """An asynchronous CPU copy of a tensor, which later device work does not change."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Start the copy, which runs after all work that is already queued on the device."""
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def numpy(self) -> np.ndarray:
        """Return the copy once it is complete, without waiting for later device work."""
        if self._event is not None:
            self._event.synchronize()
        found: np.ndarray = self._host.numpy()
        return found


class Progress(NamedTuple):
    """The progress of all slots at one moment, as an asynchronous copy from the device."""

    copy: HostCopy
    one_more: bool
    """Whether one more decode step was started after the copy."""

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the copy; return which slots were unfinished, and the token count of each slot.

        A decode step appends one token to each unfinished slot, even if this token ends the
        completion.
        """
        active, counts = self.copy.numpy()
        return active.astype(bool), counts + active if self.one_more else counts


class Written(NamedTuple):
    """Tokens and log-probabilities of some slots, as an asynchronous copy from the device."""

    copy: HostCopy
    lengths: np.ndarray

    def read(self) -> list[tuple[np.ndarray, np.ndarray]]:
        tokens, logps = self.copy.numpy()
        rows = zip(tokens, logps.view(np.float32), self.lengths.tolist(), strict=True)
        return [(row[:length], row_logps[:length]) for row, row_logps, length in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """State of the slots; row s of a tensor is slot s, and R is the maximum completion length."""

    cache: KVCache
    uniforms: torch.Tensor
    """[S, R]: the random number in [0, 1) with which each token is drawn."""
    tokens: torch.Tensor
    """[S, R]: the tokens generated so far."""
    logps: torch.Tensor
    """[S, R]: the log-probability of each token."""
    last: torch.Tensor
    """[S]: the newest token of each slot."""
    count: torch.Tensor
    """[S]: the number of tokens generated so far in each slot."""
    stop_ids: torch.Tensor
    """Tokens that end a completion."""
    kept: list[list[np.ndarray]] | None = None
    """For each slot, the candidates that top-k, top-p and min-p left for each token; None if not
    recorded."""

    @staticmethod
    def make(cache: KVCache, sampling: Sampling, stop_ids: Sequence[int]) -> Slots:
        """Allocate memory for the completions in the slots of a cache."""
        device, slots, room = cache.place.device, cache.slots, sampling.max_tokens
        return Slots(
            cache=cache,
            uniforms=torch.zeros(slots, room, device=device),
            tokens=torch.zeros(slots, room, dtype=torch.long, device=device),
            logps=torch.zeros(slots, room, device=device),
            last=torch.zeros(slots, dtype=torch.long, device=device),
            count=torch.zeros(slots, dtype=torch.long, device=device),
            stop_ids=torch.tensor(stop_ids, device=device),
            kept=empty_kept(slots, sampling),
        )

    @property
    def room(self) -> int:
        return self.tokens.shape[1]

    def open(self, index: torch.Tensor, uniforms: torch.Tensor) -> None:
        """Prepare slots for new completions; sampling uses the numbers `uniforms` [n, R]."""
        self.uniforms[index] = uniforms
        self.count.index_fill_(0, index, 0)  # an assignment would synchronize with the device
        if self.kept is not None:
            for slot in index.tolist():
                self.kept[slot] = []

    def draw(self, index: torch.Tensor, logits: torch.Tensor, distribution: Distribution) -> None:
        """Draw the next token of the slots `index` from logits [n, V], and append the token."""
        uniforms = self.uniforms[index, self.count[index]]
        if self.kept is None:
            self.write(index, *pick_tokens(logits, uniforms, distribution))
            return
        logp = log_distribution(logits, distribution)
        allowed = logp > -torch.inf
        ids = allowed.nonzero()[:, 1].cpu().numpy()
        ends = allowed.sum(dim=1).cumsum(dim=0).tolist()
        for slot, start, stop in zip(index.tolist(), [0, *ends], ends, strict=False):
            self.kept[slot].append(ids[start:stop])
        self.write(index, *pick_from(logp, uniforms))

    def close(self, slots: list[int]) -> None:
        """End the completions of the given slots early."""
        if slots:
            self.cache.active[torch.tensor(slots, device=self.count.device)] = False

    def write(self, index: torch.Tensor, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Append a token to each slot in `index`, and mark the completions that it ends."""
        count = self.count[index]
        self.tokens[index, count] = tokens
        self.logps[index, count] = logps
        self.last[index] = tokens
        self.count[index] = count + 1
        self.cache.place[index] += 1
        self.cache.active[index] = ~self._ended(tokens, count + 1)

    def _ended(self, tokens: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return whether each new token ends its completion; `count` includes the new token."""
        return torch.isin(tokens, self.stop_ids) | (count == self.room)

    def keep(self, slots: Sequence[int]) -> None:
        """Renumber the given slots from 0, and free the other slots."""
        self.cache.keep(slots)
        index = torch.tensor(slots, device=self.count.device)
        for tensor in (self.uniforms, self.tokens, self.logps, self.last, self.count):
            tensor[: len(slots)] = tensor[index]
        if self.kept is not None:
            kept = [self.kept[slot] for slot in slots]
            self.kept[:] = kept + [[] for _ in range(len(self.kept) - len(kept))]

    def resume(
        self, index: torch.Tensor, tokens: list[np.ndarray], logps: list[np.ndarray]
    ) -> None:
        """Continue paused completions in the slots `index`, which `open` has prepared.

        A paused completion may already have ended, because its newest token may be a stop token or
        reach the length limit.
        """
        counts = torch.tensor([len(row) for row in tokens])
        which = row_of_each(counts)
        at = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
        written, said = (torch.from_numpy(np.concatenate(rows)) for rows in (tokens, logps))
        last = torch.tensor([int(row[-1]) for row in tokens])
        parts = to_device([counts, which, at, written, said, last], index.device)
        count, which, at, written, said, last = parts
        self.tokens[index[which], at] = written.long()
        self.logps[index[which], at] = said
        self.last[index], self.count[index] = last, count
        self.cache.place[index] += count
        self.cache.active[index] = ~self._ended(last, count)

    def progress(self, width: int, *, one_more: bool = False) -> Progress:
        """Start to copy the progress of the first `width` slots to the CPU."""
        both = torch.stack([self.cache.active[:width].long(), self.count[:width]])
        return Progress(HostCopy(both), one_more)

    def written(self, slots: Sequence[int], starts: np.ndarray, stops: np.ndarray) -> Written:
        lengths = stops - starts
        table = torch.from_numpy(np.stack([np.asarray(slots), starts]))
        ((index, begin),) = to_device([table], self.count.device)
        at = begin[:, None] + torch.arange(max(1, int(lengths.max())), device=begin.device)
        cells = index[:, None], at.clamp(max=self.room - 1)
        both = torch.stack([self.tokens[cells].int(), self.logps[cells].view(torch.int32)])
        return Written(HostCopy(both), lengths)


def empty_kept(slots: int, sampling: Sampling) -> list[list[np.ndarray]] | None:
    return [[] for _ in range(slots)] if sampling.returns_kept else None


# Transcripts of completions: tokens that the CPU has read, as Python numbers and as text.
#
# All completions of a step may end at the same time, and the device would then wait for the CPU to
# convert hundreds of thousands of tokens. So the scheduler converts tokens while the device
# generates more.


class Transcript:
    """The tokens of one completion that the CPU has read so far."""

    def __init__(self, pieces: Pieces | None) -> None:
        """Start an empty transcript.

        `pieces` maps token ids to bytes, or is None if the tokenizer is not byte-level.
        """
        self.tokens: list[int] = []
        self.logp: list[float] = []
        self._pieces = pieces
        self._bytes: list[bytes] = []

    def add(self, tokens: np.ndarray, logp: np.ndarray) -> None:
        new = tokens.tolist()
        self.tokens += new
        self.logp += logp.tolist()
        if self._pieces is not None:
            self._bytes.append(joined_bytes(self._pieces, new))

    @property
    def text(self) -> str | None:
        """The text of all tokens; None if the bytes of tokens are unknown."""
        if self._pieces is None:
            return None
        return b"".join(self._bytes).decode("utf-8", errors="replace")


class Paused(NamedTuple):
    """A completion that lost its slot because the KV cache was full, and continues later."""

    transcript: Transcript
    searched: int
    """The number of tokens that were already searched for stop strings."""
    kept: list[np.ndarray]
    """Candidates that top-k, top-p and min-p left for each token; empty if not recorded."""


class Ending(NamedTuple):
    """An ended completion, whose transcript still lacks the last tokens."""

    request: Request
    transcript: Transcript
    cut: bool
    """Whether the completion ended with a stop string."""
    versions: tuple[VersionSpan, ...]
    kept: str

    def completed(
        self, stop_ids: frozenset[int], last: tuple[np.ndarray, np.ndarray]
    ) -> Completion:
        """Return the completion, given its last tokens with their log-probabilities."""
        self.transcript.add(*last)
        tokens, logp = self.transcript.tokens, self.transcript.logp
        if not math.isfinite(sum(logp)):
            token, prompt = 1 + int((~np.isfinite(logp)).argmax()), self.request.address.prompt
            raise ModelError(
                f"model: the logits are not finite at token {token} of a completion of prompt "
                f"{prompt}; check the model's weights and model.dtype"
            )
        return Completion(
            request=self.request,
            tokens=tuple(tokens),
            logp=tuple(logp),
            finish="stop" if self.cut or tokens[-1] in stop_ids else "length",
            versions=self.versions,
            kept=self.kept,
            text=self.transcript.text,
        )
