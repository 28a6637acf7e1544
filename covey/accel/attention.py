"""Attention functions for packed rows and for short CPU sequences, used by transformers.

A transformers model with standard attention needs no change, because it calls the attention
function that this module registers.

With packing, the model sees all tokens of a batch as one long row without padding. A prompt that
several completions share occurs only once in the packed row. All layers except attention process
each token on its own. Attention needs to know which packed tokens belong to the same sequence.
Flash attention reads the packed tokens without padding (VarlenRows, in attention_kernels.py). Other
attention implementations gather the packed tokens into padded rows (PaddedRows).

The dimensions in tensor shapes are N (packed tokens), B (rows), S (columns), H (heads), K
(key-value heads) and D (head size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from covey.accel.attention_kernels import QKV, VarlenRows, flash_attention
from covey.accel.sizes import SHORT

NAME = "covey"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """Indices that map positions in padded rows to packed tokens, and back."""

    rows: torch.Tensor
    """[B, S] int64: the index of the packed token at each position of a padded row."""
    home: torch.Tensor
    """[N] int64: for each packed token, the index of one of its positions in the flattened
    `rows`."""


class CustomAttention(Protocol):
    """A key-value cache that computes attention itself.

    Only the cache knows where its keys and values are stored.
    """

    def attend(self, module: torch.nn.Module, heads: QKV, options: dict[str, Any]) -> torch.Tensor:
        """Return the attention output [batch, positions, H, D]."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: PaddedRows | VarlenRows | CustomAttention | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute scaled dot-product attention; return its output [batch, positions, H, D]."""
    if packing is None:
        return _attend(module, (query, key, value), attention_mask, options), None
    if not isinstance(packing, PaddedRows | VarlenRows):
        return packing.attend(module, (query, key, value), options), None
    if isinstance(packing, VarlenRows):
        if options.get("softcap") is not None:
            raise NotImplementedError("flash attention has no soft cap")
        scaling, window = options.get("scaling"), options.get("sliding_window")
        keys, values = (packing.gathered(t[0].transpose(0, 1)) for t in (key, value))
        queries = query[0].transpose(0, 1)
        return flash_attention(queries, keys, values, packing, scaling, window)[None], None
    rows, cells = packing.rows.flatten(), packing.rows.shape

    def gathered(packed: torch.Tensor) -> torch.Tensor:
        tokens = packed[0].transpose(0, 1).flatten(1).index_select(0, rows)
        return tokens.view(*cells, packed.shape[1], packed.shape[3]).transpose(1, 2)

    # Causal attention never reads the padding, which is on the right, so no mask is needed.
    heads = gathered(query), gathered(key), gathered(value)
    attended = _attend(module, heads, None, options)
    packed = attended.flatten(0, 1).index_select(0, packing.home)
    return packed[None], None


def _attend(
    module: torch.nn.Module, heads: QKV, mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    query, key, _ = heads
    length, window = key.shape[2], options.get("sliding_window")
    plain = mask is not None or query.shape[2] == length or query.shape[2] == 1
    plain = plain and (mask is None or mask.dtype == torch.bool)
    plain = plain and not (options.get("dropout") and module.training)
    if mask is None and window is not None and length > window:
        mask = _window_mask(query, length, window)
    if options.get("softcap") is not None:
        return _softcap_attention(heads, mask, options)
    if query.device.type == "cpu" and length <= SHORT and plain:
        return _short_attention(heads, mask, options.get("scaling"))
    attended: torch.Tensor = sdpa_attention_forward(module, *heads, mask, **options)[0]
    return attended


def _softcap_attention(
    heads: QKV, mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Compute attention with soft-capped scores, which no fused kernel supports."""
    query, key, value = heads
    softcap, scaling = options["softcap"], options.get("scaling")
    batch, count, positions, size = query.shape
    # In bfloat16, the rounding error of a score of 50 would be up to 0.25.
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = query.unflatten(1, (key.shape[1], -1)).to(wide)
    scores = rows @ key.unsqueeze(2).transpose(3, 4).to(wide)
    scores = scores * (size**-0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None and positions > 1:
        mask = _window_mask(query, key.shape[2], key.shape[2])
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask.unsqueeze(2), torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask.unsqueeze(2)
    attended: torch.Tensor = scores.softmax(dim=-1).to(value.dtype) @ value.unsqueeze(2)
    return attended.reshape(batch, count, positions, size).transpose(1, 2)


def _window_mask(query: torch.Tensor, length: int, window: int) -> torch.Tensor:
    at = torch.arange(length, device=query.device)
    behind = at[:, None] - at
    return ((behind >= 0) & (behind < window))[None, None]


def _short_attention(heads: QKV, mask: torch.Tensor | None, scaling: float | None) -> torch.Tensor:
    query, key, value = heads
    positions, size = query.shape[2:]
    if mask is None and positions > 1:
        mask = torch.ones(1, 1, positions, positions, dtype=torch.bool, device=query.device).tril()
    bias = query.new_zeros(1, 1, 1)
    if mask is not None:
        bias = short_bias(mask, query.dtype, key.shape[1], query.shape[1] // key.shape[1])
    return short_attention(query, key, value, bias, size**-0.5 if scaling is None else scaling)


def short_bias(mask: torch.Tensor, dtype: torch.dtype, key_heads: int, shared: int) -> torch.Tensor:
    """Turn a mask [batch or 1, 1, positions, length] into an additive attention bias."""
    bias = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    bias = bias.flatten(0, 1)
    bias = bias.repeat_interleave(key_heads, 0) if len(bias) > 1 else bias
    return bias.repeat(1, shared, 1) if shared > 1 else bias


def short_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute attention as two batched matrix products.

    The queries of all heads that share a key head are the rows of one matrix.
    """
    batch, heads, positions, size = query.shape
    rows = query.reshape(batch * key.shape[1], heads // key.shape[1] * positions, size)
    scores = torch.baddbmm(bias, rows, key.flatten(0, 1).transpose(1, 2), alpha=scale)
    attended = torch.bmm(scores.softmax(dim=-1), value.flatten(0, 1))
    return attended.view(batch, heads, positions, size).transpose(1, 2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
