"""Attention over packed rows equals attention of each row, and so do its gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from covey.accel.attention_kernels import VarlenRows
from covey.accel.kernels.packed_attention import (
    Tile,
    Tiles,
    attention_backward,
    attention_forward,
    parts_for,
    tiles_for,
)
from tests.accel.test_fused_forward import per_row

SMALL = Tiles(Tile(16, 16, 4, 2), Tile(16, 16, 4, 2), Tile(16, 16, 4, 2))
SCALE = 0.3


def rows(queries: list[int], keys: list[int], device: torch.device) -> VarlenRows:
    """Return rows of these numbers of queries and keys."""
    starts = [torch.tensor([0, *n], device=device).cumsum(0).int() for n in (queries, keys)]
    # As in a CUDA graph, the longest row is larger than needed.
    return VarlenRows(
        query_starts=starts[0],
        key_starts=starts[1],
        longest_query=2 * max(queries),
        longest_key=2 * max(keys),
    )


def errors(
    spans: VarlenRows, device: torch.device, *, heads: int, key_heads: int, size: int,
    dtype: torch.dtype, tiles: Tiles,
) -> list[float]:  # fmt: skip
    """Return the relative errors of the output and of the three gradients."""
    draw = torch.Generator().manual_seed(0)
    tokens, places = int(spans.query_starts[-1]), int(spans.key_starts[-1])
    shapes = [(tokens, heads), (places, key_heads), (places, key_heads), (tokens, heads)]
    exact = [
        torch.randn(*shape, size, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes
    ]
    wide = [t.double().requires_grad_() for t in exact[:3]]
    expected = per_row(*wide, VarlenRows(
        query_starts=spans.query_starts.cpu(), key_starts=spans.key_starts.cpu(),
        longest_query=0, longest_key=0,
    ), SCALE)  # fmt: skip
    wanted = [expected.detach(), *torch.autograd.grad(expected, wide, exact[3].double())]
    query, key, value, grad = (t.to(device) for t in exact)
    # Keys and values are columns of a wider tensor.
    key, value = torch.cat([key, value], dim=1).split(key_heads, dim=1)
    attended, norm = attention_forward(query, key, value, spans, SCALE, tiles.forward)
    back = attention_backward(grad, (query, key, value), attended, norm, spans, SCALE, tiles)
    found = [t.detach().cpu().double() for t in (attended, *back)]
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([40], [40]),
        ([37, 20, 20], [37, 37, 37]),
        ([1, 0, 5, 33], [50, 0, 5, 34]),
        ([16, 32, 48], [64, 32, 48]),
    ],
    ids=["one row", "shared prompt", "short and empty rows", "whole tiles"],
)
def test_rows_of_any_length(queries: list[int], keys: list[int], device: torch.device) -> None:
    spans = rows(queries, keys, device)
    found = errors(
        spans, device, heads=6, key_heads=2, size=16, dtype=torch.float32, tiles=SMALL
    )  # fmt: skip
    assert max(found) < 1e-5, found


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_query_heads_of_a_key_head_are_added_up(parts: int, device: torch.device) -> None:
    spans = rows([20, 11], [20, 20], device)
    found = errors(
        spans, device, heads=12, key_heads=2, size=16, dtype=torch.float32,
        tiles=SMALL._replace(parts=parts),
    )  # fmt: skip
    assert max(found) < 1e-5, found


def test_few_tiles_are_divided_by_query_heads() -> None:
    tile = Tile(64, 64, 4, 2)
    assert parts_for(8192, 2, 6, tile) == 2  # 256 tiles
    assert parts_for(64, 2, 6, tile) == 6
    assert parts_for(49152, 3, 3, tile) == 1


@pytest.mark.parametrize("unequal", [Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)])
def test_tiles_need_not_be_square(unequal: Tile, device: torch.device) -> None:
    spans = rows([45, 21, 7], [45, 40, 39], device)
    found = errors(
        spans, device, heads=3, key_heads=3, size=32, dtype=torch.float32,
        tiles=Tiles(unequal, unequal, unequal),
    )  # fmt: skip
    assert max(found) < 1e-5, found


@pytest.mark.parametrize("size", [64, 128])
def test_rounding_is_that_of_the_dtype(size: int, device: torch.device) -> None:
    # Triton's interpreter has no products of bfloat16.
    dtype, most = (torch.bfloat16, 1e-2) if device.type == "cuda" else (torch.float16, 1e-3)
    spans = rows([150, 70], [150, 130], device)
    found = errors(
        spans, device, heads=2, key_heads=1, size=size, dtype=dtype, tiles=tiles_for(size)
    )  # fmt: skip
    assert max(found) < most, found
