"""Decode step of Llama-like models on a GPU: the arithmetic of `LlamaDecoder` in a few kernels.

The residual stream is float32, as in the trainer's fused forward pass, so that engine and trainer
agree. All inputs of matrix products have the dtype of the weights. A decode step can be captured as
a CUDA graph, because it never synchronizes with the CPU and does not depend on the lengths of
completions.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from covey.accel.fused_forward import gain, rope_table
from covey.accel.kernels.decode_attention import SMALLEST_HEAD, decode_attention
from covey.accel.kernels.gated_linear import fuses_swiglu, gated_linear
from covey.accel.kernels.rms_norm import add_norm_in_place
from covey.accel.kernels.swiglu import silu_mul
from covey.accel.parity import is_silu
from covey.accel.varlen_attention import HALF
from covey.engines.native.llama_decoder import Block, LlamaDecoder, UnsupportedModel
from covey.engines.native.shared_prompt_cache import SharedPromptCache
from covey.models.language_model import LanguageModel


class FusedDecoder(LlamaDecoder):
    """The decoder of Llama-like models on a GPU, with fused kernels."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        if not all(is_silu(block.activation) for block in self.blocks):
            raise UnsupportedModel
        half = self.embedding.weight.dtype in HALF
        if half and min(block.head_size for block in self.blocks) < SMALLEST_HEAD:
            raise UnsupportedModel("its heads are too small for products of 16-bit numbers")
        self.rope = torch.empty(0), torch.empty(0)
        self.fuses = not any(block.adapted for block in self.blocks)

    def begin(self, positions: int) -> None:
        """Compute the table of RoPE angles, and update copies of fused weights in place."""
        if len(self.rope[0]) != positions:
            weight = self.embedding.weight
            places = torch.arange(positions, device=weight.device)
            self.rope = rope_table(self.rotary, weight[:1, None].float(), places)
        if self.fuses:
            for block in self.blocks:
                block.fuse()

    def step(self, tokens: torch.Tensor, cache: SharedPromptCache) -> torch.Tensor:
        """Run all layers."""
        hidden = embedding(tokens, self.embedding.weight).float()
        delta = None
        for number, block in enumerate(self.blocks):
            normed = add_norm_in_place(hidden, delta, *gain(block.input_norm))
            attended = decode_attention(
                block.qkv.together(normed),
                cache.layer(number),
                rope=self.rope,
                scale=block.scaling,
                norms=head_norms(block),
            )
            delta = block.output(attended)
            normed = add_norm_in_place(hidden, delta, *gain(block.post_norm))
            delta = block.down(self._swiglu(block, normed))
        return add_norm_in_place(hidden, delta, *gain(self.final_norm))

    def _swiglu(self, block: Block, normed: torch.Tensor) -> torch.Tensor:
        if self.fuses and fuses_swiglu(len(normed), block.gate_up.fused[0]):
            return gated_linear(normed, *block.gate_up.fused)
        return silu_mul(*block.gate_up.apart(normed))


def head_norms(block: Block) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """Return the weights and epsilon of a layer's query and key norms; None without norms."""
    if block.query_norm is None or block.key_norm is None:
        return None
    weight, eps = gain(block.query_norm)
    return weight, gain(block.key_norm)[0], eps
