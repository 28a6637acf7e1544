"""One step of decoding: from the last token of every slot to the hidden state of the next.

Any model can take its own forward pass in transformers (own.py). Most have the shape of Llama,
though, and for these the same arithmetic is written out here: at one token a slot, the layers of
Python between a model's operations cost more than the operations do. The weights are the model's
own, and whether the shape is understood is tried when the sampler is made (trial.py).

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

JOINT_BYTES = 64 * 2**20
"""Weights up to this size are copied side by side for every batch of answers: small products are
slow for their size, and the copy costs nothing. A larger model's are used where they are."""


class Decoder(Protocol):
    """Whatever can go one token further."""

    def begin(self, positions: int) -> None:
        """Make ready for prompt and answer of so many positions, with the weights as of now."""

    def step(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return hidden states [W, hidden size] after `tokens` [W], writing to the cache."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer, perhaps with an adapter's two thin ones beside it."""

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


@dataclass(frozen=True, slots=True)
class Block:
    """The parts of one layer; modules, so that their weights are always those of now."""

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
    def heads(self) -> tuple[_Linear, _Linear, _Linear]:
        """What is applied to the first norm."""
        return self.query, self.key, self.value

    @property
    def gates(self) -> tuple[_Linear, _Linear]:
        """What is applied to the second norm."""
        return self.gate, self.up

    @property
    def adapted(self) -> bool:
        """Whether an adapter stands beside some layer."""
        parts = (*self.heads, *self.gates, self.output, self.down)
        return any(part.down is not None for part in parts)


class Joint(NamedTuple):
    """Weights of one layer that are applied to the same input, side by side."""

    heads: torch.Tensor
    heads_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None

    def renew(self, block: Block) -> None:
        """Copy the layer's weights of now, to where those of before were."""
        for mine, now in zip(self, join(block), strict=True):
            if mine is not None and now is not None:
                mine.copy_(now)


class NotUnderstood(Exception):
    """A model is not computed in some way; the message says why, in half a sentence."""

    def __str__(self) -> str:
        return super().__str__() or "it does not have the shape of Llama"


class LlamaDecoder:
    """The arithmetic of a model with the shape of Llama, without the model's Python."""

    def __init__(self, model: LanguageModel) -> None:
        backbone: Any = model.backbone
        self.embedding: nn.Embedding = backbone.embed_tokens
        self.blocks = [_block(layer) for layer in backbone.layers]
        self.final_norm: nn.Module = backbone.norm
        self.rotary: nn.Module = backbone.rotary_emb
        self.cosine = self.signed_sine = torch.empty(0)
        self.joint: list[Joint] | None = None
        self.joins = _joins(self.blocks)
        if type(self.embedding) is not nn.Embedding or not plain_positions(model.model.config):
            raise NotUnderstood

    def begin(self, positions: int) -> None:
        """Tabulate the rotary embedding, and put a small model's weights side by side."""
        weight = self.embedding.weight
        places = torch.arange(positions, device=weight.device)
        cosine, sine = self.rotary(weight[:1, None], places[None])
        half = sine.shape[-1] // 2
        # rotate_half(x) is (-x2, x1); with the sign in the table it is a mere swap of halves.
        sign = torch.cat([-torch.ones_like(sine[0, 0, :half]), torch.ones_like(sine[0, 0, half:])])
        self.cosine, self.signed_sine = cosine[0][:, None], (sine[0] * sign)[:, None]
        self.joint = [join(block) for block in self.blocks] if self.joins else None

    def step(self, tokens: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Go through all layers."""
        place = cache.place[: cache.width]
        rope = self.cosine[place], self.signed_sine[place]
        seen = torch.arange(cache.reach, device=place.device) <= place[:, None]
        heads = cache.layer_keys[0].shape[1]
        rows = _rows(place, heads, cache.layer_keys[0].shape[2])
        attend = _attention(seen, heads, self.blocks[0], self.embedding.weight)
        hidden = embedding(tokens, self.embedding.weight)
        for number, block in enumerate(self.blocks):
            joint = None if self.joint is None else self.joint[number]
            query, key, value = _heads(block, joint, _norm(block.input_norm, hidden), rope)
            keys, values = cache.layer_keys[number], cache.layer_values[number]
            keys.view(-1, block.head_size).index_copy_(0, rows, key.flatten(0, 1))
            values.view(-1, block.head_size).index_copy_(0, rows, value.flatten(0, 1))
            width, reach = cache.width, cache.reach
            attended = attend(query, keys[:width, :, :reach], values[:width, :, :reach])
            hidden = hidden + block.output(attended)
            gate, up = _gate_up(block, joint, _norm(block.post_norm, hidden))
            hidden = hidden + block.down(block.activation(gate) * up)
        return _norm(self.final_norm, hidden)


def _block(layer: Any) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    return Block(
        input_norm=layer.input_layernorm,
        query=_understood(attention.q_proj),
        key=_understood(attention.k_proj),
        value=_understood(attention.v_proj),
        output=_understood(attention.o_proj),
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        post_norm=layer.post_attention_layernorm,
        gate=_understood(mlp.gate_proj),
        up=_understood(mlp.up_proj),
        down=_understood(mlp.down_proj),
        activation=mlp.act_fn,
        head_size=attention.head_dim,
        scaling=attention.scaling,
    )


def _understood(module: Any) -> _Linear:
    """Take a linear layer apart; a quantized one, or one with a hook, is more than a product."""
    if not hasattr(module, "lora_A"):
        found = _Linear(module)
    else:
        down, up = module.lora_A[NAME], module.lora_B[NAME]
        found = _Linear(module.base_layer, down, up, module.scaling[NAME])
    parts = [part for part in (found.layer, found.down, found.up) if part is not None]
    hooks = any(part._forward_hooks for part in (module, *parts))
    if hooks or any(type(part) is not nn.Linear for part in parts):
        raise NotUnderstood
    return found


def _norm(module: Any, values: torch.Tensor) -> torch.Tensor:
    # Norms compute in float32: from any other precision they round in places of their own.
    if values.dtype != torch.float32:
        normed: torch.Tensor = module(values)
        return normed
    return rms_norm(values, values.shape[-1:], module.weight, module.variance_epsilon)


Rope = tuple[torch.Tensor, torch.Tensor]


def _heads(
    block: Block, joint: Joint | None, normed: torch.Tensor, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query [W, H, D], key and value [W, K, D], the first two turned by their position."""
    shape = (len(normed), -1, block.head_size)
    if joint is not None:
        count = block.key.layer.out_features // block.head_size
        heads = linear(normed, joint.heads, joint.heads_bias).view(shape)
        turned = _turned(heads[:, :-count], rope)
        return turned[:, :-count], turned[:, -count:], heads[:, -count:]
    query, key, value = (m(normed).view(shape) for m in (block.query, block.key, block.value))
    if block.query_norm is not None:
        query, key = _norm(block.query_norm, query), _norm(block.key_norm, key)
    return _turned(query, rope), _turned(key, rope), value


def _gate_up(
    block: Block, joint: Joint | None, normed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if joint is None:
        return block.gate(normed), block.up(normed)
    gate, up = linear(normed, joint.gate_up, joint.gate_up_bias).chunk(2, dim=-1)
    return gate, up


def join(block: Block) -> Joint:
    """Put the weights of a layer that are applied to the same input side by side."""

    def joined(*parts: _Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        biases: list[torch.Tensor] = [m.layer.bias for m in parts if m.layer.bias is not None]
        return torch.cat([m.layer.weight for m in parts]), torch.cat(biases) if biases else None

    return Joint(*joined(*block.heads), *joined(*block.gates))


def _joins(blocks: list[Block]) -> bool:
    """Tell whether weights are few enough to copy, and all that there is to a layer."""
    parts = [m for b in blocks for m in (*b.heads, *b.gates)]
    size = sum(m.layer.weight.numel() * m.layer.weight.element_size() for m in parts)
    adapted = any(b.adapted for b in blocks)
    return size <= JOINT_BYTES and not blocks[0].query_norm and not adapted


def _turned(heads: torch.Tensor, rope: Rope) -> torch.Tensor:
    cosine, signed_sine = rope
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cosine, torch.cat((second, first), dim=-1), signed_sine)


def _rows(place: torch.Tensor, heads: int, capacity: int) -> torch.Tensor:
    """Return which rows of a cache, flattened to [S * K * L, D], the new positions are."""
    slots = torch.arange(len(place) * heads, device=place.device)
    return slots * capacity + place.repeat_interleave(heads)


def _attention(
    seen: torch.Tensor, key_heads: int, block: Block, weight: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return attention [W, H * D] from query [W, H, D], keys and values [W, K, L, D]."""
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
