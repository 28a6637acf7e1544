"""Decode step of Llama-like models on a GPU: the arithmetic of `LlamaDecoder` in a few kernels.

The residual stream is float32, as in the trainer's fused forward pass, so that engine and trainer
agree. All inputs of matrix products have the dtype of the weights. A step never synchronizes with
the CPU and does not depend on the lengths of completions, so it can be captured as a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import nn

from covey.accel.fused_forward import gain, rope_table
from covey.accel.kernels.decode_attention import SMALLEST_HEAD, decode_attention
from covey.accel.kernels.decode_linear import (
    Norm,
    Residual,
    Tile,
    add_linear,
    embed,
    gated_linear,
    norm_linear,
    split_linear,
)
from covey.accel.kernels.decode_tiles import SEPARATE, LayerTiles, layer_tiles
from covey.accel.kernels.fetch import fetch
from covey.accel.kernels.rms_norm import add_norm_in_place
from covey.accel.kernels.swiglu import silu_mul
from covey.accel.parity import is_silu
from covey.accel.varlen_attention import HALF
from covey.engines.native.llama_decoder import Block, Linear, LlamaDecoder, UnsupportedModel
from covey.engines.native.shared_prompt_cache import SharedPromptCache
from covey.models.language_model import LanguageModel

FETCHED_BYTES = 0


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
        self.side: torch.cuda.Stream | None = None
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
        stream = _Stream(tokens, self.embedding.weight)
        for number, block in enumerate(self.blocks):
            tiles = self._tiles(len(tokens), block)
            heads = stream.qkv(block, tiles.qkv)
            self._fetch(number)
            attended = decode_attention(
                heads,
                cache.layer(number),
                rope=self.rope,
                scale=block.scaling,
                norms=_head_norms(block),
            )
            stream.add(block.output, attended, tiles.output)
            stream.add(block.down, stream.swiglu(block, tiles.gate_up), tiles.down)
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        return stream.normed(self.final_norm)

    def _fetch(self, number: int) -> None:
        """Fetch the weights of the next products into the L2 cache, beside the attention."""
        if not FETCHED_BYTES or not self.fuses or not self.embedding.weight.is_cuda:
            return
        self.side = self.side or torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        block, later = self.blocks[number], self.blocks[(number + 1) % len(self.blocks)]
        weights = [block.output.layer.weight, block.gate_up.weights[0], block.down.layer.weight]
        left = FETCHED_BYTES
        with torch.cuda.stream(self.side):
            for weight in (*weights, later.qkv.weights[0]):
                left -= fetch(weight, left)

    def _tiles(self, rows: int, block: Block) -> LayerTiles:
        if not self.fuses:  # an adapter's layers are called one by one
            return SEPARATE
        (width, size), (heads,) = block.gate_up.fused[0].shape, block.output.layer.weight.shape[1:]
        return layer_tiles(rows, size, heads, width // 2, self.embedding.weight.dtype)


class _Stream:
    """The residual stream of one decode step, to which the last product may not be added yet."""

    def __init__(self, tokens: torch.Tensor, table: torch.Tensor) -> None:
        self.hidden, squares = embed(tokens, table)
        self.squares: torch.Tensor | None = squares
        """The sums of squares of all rows, if they are known."""
        self.delta: torch.Tensor | None = None
        """A product that the next norm adds."""

    def normed(self, norm: nn.Module) -> torch.Tensor:
        """Return the RMSNorm of the residual stream."""
        delta, self.delta, self.squares = self.delta, None, None
        return add_norm_in_place(self.hidden, delta, *gain(norm))

    def qkv(self, block: Block, tile: Tile | None) -> torch.Tensor:
        """Return queries, keys and values of all slots."""
        if tile is None or self.squares is None:
            return block.qkv.together(self.normed(block.input_norm))
        residual, norm = Residual(self.hidden, self.squares), Norm(*gain(block.input_norm))
        return norm_linear(residual, norm, *block.qkv.weights, tile)

    def swiglu(self, block: Block, tile: Tile | None) -> torch.Tensor:
        """Return silu(gate) * up of all slots."""
        if tile is not None and self.squares is not None:
            residual, norm = Residual(self.hidden, self.squares), Norm(*gain(block.post_norm))
            return norm_linear(residual, norm, *block.gate_up.weights, tile, gated=True)
        normed = self.normed(block.post_norm)
        if tile is None:
            return silu_mul(*block.gate_up.apart(normed))
        return gated_linear(normed, *block.gate_up.weights, tile)

    def add(self, layer: Linear, values: torch.Tensor, tile: Tile | None) -> None:
        """Add W x + b to the residual stream, now or in the next norm."""
        self.squares = None
        weight, bias = layer.layer.weight, layer.layer.bias
        if tile is None or (tile.splits > 1 and bias is not None):
            self.delta = layer(values)
        elif tile.splits > 1:
            self.delta = split_linear(values, weight, tile)
        else:
            self.squares = add_linear(self.hidden, values, weight, bias, tile).squares


def _head_norms(block: Block) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    if block.query_norm is None or block.key_norm is None:
        return None
    weight, eps = gain(block.query_norm)
    return weight, gain(block.key_norm)[0], eps
