"""Decode step of Llama-like models, written out with the model's own weights.

Any model can decode with its forward pass in transformers (transformers_decoder.py). Most models
have Llama's architecture, and for these this module does the same arithmetic directly: with one
token per slot, the Python code between a model's operations costs more than the operations.
decoder_parity.py checks the result against the model when the engine is built.

Shapes: W slots in use, H heads, K key-value heads, D head size, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention

from covey.accel.attention import SHORT, short_attention, short_bias
from covey.accel.parity import plain_positions
from covey.engines.native.kv_cache import SlotCache
from covey.models.adapter import NAME
from covey.models.language_model import LanguageModel

FUSED_COPY_BYTES = 64 * 2**20
"""Weights up to this size are copied into fused matrices at the start of every generation call.
Small matrix products are slow for their size, and the copy is cheap. Larger models use their
weights in place."""


class UnsupportedModel(Exception):
    """A backend cannot run a model; the message gives the reason as half a sentence."""

    def __str__(self) -> str:
        return super().__str__() or "it does not have Llama's architecture"


class Decoder(Protocol):
    """Runs a model for one token per slot."""

    def begin(self, positions: int) -> None:
        """Prepare for sequences of up to `positions` tokens, with the current weights."""

    def step(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return hidden states [W, hidden size] after `tokens` [W], and write to the cache."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer, optionally with LoRA's two matrices."""

    layer: nn.Linear
    down: nn.Linear | None = None
    up: nn.Linear | None = None
    scale: float = 1.0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return W x + b + scale * B A x."""
        result = linear(values, self.layer.weight, self.layer.bias)
        if self.down is None or self.up is None:
            return result
        thin = linear(values, self.down.weight)
        return torch.addmm(result, thin, self.up.weight.t(), alpha=self.scale)


class FusedWeights(NamedTuple):
    """Query, key and value weights of a layer in one matrix, and gate and up in another."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Block:
    """Modules of one layer, so that weights are always the current ones."""

    input_norm: nn.Module
    query: _Linear
    key: _Linear
    value: _Linear
    output: _Linear
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    post_norm: nn.Module
    gate: _Linear
    up: _Linear
    down: _Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    head_size: int
    scaling: float

    @property
    def qkv_layers(self) -> tuple[_Linear, _Linear, _Linear]:
        """The layers that read the first norm."""
        return self.query, self.key, self.value

    @property
    def gate_up_layers(self) -> tuple[_Linear, _Linear]:
        """The layers that read the second norm."""
        return self.gate, self.up

    @property
    def adapted(self) -> bool:
        """Whether any of the layers has an adapter."""
        parts = (*self.qkv_layers, *self.gate_up_layers, self.output, self.down)
        return any(part.down is not None for part in parts)

    def qkv(self, normed: torch.Tensor, fused: FusedWeights | None) -> torch.Tensor:
        """Return queries, keys and values [W, (H + 2 K) * D]."""
        if fused is not None:
            return linear(normed, fused.qkv, fused.qkv_bias)
        return torch.cat([part(normed) for part in self.qkv_layers], dim=-1)

    def gate_up(
        self, normed: torch.Tensor, fused: FusedWeights | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gate and up projections."""
        if fused is None:
            return self.gate(normed), self.up(normed)
        gate, up = linear(normed, fused.gate_up, fused.gate_up_bias).chunk(2, dim=-1)
        return gate, up

    def fuse(self) -> FusedWeights:
        """Copy weights that are applied to the same input into one matrix."""

        def stacked(*parts: _Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
            biases: list[torch.Tensor] = [m.layer.bias for m in parts if m.layer.bias is not None]
            return torch.cat([m.layer.weight for m in parts]), torch.cat(biases) if biases else None

        return FusedWeights(*stacked(*self.qkv_layers), *stacked(*self.gate_up_layers))


class LlamaDecoder:
    """The arithmetic of a Llama-like model without the model's Python code."""

    def __init__(self, model: LanguageModel) -> None:
        backbone: Any = model.backbone
        self.embedding: nn.Embedding = backbone.embed_tokens
        self.blocks = [_block(layer) for layer in backbone.layers]
        self.final_norm: nn.Module = backbone.norm
        self.rotary: nn.Module = backbone.rotary_emb
        self.cosine = self.signed_sine = torch.empty(0)
        self.fused: list[FusedWeights] | list[None] = [None] * len(self.blocks)
        self.fuses = _fuses(self.blocks)
        if type(self.embedding) is not nn.Embedding or not plain_positions(model.model.config):
            raise UnsupportedModel

    def begin(self, positions: int) -> None:
        """Tabulate the rotary embedding, and fuse the weights of a small model."""
        weight = self.embedding.weight
        places = torch.arange(positions, device=weight.device)
        cosine, sine = self.rotary(weight[:1, None], places[None])
        half = sine.shape[-1] // 2
        # rotate_half(x) is (-x2, x1); with the sign in the table it is a swap of halves.
        sign = torch.cat([-torch.ones_like(sine[0, 0, :half]), torch.ones_like(sine[0, 0, half:])])
        self.cosine, self.signed_sine = cosine[0][:, None], (sine[0] * sign)[:, None]
        if self.fuses:
            self.fused = [block.fuse() for block in self.blocks]

    def step(self, tokens: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Run all layers."""
        place = cache.place[: cache.width]
        rope = self.cosine[place], self.signed_sine[place]
        seen = torch.arange(cache.reach, device=place.device) <= place[:, None]
        heads = cache.layer_keys[0].shape[1]
        rows = _rows(place, heads, cache.layer_keys[0].shape[2])
        attend = _attention(seen, heads, self.blocks[0], self.embedding.weight)
        hidden = embedding(tokens, self.embedding.weight)
        for number, (block, fused) in enumerate(zip(self.blocks, self.fused, strict=True)):
            qkv = block.qkv(_norm(block.input_norm, hidden), fused)
            query, key, value = _heads(block, qkv, heads, rope)
            keys, values = cache.layer_keys[number], cache.layer_values[number]
            keys.view(-1, block.head_size).index_copy_(0, rows, key.flatten(0, 1))
            values.view(-1, block.head_size).index_copy_(0, rows, value.flatten(0, 1))
            width, reach = cache.width, cache.reach
            attended = attend(query, keys[:width, :, :reach], values[:width, :, :reach])
            hidden = hidden + block.output(attended)
            gate, up = block.gate_up(_norm(block.post_norm, hidden), fused)
            hidden = hidden + block.down(block.activation(gate) * up)
        return _norm(self.final_norm, hidden)


def _block(layer: Any) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    return Block(
        input_norm=layer.input_layernorm,
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        output=_linear(attention.o_proj),
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        post_norm=layer.post_attention_layernorm,
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        activation=mlp.act_fn,
        head_size=attention.head_dim,
        scaling=attention.scaling,
    )


def _linear(module: Any) -> _Linear:
    """Take a linear layer apart; quantized layers and layers with hooks are not supported."""
    if not hasattr(module, "lora_A"):
        found = _Linear(module)
    else:
        down, up = module.lora_A[NAME], module.lora_B[NAME]
        found = _Linear(module.base_layer, down, up, module.scaling[NAME])
    parts = [part for part in (found.layer, found.down, found.up) if part is not None]
    hooks = any(part._forward_hooks for part in (module, *parts))
    if hooks or any(type(part) is not nn.Linear for part in parts):
        raise UnsupportedModel
    return found


def _norm(module: Any, values: torch.Tensor) -> torch.Tensor:
    # Modules compute norms in float32; for other types they round at places of their own.
    if values.dtype != torch.float32:
        normed: torch.Tensor = module(values)
        return normed
    return rms_norm(values, values.shape[-1:], module.weight, module.variance_epsilon)


Rope = tuple[torch.Tensor, torch.Tensor]


def _heads(
    block: Block, qkv: torch.Tensor, key_heads: int, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query [W, H, D], key and value [W, K, D]; rotate the first two."""
    heads = qkv.view(len(qkv), -1, block.head_size)
    rotated, value = heads[:, :-key_heads], heads[:, -key_heads:]
    if block.query_norm is not None:
        query = _norm(block.query_norm, rotated[:, :-key_heads])
        rotated = torch.cat([query, _norm(block.key_norm, rotated[:, -key_heads:])], dim=1)
    rotated = _apply_rope(rotated, rope)
    return rotated[:, :-key_heads], rotated[:, -key_heads:], value


def _fuses(blocks: list[Block]) -> bool:
    """Tell whether the weights are small enough to copy, and plain linear layers."""
    parts = [m for b in blocks for m in (*b.qkv_layers, *b.gate_up_layers)]
    size = sum(m.layer.weight.numel() * m.layer.weight.element_size() for m in parts)
    adapted = any(b.adapted for b in blocks)
    return size <= FUSED_COPY_BYTES and not blocks[0].query_norm and not adapted


def _apply_rope(heads: torch.Tensor, rope: Rope) -> torch.Tensor:
    cosine, signed_sine = rope
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cosine, torch.cat((second, first), dim=-1), signed_sine)


def _rows(place: torch.Tensor, heads: int, capacity: int) -> torch.Tensor:
    """Return the rows of the new positions in a cache that is flattened to [S * K * L, D]."""
    slots = torch.arange(len(place) * heads, device=place.device)
    return slots * capacity + place.repeat_interleave(heads)


def _attention(
    seen: torch.Tensor, key_heads: int, block: Block, weight: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function from query [W, H, D], keys and values [W, K, L, D] to [W, H * D]."""
    mask = seen[:, None, None]
    shared = block.query.layer.out_features // (key_heads * block.head_size)
    if weight.device.type == "cpu" and seen.shape[1] <= SHORT:
        bias = short_bias(mask, weight.dtype, key_heads, shared)

        def short(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            attended = short_attention(query[:, :, None], keys, values, bias, block.scaling)
            return attended.flatten(1)

        return short

    def fused(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        attended = scaled_dot_product_attention(
            query[:, :, None], keys, values, mask, scale=block.scaling, enable_gqa=shared > 1
        )
        return attended.flatten(1)

    return fused
