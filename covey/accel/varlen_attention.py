"""Variable-length attention without padding, with the flash attention kernels inside torch.

Every packed token has one query, in the row to which the token belongs. The queries of a shared
prompt belong to the first row that uses the prompt. A row has a key for every token, so the keys of
a shared prompt appear in several rows. Attention is causal and aligned at the end. The last query
of a row sees all keys of the row, and the second-to-last query sees all keys but the last.

This module calls torch's internal operators, because the public function for variable-length
attention changes its arguments between versions of torch.

Tensor shapes use N packed tokens, R key positions, H heads, K key-value heads and head size D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

HALF = (torch.bfloat16, torch.float16)
"""Dtypes that the flash attention kernels support."""


class KeyIndex(NamedTuple):
    """Indices that copy keys and values of packed tokens to each row that shares a prompt."""

    tokens: torch.Tensor
    """[R] int32: the index of the packed token at each key position."""
    starts: torch.Tensor
    """[rows] int32: the first key position of each row; rows that share a prompt are adjacent."""
    begin: torch.Tensor
    """[N] int32: the index of the first entry of `starts` whose row contains the token."""
    end: torch.Tensor
    """[N] int32: the index after the last entry of `starts` whose row contains the token."""
    position: torch.Tensor
    """[N] int32: a token's offset from its row's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenRows:
    """Offsets of each row's queries and keys (cu_seqlens), and the index of shared keys."""

    query_starts: torch.Tensor
    """[rows + 1] int32: where each row's queries begin, and where the last row's queries end."""
    key_starts: torch.Tensor
    """[rows + 1] int32: where the keys of each row begin, and where those of the last row end."""
    longest_query: int
    longest_key: int
    shared: KeyIndex | None = None
    """None if no rows share a prompt; every token then has one key position."""

    def gathered(self, packed: torch.Tensor) -> torch.Tensor:
        """Copy packed keys or values [N, K, D] to their key positions [R, K, D]."""
        return packed if self.shared is None else packed.index_select(0, self.shared.tokens)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spans: VarlenRows,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        limits = (spans.query_starts, spans.key_starts, spans.longest_query, spans.longest_key)
        options = {"scale": scale}
        if window is not None:
            options |= {"window_size_left": window - 1, "window_size_right": 0}
        attended, total, seed, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *limits, 0.0, True, False, **options
        )
        ctx.save_for_backward(query, key, value, attended, total, seed, unused)
        ctx.limits, ctx.options = limits, options
        result: torch.Tensor = attended
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, attended, total, seed, unused = ctx.saved_tensors
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), query, key, value, attended, total, *ctx.limits, 0.0, True,
            seed, unused, **ctx.options,
        )  # fmt: skip
        return *found, None, None, None


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: VarlenRows,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Return the attention output [N, H, D] for queries [N, H, D], keys and values [R, K, D]."""
    attended: torch.Tensor = _Flash.apply(query, key, value, spans, scale, window)
    return attended
