"""Transcripts of completions: tokens that the CPU has read, as Python numbers and as text.

All completions of a step may end at the same time, and the device then waits for the CPU to convert
hundreds of thousands of tokens. So the scheduler converts tokens while the device generates more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from covey.engines.native.slots import Written
from covey.engines.protocol import Request
from covey.models.detokenize import Pieces, joined_bytes
from covey.types import Finish, VersionSpan


class Transcript:
    """The tokens of one completion that the CPU has read so far."""

    def __init__(self, pieces: Pieces | None) -> None:
        """Start a completion; `pieces` are the bytes of each token, if the tokenizer has them."""
        self.tokens: list[int] = []
        self.logp: list[float] = []
        self._pieces = pieces
        self._bytes: list[bytes] = []

    def add(self, tokens: np.ndarray, logp: np.ndarray) -> None:
        """Append tokens with their log-probabilities."""
        new = tokens.tolist()
        self.tokens += new
        self.logp += logp.tolist()
        if self._pieces is not None:
            self._bytes.append(joined_bytes(self._pieces, new))

    @property
    def text(self) -> str | None:
        """The text of all tokens; None without `pieces`."""
        if self._pieces is None:
            return None
        return b"".join(self._bytes).decode("utf-8", errors="replace")


class Finished(NamedTuple):
    """A finished completion."""

    request: Request
    transcript: Transcript
    finish: Finish
    versions: tuple[VersionSpan, ...]
    kept: str = ""


class Paused(NamedTuple):
    """A completion that lost its slot because the KV cache was full, and continues later."""

    transcript: Transcript
    searched: int
    """The number of tokens that were already searched for stop strings."""
    kept: list[np.ndarray]
    """For each token, the tokens that truncation kept, if recorded."""


class Ended(NamedTuple):
    """Completions that have ended, whose last tokens are on their way to the CPU."""

    finished: Sequence[Finished]
    """The completions, with transcripts that lack the last tokens, and `finish` "length"."""
    cut: Sequence[bool]
    """Whether each completion ended with a stop string."""
    written: Written
    """The last tokens."""

    def read(self, stop_ids: frozenset[int]) -> list[Finished]:
        """Wait for the last tokens, and return the complete completions."""
        found = []
        for one, cut, new in zip(self.finished, self.cut, self.written.read(), strict=True):
            one.transcript.add(*new)
            stopped = cut or one.transcript.tokens[-1] in stop_ids
            found.append(one._replace(finish="stop") if stopped else one)
        return found
