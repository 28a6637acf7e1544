"""Index tables that tell variable-length attention which packed tokens form each row.

Every packed token has exactly one query, which belongs to one row. The queries of a shared prompt
belong to the first row with this prompt. A row has keys for all of its tokens, so the keys of a
shared prompt appear in several rows. Attention is causal, with the causal mask aligned at the end
of a row. The last query of a row sees all keys of the row, and the second-to-last query sees all
keys except the last.

The dimensions in tensor shapes are N (packed tokens), R (key positions), K (key-value heads) and D
(head size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values of an attention call, or their gradients."""
HALF = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels of variable-length attention support."""


class KeyIndex(NamedTuple):
    """Indices that map packed tokens to key positions, so that rows can share a prompt."""

    tokens: torch.Tensor
    """[R] int32: the index of the packed token at each key position."""
    starts: torch.Tensor
    """[rows] int32: the first key position of each row; rows that share a prompt are adjacent."""
    begin: torch.Tensor
    """[N] int32: the index in `starts` of the first row that contains the token."""
    end: torch.Tensor
    """[N] int32: the index in `starts` of the last row that contains the token, plus one."""
    position: torch.Tensor
    """[N] int32: a token's offset from its row's start."""

    def first(self) -> torch.Tensor:
        """Return [N] int64: each token's key position in the first row that contains the token."""
        return (self.starts[self.begin.long()] + self.position).long()


class Bounds(NamedTuple):
    """Offsets of each row's queries and keys, on the CPU."""

    query: tuple[int, ...]
    key: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenRows:
    """Offsets of each row's queries and keys (cu_seqlens), and indices for keys that rows share."""

    query_starts: torch.Tensor
    """[rows + 1] int32: where each row's queries begin, and where the last row's queries end."""
    key_starts: torch.Tensor
    """[rows + 1] int32: where each row's keys begin, and where the last row's keys end."""
    longest_query: int
    longest_key: int
    shared: KeyIndex | None = None
    """Indices for copying the keys of shared prompts; None if no rows share a prompt."""
    bounds: Bounds | None = None
    """A CPU copy of `query_starts` and `key_starts`; None if there is no copy, for example in a
    CUDA graph, whose replays have other offsets."""

    def gathered(self, packed: torch.Tensor) -> torch.Tensor:
        """Expand keys or values of packed tokens [N, K, D] to all key positions [R, K, D]."""
        return packed if self.shared is None else packed.index_select(0, self.shared.tokens)
