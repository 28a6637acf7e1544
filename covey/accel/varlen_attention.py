"""Variable-length attention without padding, by the flash kernels inside torch.

Every packed token has one query, in the row to which it belongs. A shared prompt has its queries in
the first of its rows. A row has a key for every token, so the keys of a shared prompt appear in
several rows. Attention is causal and aligned at the end: the last query of a row sees all keys of
the row, the second-to-last all but the last key.

torch's public function for this changes its arguments between versions; the operators below it do
not.

Shapes: N packed tokens, R key positions, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

HALF = (torch.bfloat16, torch.float16)
"""Types that the kernels support."""


class KeyIndex(NamedTuple):
    """Where keys and values of packed tokens are copied to, if rows share a prompt."""

    tokens: torch.Tensor
    """[R] int32: the packed token of each key position."""
    starts: torch.Tensor
    """[rows] int32: the first key position of each row, with rows that share a prompt adjacent."""
    begin: torch.Tensor
    """[N] int32: the index of the first entry of `starts` whose row contains the token."""
    end: torch.Tensor
    """[N] int32: the index after the last entry of `starts` whose row contains the token."""
    position: torch.Tensor
    """[N] int32: a token's offset from its row's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenRows:
    """Queries and keys of each row (cu_seqlens), and the index of keys that rows share."""

    query_starts: torch.Tensor
    """[rows + 1] int32: where the queries of each row begin, and where the last row's end."""
    key_starts: torch.Tensor
    """[rows + 1] int32: the same for keys."""
    longest_query: int
    longest_key: int
    shared: KeyIndex | None = None
    """None if every token is its own key position, so that R is N."""

    def gathered(self, packed: torch.Tensor) -> torch.Tensor:
        """Return packed keys or values [N, K, D] at their key positions [R, K, D]."""
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
    """Return attention [N, H, D] of query [N, H, D] over key and value [R, K, D]."""
    attended: torch.Tensor = _Flash.apply(query, key, value, spans, scale, window)
    return attended
