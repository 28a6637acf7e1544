"""Completions in progress: tokens, log-probabilities and random numbers of every slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from covey.accel.packing import row_of_each, to_device
from covey.engines.draw import Distribution, log_distribution, pick_from, pick_tokens
from covey.engines.native.kept_log import KeptLog
from covey.engines.native.kv_cache import KVCache
from covey.engines.protocol import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """State of the slots; row s of a tensor is slot s, and R is the maximum completion length."""

    cache: KVCache
    uniforms: torch.Tensor
    """[S, R]."""
    tokens: torch.Tensor
    """[S, R]."""
    logps: torch.Tensor
    """[S, R]."""
    last: torch.Tensor
    """[S]: the newest token of each slot."""
    count: torch.Tensor
    """[S]: the number of tokens generated so far in each slot."""
    stop_ids: torch.Tensor
    """Tokens that end a completion."""
    kept: KeptLog | None = None
    """The kept set of each token (tokens left after truncation); None if not recorded."""

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
            kept=KeptLog.make(slots) if sampling.returns_kept else None,
        )

    @property
    def room(self) -> int:
        """Maximum length of a completion."""
        return self.tokens.shape[1]

    def open(self, index: torch.Tensor, uniforms: torch.Tensor) -> None:
        """Prepare slots for new completions, whose tokens are drawn with `uniforms` [n, R]."""
        self.uniforms[index] = uniforms
        self.count.index_fill_(0, index, 0)  # an assignment would synchronize with the device
        if self.kept is not None:
            self.kept.open(index)

    def draw(self, index: torch.Tensor, logits: torch.Tensor, distribution: Distribution) -> None:
        """Draw the next token of the slots `index` from logits [n, V], and append the token."""
        uniforms = self.uniforms[index, self.count[index]]
        self.write(index, *self.pick(index, logits, uniforms, distribution))

    def pick(
        self,
        index: torch.Tensor,
        logits: torch.Tensor,
        uniforms: torch.Tensor,
        distribution: Distribution,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens [n] with log-probabilities; record what truncation kept if requested."""
        if self.kept is None:
            return pick_tokens(logits, uniforms, distribution)
        logp = log_distribution(logits, distribution)
        self.kept.add(index, logp > -torch.inf)
        return pick_from(logp, uniforms)

    def close(self, slots: list[int]) -> None:
        """End the completions of the given slots early."""
        if slots:
            self.cache.active[torch.tensor(slots, device=self.count.device)] = False

    def write(self, index: torch.Tensor, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Append a token to each slot in `index`.

        A stop token or the length limit ends the completion.
        """
        count = self.count[index]
        self.tokens[index, count] = tokens
        self.logps[index, count] = logps
        self.last[index] = tokens
        self.count[index] = count + 1
        self.cache.place[index] += 1
        self.cache.active[index] = ~self._ended(tokens, count + 1)

    def _ended(self, tokens: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return whether the new `tokens` end their completions, which then have `count` tokens."""
        return torch.isin(tokens, self.stop_ids) | (count == self.room)

    def keep(self, slots: Sequence[int]) -> None:
        """Renumber the given slots from 0, and free the other slots."""
        self.cache.keep(slots)
        index = torch.tensor(slots, device=self.count.device)
        for tensor in (self.uniforms, self.tokens, self.logps, self.last, self.count):
            tensor[: len(slots)] = tensor[index]
        if self.kept is not None:
            self.kept.keep(slots)

    def resume(
        self, index: torch.Tensor, tokens: list[np.ndarray], logps: list[np.ndarray]
    ) -> None:
        """Continue paused completions in the slots `index`, which `open` has prepared.

        The newest token of a paused completion may be its last.
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

    def progress(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which slots are unfinished, and their token counts; this waits for the device."""
        both = torch.stack([self.cache.active[:width].long(), self.count[:width]]).cpu().numpy()
        return both[0].astype(bool), both[1]

    def written(self, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and log-probabilities [n, R] of some slots, on the CPU."""
        (index,) = to_device([torch.tensor(slots)], self.count.device)
        # One transfer instead of two, because each one waits for the device.
        both = torch.stack([self.tokens[index].int(), self.logps[index].view(torch.int32)])
        tokens, logps = both.cpu().numpy()
        return tokens, logps.view(np.float32)
