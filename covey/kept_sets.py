"""Kept sets: the token ids that top-k, top-p and min-p allowed at each sampled position.

The trainer computes log-probabilities over the kept sets, so that training and sampling use the
same distribution. DeepSeek-V3.2 calls training on kept sets "keep sampling mask". An engine returns
the kept sets of a completion as one compact string. The compact string can be stored in JSON and in
checkpoints, and sent through pipes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

_WORD = "<u4"


def encode_kept(sets: Sequence[np.ndarray]) -> str:
    """Encode sets of token ids as text; the ids of each set must be in ascending order.

    The encoding compresses the differences between successive token ids. A small set takes a few
    bytes, and a set of nearly the whole vocabulary takes less space than a bit mask.
    """
    counts = np.array([len(ids) for ids in sets], dtype=_WORD)
    steps = [np.diff(ids, prepend=0) for ids in sets]
    words = np.concatenate([np.array([len(sets)]), counts, *steps]).astype(_WORD)
    return base64.b64encode(zlib.compress(words.tobytes(), level=1)).decode()


def decode_kept(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Decode a text of n sets; return the set sizes [n] and the concatenated token ids."""
    words = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=_WORD).astype(np.int64)
    size = int(words[0])
    counts, steps = words[1 : 1 + size], words[1 + size :]
    sums = np.concatenate([[0], np.cumsum(steps)])
    starts = np.cumsum(counts) - counts
    return counts, sums[1:] - np.repeat(sums[starts], counts)


class KeptIds(NamedTuple):
    """The kept sets of M tokens: set i is `ids[starts[i] : starts[i + 1]]`."""

    starts: np.ndarray
    """[M + 1]."""
    ids: torch.Tensor
    """The token ids of all kept sets, on the device of the logits."""
    row: torch.Tensor
    """The index, from 0 to M - 1, of the kept set to which each token id in `ids` belongs."""

    def keep_only(self, logits: torch.Tensor, part: slice, nothing: float) -> None:
        """Set logits [m, V] outside the kept sets to `nothing`; `part` selects the m kept sets."""
        import torch

        here = slice(int(self.starts[part.start]), int(self.starts[part.stop]))
        outside = torch.ones_like(logits, dtype=torch.bool)
        outside[self.row[here] - part.start, self.ids[here]] = False
        logits.masked_fill_(outside, nothing)


class _Ragged(NamedTuple):
    """The fields of `KeptIds` as numpy arrays in CPU memory."""

    starts: np.ndarray
    ids: np.ndarray
    row: np.ndarray


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The kept sets of a batch, with the token ids of all sets in one array in CPU memory."""

    starts: np.ndarray
    """[B, T]: index in `ids` at which the kept set of a token begins."""
    counts: np.ndarray
    """[B, T]: size of a token's kept set; 0 for tokens that were not sampled."""
    ids: np.ndarray

    @staticmethod
    def of(segments: Sequence[tuple[Sequence[bool], Sequence[str]]], width: int) -> KeptSets:
        """Decode the kept sets of segments, given each segment's mask of sampled tokens.

        Raise ValueError if a segment has more or fewer sets than sampled tokens.
        """
        counts = np.zeros((len(segments), width), dtype=np.int64)
        ids = [np.zeros(0, dtype=np.int64)]
        for row, (trained, texts) in enumerate(segments):
            found = [decode_kept(text) for text in texts]
            sizes = [size for sizes, _ in found for size in sizes]
            if len(sizes) != sum(trained):
                raise ValueError(f"{len(sizes)} kept sets for {sum(trained)} sampled tokens")
            counts[row, : len(trained)][np.array(trained, dtype=bool)] = sizes
            ids += [values for _, values in found]
        starts = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
        return KeptSets(starts, counts, np.concatenate(ids))

    def rows(self, index: torch.Tensor, width: int) -> KeptSets:
        """Return the kept sets of the first `width` tokens of the rows in `index`."""
        rows = index.numpy()
        return KeptSets(self.starts[rows, :width], self.counts[rows, :width], self.ids)

    def at(self, cells: torch.Tensor) -> KeptIds:
        """Return the kept sets of the M tokens whose flat indices in [B, T] are `cells` [M]."""
        import torch

        starts, *found = self._ragged(cells.cpu().numpy())
        ids, row = (torch.from_numpy(values).to(cells.device) for values in found)
        return KeptIds(starts, ids, row)

    def lacking(self, tokens: np.ndarray) -> np.ndarray:
        """Return a mask [B, T] of the sampled tokens that are missing in their own kept set."""
        kept = self._ragged(np.arange(self.counts.size))
        has = np.zeros(self.counts.size, dtype=bool)
        has[kept.row[kept.ids == tokens.ravel()[kept.row]]] = True
        return (self.counts > 0) & ~has.reshape(self.counts.shape)

    def _ragged(self, cells: np.ndarray) -> _Ragged:
        first, counts = self.starts.ravel()[cells], self.counts.ravel()[cells]
        starts = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(len(cells)), counts)
        return _Ragged(starts, self.ids[np.arange(len(row)) - starts[row] + first[row]], row)
