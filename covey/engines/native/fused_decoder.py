"""Decode step of Llama-like models on a GPU: the arithmetic of `LlamaDecoder` in fused kernels.

The residual stream is float32, as in the trainer's fused forward pass, so that engine and trainer
agree. The inputs of matrix products have the dtype of the weights. A decode step can be captured as
a CUDA graph, because it never synchronizes with the CPU and its kernels do not depend on the
lengths of completions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from covey.accel.attention_kernels import HALF
from covey.accel.fused_forward import gain, rope_table
from covey.accel.kernels.decode_attention import SMALLEST_HEAD, decode_attention
from covey.accel.kernels.gated_linear import fuses_swiglu, gated_linear
from covey.accel.kernels.quantize import (
    Product,
    Quantized,
    Weight,
    add_norm_quantized,
    product,
    quantize_rows,
    quantize_weight,
    rescaled,
    silu_mul_quantized,
)
from covey.accel.kernels.rms_norm import add_norm_in_place
from covey.accel.kernels.swiglu import silu_mul
from covey.accel.parity import is_silu
from covey.engines.native.llama_decoder import Block, Linear, LlamaDecoder, UnsupportedModel
from covey.engines.native.shared_prompt_cache import SharedPromptCache
from covey.models.language_model import LanguageModel


class FusedDecoder(LlamaDecoder):
    """A decoder that runs Llama-like models with fused kernels on a GPU."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        if not all(is_silu(block.activation) for block in self.blocks):
            raise UnsupportedModel
        half = self.embedding.weight.dtype in HALF
        if half and min(block.head_size for block in self.blocks) < SMALLEST_HEAD:
            raise UnsupportedModel("its heads are too small for products of 16-bit numbers")
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
    """Return weights and epsilon of a layer's query and key norms; None without such norms."""
    if block.query_norm is None or block.key_norm is None:
        return None
    weight, eps = gain(block.query_norm)
    return weight, gain(block.key_norm)[0], eps


# Decode step of Llama-like models with float8 matrix products.
#
# Float8 numbers take half the memory of 16-bit numbers, and tensor cores multiply them twice as
# fast. Whenever the engine gets new weights, it quantizes the weights of the layers, with one scale
# (a power of two) per output. The kernel that computes the input of a product also quantizes it,
# with one scale per token. Embedding, norms, residual stream, attention and head are not rounded to
# float8.
#
# An engine with float8 products samples from a slightly different policy than the trainer's, so a
# run needs a correction (covey/objective/correction.py).

MULTIPLE = 16
"""Input and output sizes of a float8 linear layer must be multiples of this number."""


FLOAT8_TOLERANCE = 0.25
"""The allowed relative difference of hidden states in the parity check of a float8 decoder.

A float8 number has three mantissa bits, so a matrix product of random numbers has a relative error
of about 4 %. The errors of several matrix products add up. A bug, such as a wrong scale or a wrong
row index, changes the hidden states by more than this tolerance.
"""


class Float8Linear:
    """Several linear layers with the same input, fused into one float8 matrix product."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers = [each.layer for each in layers]
        first = self.layers[0].weight
        rows, size = sum(layer.out_features for layer in self.layers), first.shape[1]
        if rows % MULTIPLE or size % MULTIPLE:
            raise UnsupportedModel(
                f"a layer of {size} inputs and {rows} outputs has no float8 product, which needs "
                f"multiples of {MULTIPLE}"
            )
        # A captured graph contains the addresses of the copies.
        self.weight = Weight.empty(rows, size, first.device)
        biased = any(layer.bias is not None for layer in self.layers)
        self.bias = first.new_zeros(rows, dtype=torch.bfloat16) if biased else None

    def refresh(self) -> None:
        """Quantize the current weights into the existing float8 buffer."""
        at = 0
        for layer in self.layers:
            end = at + layer.out_features
            quantize_weight(layer.weight.detach(), self.weight.rows(at, end))
            if self.bias is not None and layer.bias is not None:
                self.bias[at:end] = layer.bias.detach()
            at = end

    def __call__(self, values: Quantized) -> Product:
        """Return W x + b of all fused layers, not yet multiplied by the float8 scales."""
        return product(values, self.weight, self.bias)


class _Products:
    """The float8 matrix products (QKV, output, gate-up and down) of a transformer layer."""

    def __init__(self, block: Block) -> None:
        self.qkv = Float8Linear(block.qkv.layers)
        self.output = Float8Linear([block.output])
        self.gate_up = Float8Linear(block.gate_up.layers)
        self.down = Float8Linear([block.down])

    def refresh(self) -> None:
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            linear.refresh()


class Float8Decoder(FusedDecoder):
    """A decoder that runs Llama-like models with float8 matrix products on a GPU."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        if any(block.adapted for block in self.blocks):
            raise UnsupportedModel("its adapter cannot be quantized")
        self.fuses = False  # the float8 copies are fused; the 16-bit weights are not used
        self.products = [_Products(block) for block in self.blocks]

    @torch.inference_mode()
    def begin(self, positions: int) -> None:
        """Compute the table of RoPE angles, and quantize the weights into float8 buffers."""
        super().begin(positions)
        for products in self.products:
            products.refresh()

    def step(self, tokens: torch.Tensor, cache: SharedPromptCache) -> torch.Tensor:
        """Run all layers."""
        hidden = embedding(tokens, self.embedding.weight).float()
        delta, kind = None, self.embedding.weight.dtype
        for number, (block, products) in enumerate(zip(self.blocks, self.products, strict=True)):
            normed = add_norm_quantized(hidden, delta, *gain(block.input_norm))
            attended = decode_attention(
                rescaled(products.qkv(normed)).to(kind),
                cache.layer(number),
                rope=self.rope,
                scale=block.scaling,
                norms=head_norms(block),
            )
            delta = products.output(quantize_rows(attended))
            normed = add_norm_quantized(hidden, delta, *gain(block.post_norm))
            delta = products.down(silu_mul_quantized(products.gate_up(normed)))
        assert delta is not None, "a model has layers"
        return add_norm_in_place(hidden, rescaled(delta), *gain(self.final_norm))
