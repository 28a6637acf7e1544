"""One step of decoding: from the last token of every slot to the hidden state of the next.

Any model can take its own forward pass in transformers. Most have the shape of Llama, though, and
for these the same arithmetic is written out here: at one token a slot, the layers of Python between
a model's operations cost more than the operations do. The weights are the model's own, and whether
the shape is understood is tried when the sampler is made.

Shapes: W slots in use, H heads, K key-value heads, D head size, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention
from transformers import DynamicCache

from covey.policy.adapter import NAME, stirred
from covey.policy.attention import SHORT, short_attention, short_bias
from covey.policy.model import LanguageModel
from covey.sampler.slots import SlotCache, attention_mask

PLAIN_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone."""
JOINT_BYTES = 64 * 2**20
"""Weights up to this size are copied side by side for every batch of answers: small products are
slow for their size, and the copy costs nothing. A larger model's are used where they are."""


class Decoder(Protocol):
    """Whatever can go one token further."""

    def begin(self, capacity: int) -> None:
        """Make ready for answers of up to so many positions, with the weights as they are now."""

    def step(self, tokens: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Return hidden states [W, hidden size] after `tokens` [W], writing to the cache."""


@dataclass(frozen=True, slots=True)
class TransformersDecoder:
    """The model's own forward pass."""

    model: LanguageModel

    def begin(self, capacity: int) -> None:
        """There is nothing to prepare."""

    def step(self, tokens: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Run the model on one token a slot."""
        place = cache.place[: cache.width]
        dtype = self.model.head.linear.weight.dtype
        hidden: torch.Tensor = self.model.backbone(
            input_ids=tokens[:, None],
            attention_mask=attention_mask(self.model.model.config, place, cache.reach, dtype),
            position_ids=place[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return hidden[:, 0]


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
class _Block:
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


class _Joint(NamedTuple):
    """Weights of one layer that are applied to the same input, side by side."""

    heads: torch.Tensor
    heads_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None


class _NotUnderstood(Exception):
    pass


class LlamaDecoder:
    """The arithmetic of a model with the shape of Llama, without the model's Python."""

    def __init__(self, model: LanguageModel) -> None:
        backbone: Any = model.backbone
        self.embedding: nn.Embedding = backbone.embed_tokens
        self.blocks = [_block(layer) for layer in backbone.layers]
        self.final_norm: nn.Module = backbone.norm
        self.rotary: nn.Module = backbone.rotary_emb
        self.cosine = self.signed_sine = torch.empty(0)
        self.joint: list[_Joint] | None = None
        self.joins = _joins(self.blocks)
        if type(self.embedding) is not nn.Embedding or not _plain_positions(model.model.config):
            raise _NotUnderstood

    def begin(self, capacity: int) -> None:
        """Tabulate the rotary embedding, and put a small model's weights side by side."""
        weight = self.embedding.weight
        places = torch.arange(capacity, device=weight.device)
        cosine, sine = self.rotary(weight[:1, None], places[None])
        half = sine.shape[-1] // 2
        # rotate_half(x) is (-x2, x1); with the sign in the table it is a mere swap of halves.
        sign = torch.cat([-torch.ones_like(sine[0, 0, :half]), torch.ones_like(sine[0, 0, half:])])
        self.cosine, self.signed_sine = cosine[0][:, None], (sine[0] * sign)[:, None]
        self.joint = [_join(block) for block in self.blocks] if self.joins else None

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


def decoder_for(model: LanguageModel) -> Decoder:
    """Return the fastest decoder that says what the model says."""
    plain = TransformersDecoder(model)
    try:
        lean = LlamaDecoder(model)
        with stirred(model):
            expected, got = _trial(model, plain), _trial(model, lean)
    except (_NotUnderstood, AttributeError, TypeError, ValueError, RuntimeError, LookupError):
        return plain
    # In bfloat16 two right ways differ by 4 % after 30 layers; a wrong one differs by about all.
    tolerance = 0.1 if expected.dtype == torch.bfloat16 else 1e-4
    apart = (got - expected).float().norm() / expected.float().norm()
    return lean if float(apart) <= tolerance else plain


@torch.inference_mode()
def _trial(model: LanguageModel, decoder: Decoder) -> torch.Tensor:
    """Decode two tokens in three slots of different length."""
    device = model.device
    ids = torch.arange(2, 17, device=device).view(3, 5) % model.model.config.vocab_size
    prefix = DynamicCache()
    model.backbone(input_ids=ids, past_key_values=prefix, use_cache=True)
    slots = torch.arange(3, device=device)
    cache = SlotCache(3, 9, prefix)
    cache.write_prefix(slots, prefix, slots)
    cache.place[:] = torch.tensor([5, 2, 4], device=device)
    decoder.begin(9)
    states: list[torch.Tensor] = []
    for _ in range(2):
        cache.reach = int(cache.place.max()) + 1
        states.append(decoder.step(ids[:, len(states)], cache))
        cache.place += 1
    return torch.stack(states)


def _block(layer: Any) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    return _Block(
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
        raise _NotUnderstood
    return found


def _plain_positions(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    window = getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
    return (
        rope.get("rope_type", "default") in PLAIN_ROPE
        and kinds == {"full_attention"}
        and not (window)
    )


def _norm(module: Any, values: torch.Tensor) -> torch.Tensor:
    # Norms compute in float32: from any other precision they round in places of their own.
    if values.dtype != torch.float32:
        normed: torch.Tensor = module(values)
        return normed
    return rms_norm(values, values.shape[-1:], module.weight, module.variance_epsilon)


Rope = tuple[torch.Tensor, torch.Tensor]


def _heads(
    block: _Block, joint: _Joint | None, normed: torch.Tensor, rope: Rope
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
    block: _Block, joint: _Joint | None, normed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if joint is None:
        return block.gate(normed), block.up(normed)
    gate, up = linear(normed, joint.gate_up, joint.gate_up_bias).chunk(2, dim=-1)
    return gate, up


def _join(block: _Block) -> _Joint:
    def joined(*parts: _Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        biases: list[torch.Tensor] = [m.layer.bias for m in parts if m.layer.bias is not None]
        return torch.cat([m.layer.weight for m in parts]), torch.cat(biases) if biases else None

    return _Joint(*joined(block.query, block.key, block.value), *joined(block.gate, block.up))


def _joins(blocks: list[_Block]) -> bool:
    """Tell whether weights are few enough to copy, and all that there is to a layer."""
    parts = [m for b in blocks for m in (b.query, b.key, b.value, b.gate, b.up)]
    size = sum(m.layer.weight.numel() * m.layer.weight.element_size() for m in parts)
    adapted = any(m.down is not None for m in parts)
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
    seen: torch.Tensor, key_heads: int, block: _Block, weight: torch.Tensor
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
