"""The choice of kernels and tiles for the linear layers of a decode step.

The choices were the fastest on an H200 (benchmarks/decode_linear.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from covey.accel.kernels.decode_linear import Tile


class LayerTiles(NamedTuple):
    """The tiles of the four products of a layer; None where a library computes the product."""

    qkv: Tile | None
    output: Tile | None
    gate_up: Tile | None
    down: Tile | None


SEPARATE = LayerTiles(None, None, None, None)
EXACT = Tile(16, 16, 32, 4, 2)
"""In float32 the compiler unrolls products, so that larger tiles would take long to compile."""
EXACT_ROWS = 16
"""The parity check in float32 has fewer rows than this."""


def layer_tiles(rows: int, hidden: int, heads: int, mlp: int, dtype: torch.dtype) -> LayerTiles:
    """Return the tiles for `rows` rows and the sizes of residual stream, attention and MLP."""
    if dtype == torch.float32:
        return LayerTiles(EXACT, EXACT, EXACT, EXACT) if rows <= EXACT_ROWS else SEPARATE
    return SEPARATE
