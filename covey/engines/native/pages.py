"""Page tables of the KV cache: assign pages of a pool to the completions in slots.

Keys and values of a completion are stored in pages of a fixed number of positions. So the used
memory depends on the actual lengths of completions. The CPU assigns pages before the device needs
them. A slot keeps its pages until its completion has ended or is paused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

PAGE = 128
"""Number of positions in a page. Attention reads tiles of up to this many positions, and a tile
must not cross pages."""
LEAST_PAGE = 16
"""Minimum number of positions in a page: the smallest tile of tensor cores."""


def page_for(capacity: int) -> int:
    """Return the page size for completions of up to `capacity` tokens."""
    return min(PAGE, max(LEAST_PAGE, 1 << (capacity - 1).bit_length()))


class Pages:
    """The pages of every slot, and the free pages."""

    def __init__(self, pages: int, slots: int, page: int) -> None:
        self.page, self.count = page, pages
        self.of_slot: list[list[int]] = [[] for _ in range(slots)]
        self.owned = np.zeros(slots, dtype=np.int64)
        """[S]: the number of pages of each slot."""
        self.free = list(range(pages))

    def needed(self, positions: np.ndarray) -> np.ndarray:
        """Return how many pages are needed for each of the given numbers of positions."""
        return -(-positions // self.page)

    def reserve(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Assign enough pages to each of the given slots to store `positions` tokens.

        Return the new pages [n, 3]: slot, index of the page within the slot, and page number. If
        there are too few free pages, return None and change nothing.
        """
        more = np.maximum(self.needed(positions) - self.owned[slots], 0)
        if more.sum() > len(self.free):
            return None
        changes = []
        for slot, count in zip(slots[more > 0].tolist(), more[more > 0].tolist(), strict=True):
            own = self.of_slot[slot]
            for _ in range(count):
                changes.append((slot, len(own), self.free[-1]))
                own.append(self.free.pop())
        self.owned[slots] += more
        return np.array(changes, dtype=np.int64).reshape(-1, 3)

    def admits(self, positions: np.ndarray) -> int:
        """Return how many of the next completions fit into memory.

        Completion i needs `positions[i]` positions.

        One free page is reserved for each running completion, because completions grow.
        """
        spare = len(self.free) - np.count_nonzero(self.owned)
        return int(np.searchsorted(np.cumsum(self.needed(positions) + 1), spare, side="right"))

    def release(self, slots: Iterable[int]) -> None:
        """Free the pages of slots."""
        for slot in slots:
            self.free += self.of_slot[slot]
            self.of_slot[slot], self.owned[slot] = [], 0

    def keep(self, slots: Sequence[int]) -> None:
        """Renumber the given slots from 0, and free the pages of the other slots."""
        self.release(set(range(len(self.of_slot))) - set(slots))
        kept = [self.of_slot[slot] for slot in slots]
        self.of_slot = kept + [[] for _ in range(len(self.of_slot) - len(kept))]
        self.owned[:] = [len(own) for own in self.of_slot]
