"""Record which tokens top-k, top-p and min-p kept (kept sets), for completions in progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from covey.kept_sets import encode_kept


@dataclass(slots=True)
class KeptLog:
    """The tokens that truncation kept, for each sampled token of each slot, in CPU memory."""

    slots: list[list[np.ndarray]]

    @staticmethod
    def make(slots: int) -> KeptLog:
        """Return an empty log for all slots."""
        return KeptLog([[] for _ in range(slots)])

    def open(self, index: torch.Tensor) -> None:
        """Start new completions in the given slots."""
        for slot in index.tolist():
            self.slots[slot] = []

    def add(self, index: torch.Tensor, kept: torch.Tensor) -> None:
        """Append the tokens that truncation kept [n, V] for the newest token of each slot."""
        ids = kept.nonzero()[:, 1].cpu().numpy()
        ends = kept.sum(dim=1).cumsum(dim=0).tolist()
        for slot, start, stop in zip(index.tolist(), [0, *ends], ends, strict=False):
            self.slots[slot].append(ids[start:stop])

    def keep(self, slots: Sequence[int]) -> None:
        """Renumber the given slots from 0, and drop the other slots."""
        kept = [self.slots[slot] for slot in slots]
        self.slots = kept + [[] for _ in range(len(self.slots) - len(kept))]

    def text(self, slot: int, length: int) -> str:
        """Return the tokens that truncation kept for a slot's first `length` tokens, as text."""
        sets: Sequence[np.ndarray] = self.slots[slot][:length]
        return encode_kept(sets)
