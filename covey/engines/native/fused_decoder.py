"""The decoder for a GPU: the arithmetic of `LlamaDecoder` in few kernels.

The residual stream is float32, as in the trainer's fused forward pass, so that the two agree; all
that enters a matrix product is of the weights' own type. No step waits for the host or depends on
how long answers are, so that it can be recorded once and replayed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding, linear

from covey.accel.fused_parameters import joined
from covey.accel.kernels.decode import SMALLEST_HEAD, decode_attention
from covey.accel.kernels.gate import silu_times
from covey.accel.kernels.norm import add_norm_in_place
from covey.accel.parity import is_silu
from covey.accel.varlen_attention import HALF
from covey.engines.native.llama_decoder import Block, Joint, LlamaDecoder, NotUnderstood, join
from covey.engines.native.shared_prompt_cache import PooledCache
from covey.models.language_model import LanguageModel


class FusedDecoder(LlamaDecoder):
    """A model with the shape of Llama, on a GPU."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        if not all(is_silu(block.activation) for block in self.blocks):
            raise NotUnderstood
        half = self.embedding.weight.dtype in HALF
        if half and min(block.head_size for block in self.blocks) < SMALLEST_HEAD:
            raise NotUnderstood("its heads are too small for products of 16-bit numbers")
        self.side_by_side: list[Joint] = []
        self.rope = torch.empty(0), torch.empty(0)
        self.joins = not any(block.adapted for block in self.blocks)

    def begin(self, positions: int) -> None:
        """Tabulate the rotary embedding, and bring weights that stand side by side up to date."""
        if len(self.rope[0]) != positions:
            weight = self.embedding.weight
            places = torch.arange(positions, device=weight.device)
            cosine, sine = self.rotary(weight[:1, None].float(), places[None])
            half = cosine.shape[-1] // 2
            self.rope = cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()
        if not self.joins:
            return
        if not self.side_by_side:
            self.side_by_side = [_shared(block) or join(block) for block in self.blocks]
        for block, joint in zip(self.blocks, self.side_by_side, strict=True):
            if _shared(block) is None:
                joint.renew(block)

    def step(self, tokens: torch.Tensor, cache: PooledCache) -> torch.Tensor:
        """Go through all layers."""
        hidden = embedding(tokens, self.embedding.weight).float()
        delta = None
        for number, block in enumerate(self.blocks):
            normed = add_norm_in_place(hidden, delta, *_gain(block.input_norm))
            attended = decode_attention(
                self._heads(number, block, normed),
                rope=self.rope,
                prompts=(cache.prompt_keys[number], cache.prompt_values[number]),
                prompt_row=cache.prompt_row,
                prompt_length=cache.prompt_length,
                keys=cache.layer_keys[number],
                values=cache.layer_values[number],
                place=cache.place,
                active=cache.active,
                scale=block.scaling,
                norms=_head_norms(block),
            )
            delta = block.output(attended)
            normed = add_norm_in_place(hidden, delta, *_gain(block.post_norm))
            gate, up = self._gate_up(number, block, normed)
            delta = block.down(silu_times(gate, up))
        return add_norm_in_place(hidden, delta, *_gain(self.final_norm))

    def _heads(self, number: int, block: Block, normed: torch.Tensor) -> torch.Tensor:
        if not self.joins:
            return torch.cat([part(normed) for part in block.heads], dim=-1)
        joint = self.side_by_side[number]
        return linear(normed, joint.heads, joint.heads_bias)

    def _gate_up(
        self, number: int, block: Block, normed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.joins:
            return block.gate(normed), block.up(normed)
        joint = self.side_by_side[number]
        gate, up = linear(normed, joint.gate_up, joint.gate_up_bias).chunk(2, dim=-1)
        return gate, up


def _shared(block: Block) -> Joint | None:
    """Return the weights that stand side by side in the model itself. None: some do not."""
    found: list[torch.Tensor | None] = []
    for parts in (block.heads, block.gates):
        biases = [part.layer.bias for part in parts if part.layer.bias is not None]
        found += [joined([part.layer.weight for part in parts]), joined(biases) if biases else None]
        if found[-2] is None or (biases and found[-1] is None):
            return None
    return Joint(*found)  # type: ignore[arg-type] # weights were found


def _gain(norm: Any) -> tuple[torch.Tensor, float]:
    return norm.weight, norm.variance_epsilon


def _head_norms(block: Block) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    if block.query_norm is None or block.key_norm is None:
        return None
    gain, eps = _gain(block.query_norm)
    return gain, _gain(block.key_norm)[0], eps
