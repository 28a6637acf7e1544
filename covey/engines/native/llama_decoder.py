"""Decode steps of Llama-like models, computed with torch from the model's own weights.

For any model, a decode step can run the model's forward pass in transformers
(transformers_decoder.py). With one token per slot, the Python code of transformers takes longer
than the arithmetic. This module does the same arithmetic with less Python code for models with
Llama's architecture, which most models have. When the engine is built, the parity check in
backend.py compares the decoder with the model.

In tensor shapes, W stands for occupied slots, H for heads, K for key-value heads, L for positions
and D for the head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention

from covey.accel.attention import short_attention, short_bias
from covey.accel.fused_parameters import fused_view
from covey.accel.sizes import SHORT, plain_positions
from covey.engines.native.kv_cache import SlotCache
from covey.engines.native.sizes import FUSED_BYTES
from covey.models.adapter import NAME
from covey.models.language_model import LanguageModel


class UnsupportedModel(Exception):
    """Raised if a backend cannot run a model; the message can follow the word "because"."""

    def __str__(self) -> str:
        return super().__str__() or "it does not have Llama's architecture"


class Decoder(Protocol):
    """The interface of decoders, which run a model for one token per slot."""

    def begin(self, positions: int) -> None:
        """Prepare for sequences of up to `positions` tokens, with the current weights.

        A decoder without copies of weights has nothing to prepare.
        """
        return

    def step(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """Process `tokens` [W] and fill the cache; return hidden states [W, hidden size]."""


class Linear:
    """A linear layer of the model, optionally with two LoRA matrices."""

    def __init__(self, module: Any) -> None:
        adapted = hasattr(module, "lora_A")
        self.layer: nn.Linear = module.base_layer if adapted else module
        self.down: nn.Linear | None = module.lora_A[NAME] if adapted else None
        self.up: nn.Linear | None = module.lora_B[NAME] if adapted else None
        self.scale: float = module.scaling[NAME] if adapted else 1.0
        parts = [part for part in (self.layer, self.down, self.up) if part is not None]
        hooks = any(part._forward_hooks for part in (module, *parts))
        if hooks or any(type(part) is not nn.Linear for part in parts):  # quantized, for example
            raise UnsupportedModel

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return W x + b, plus scale * B A x if the layer has LoRA matrices A and B."""
        result = linear(values, self.layer.weight, self.layer.bias)
        if self.down is None or self.up is None:
            return result
        thin = linear(values, self.down.weight)
        return torch.addmm(result, thin, self.up.weight.t(), alpha=self.scale)


class LinearGroup:
    """Linear layers with the same input, which can be fused into one matrix product."""

    def __init__(self, *modules: Any) -> None:
        self.layers = [Linear(module) for module in modules]
        self.widths = [each.layer.out_features for each in self.layers]
        self.fused: list[torch.Tensor] = []
        """The fused weight of all layers, followed by the fused bias if there is one; empty until
        `fuse` is called.
        """
        self._copies: list[torch.Tensor] = []
        self._addresses: list[int] = []
        """The memory addresses of the weights and biases in the last call of `fuse`."""

    def fuse(self) -> None:
        """Fuse the current weights: as views if the model itself fuses them, else as copies."""
        layers = [each.layer for each in self.layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        parts = [[layer.weight.detach() for layer in layers], *([biases] if biases else [])]
        addresses = [tensor.data_ptr() for each in parts for tensor in each]
        if self.fused and not self._copies and addresses == self._addresses:
            return  # views of these tensors, whose values are always current
        self._addresses = addresses
        views = [fused_view(each) for each in parts]
        self.fused = [view for view in views if view is not None]
        if len(self.fused) == len(parts):
            return
        if not self._copies:
            self._copies = [
                each[0].new_empty(sum(self.widths), *each[0].shape[1:]) for each in parts
            ]
        for copy, each in zip(self._copies, parts, strict=True):
            torch.cat(each, out=copy)  # a captured graph contains the addresses of the copies
        self.fused = self._copies

    def together(self, values: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return linear(values, *self.fused)
        return torch.cat([layer(values) for layer in self.layers], dim=-1)

    def apart(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        if not self.fused:
            return [layer(values) for layer in self.layers]
        parts: Sequence[torch.Tensor] = self.together(values).split(self.widths, dim=-1)
        return parts


class Block:
    """The modules of one transformer layer, which use the model's own weights, not copies."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm: nn.Module = layer.input_layernorm
        self.qkv = LinearGroup(attention.q_proj, attention.k_proj, attention.v_proj)
        self.query_norm: nn.Module | None = getattr(attention, "q_norm", None)
        self.key_norm: nn.Module | None = getattr(attention, "k_norm", None)
        self.output = Linear(attention.o_proj)
        self.post_norm: nn.Module = layer.post_attention_layernorm
        self.gate_up = LinearGroup(mlp.gate_proj, mlp.up_proj)
        self.down = Linear(mlp.down_proj)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = mlp.act_fn
        self.head_size: int = attention.head_dim
        self.scaling: float = attention.scaling

    @property
    def adapted(self) -> bool:
        parts = (*self.qkv.layers, *self.gate_up.layers, self.output, self.down)
        return any(part.down is not None for part in parts)

    def fuse(self) -> None:
        self.qkv.fuse()
        self.gate_up.fuse()


class LlamaDecoder(Decoder):
    """The decoder of Llama-like models, which does not run the model's Python code."""

    def __init__(self, model: LanguageModel) -> None:
        backbone: Any = model.backbone
        self.embedding: nn.Embedding = backbone.embed_tokens
        self.blocks = [Block(layer) for layer in backbone.layers]
        self.final_norm: nn.Module = backbone.norm
        self.rotary: nn.Module = backbone.rotary_emb
        self.rope = torch.empty(0), torch.empty(0)
        """Cosine and sine of the RoPE angles at all positions, which `begin` computes."""
        fusible = [m.layer.weight for b in self.blocks for m in (*b.qkv.layers, *b.gate_up.layers)]
        self.fuses = (
            sum(weight.nbytes for weight in fusible) <= FUSED_BYTES
            and not self.blocks[0].query_norm
            and not any(block.adapted for block in self.blocks)
        )
        if type(self.embedding) is not nn.Embedding or not plain_positions(model.model.config):
            raise UnsupportedModel

    def begin(self, positions: int) -> None:
        weight = self.embedding.weight
        places = torch.arange(positions, device=weight.device)
        cosine, sine = self.rotary(weight[:1, None], places[None])
        half = sine.shape[-1] // 2
        # rotate_half(x) is (-x2, x1); with the sign in the table it is a swap of halves.
        sign = torch.cat([-torch.ones_like(sine[0, 0, :half]), torch.ones_like(sine[0, 0, half:])])
        self.rope = cosine[0][:, None], (sine[0] * sign)[:, None]
        if self.fuses:
            for block in self.blocks:
                block.fuse()

    def step(self, tokens: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        place = cache.place[: cache.width]
        rope = self.rope[0][place], self.rope[1][place]
        seen = torch.arange(cache.reach, device=place.device) <= place[:, None]
        heads, capacity = cache.layer_keys[0].shape[1:3]
        # The index of each new position in a cache that is flattened to [S * K * L, D].
        rows = torch.arange(len(place) * heads, device=place.device) * capacity
        rows += place.repeat_interleave(heads)
        batched = cache.reach <= SHORT or cache.steady
        attend = _attention(seen, heads, self.blocks[0], self.embedding.weight, batched=batched)
        hidden = embedding(tokens, self.embedding.weight)
        for number, block in enumerate(self.blocks):
            qkv = block.qkv.together(_norm(block.input_norm, hidden))
            query, key, value = _heads(block, qkv, heads, rope)
            keys, values = cache.layer_keys[number], cache.layer_values[number]
            keys.view(-1, block.head_size).index_copy_(0, rows, key.flatten(0, 1))
            values.view(-1, block.head_size).index_copy_(0, rows, value.flatten(0, 1))
            width, reach = cache.width, cache.reach
            attended = attend(query[:, :, None], keys[:width, :, :reach], values[:width, :, :reach])
            hidden = hidden + block.output(attended.flatten(1))
            gate, up = block.gate_up.apart(_norm(block.post_norm, hidden))
            hidden = hidden + block.down(block.activation(gate) * up)
        return _norm(self.final_norm, hidden)


def _norm(module: Any, values: torch.Tensor) -> torch.Tensor:
    # The model's modules compute norms in float32; a norm in another dtype rounds differently.
    if values.dtype != torch.float32:
        normed: torch.Tensor = module(values)
        return normed
    return rms_norm(values, values.shape[-1:], module.weight, module.variance_epsilon)


def _heads(
    block: Block, qkv: torch.Tensor, key_heads: int, rope: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query [W, H, D], key and value [W, K, D], with RoPE applied to query and key."""
    heads = qkv.view(len(qkv), -1, block.head_size)
    rotated, value = heads[:, :-key_heads], heads[:, -key_heads:]
    if block.query_norm is not None:
        query = _norm(block.query_norm, rotated[:, :-key_heads])
        rotated = torch.cat([query, _norm(block.key_norm, rotated[:, -key_heads:])], dim=1)
    cosine, signed_sine = rope
    first, second = rotated.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    rotated = torch.addcmul(rotated * cosine, swapped, signed_sine)
    return rotated[:, :-key_heads], rotated[:, -key_heads:], value


def _attention(
    seen: torch.Tensor, key_heads: int, block: Block, weight: torch.Tensor, *, batched: bool
) -> Callable[..., torch.Tensor]:
    """Return an attention function for a query [W, H, 1, D], keys and values [W, K, L, D].

    `batched` chooses batched matrix products on a CPU. Unlike the fused attention kernel, which
    divides long rows among threads, their rounding is the same in every slot.
    """
    mask = seen[:, None, None]
    shared = block.qkv.widths[0] // (key_heads * block.head_size)
    if weight.device.type == "cpu" and batched:
        bias = short_bias(mask, weight.dtype, key_heads, shared)
        return partial(short_attention, bias=bias, scale=block.scaling)
    return partial(
        scaled_dot_product_attention, attn_mask=mask, scale=block.scaling, enable_gqa=shared > 1
    )
