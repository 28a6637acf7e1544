"""Fused linear layers against float64, with rounding where separate kernels round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
"""The interpreter multiplies no bfloat16 numbers, so float16 stands for both 16-bit types."""
SHAPES = [(1, 64, 32), (3, 70, 90), (40, 96, 50)]
"""Rows, inputs and outputs: a part of a tile, parts of several tiles, and several whole ones."""


def tile(**changes: Any) -> Any:
    from covey.accel.kernels.decode_linear import Tile

    return Tile(16, 32, 32, 4, 2)._replace(**changes)


def numbers(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def exact_norm(hidden: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    values = hidden.double()
    scale = (values.square().mean(dim=1, keepdim=True) + eps).rsqrt()
    return (values * scale * gain.double()).to(gain.dtype).double()


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    expected = expected.double()
    assert float((found.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "size", "width"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_normed_rows(
    device: torch.device, dtype: torch.dtype, rows: int, size: int, width: int, biased: bool
) -> None:
    from covey.accel.kernels.decode_linear import Norm, Residual, norm_linear

    torch.manual_seed(0)
    hidden = torch.randn(rows, size, device=device)
    weight = numbers(2 * width, size, device=device, dtype=dtype) / 8
    bias = numbers(2 * width, device=device, dtype=dtype) if biased else None
    norm = Norm(torch.rand(size, device=device).to(dtype), 1e-5)
    parts = hidden.square().tensor_split(3, dim=1)
    squares = torch.stack([part.sum(dim=1) for part in parts], dim=1)
    residual = Residual(hidden, squares)
    expected = exact_norm(hidden, *norm) @ weight.double().t()
    expected = expected if bias is None else expected + bias.double()
    found = norm_linear(residual, norm, weight, bias, tile())
    assert found.dtype == dtype
    assert_near(found, expected, dtype)
    gate, up = expected.to(dtype).double().chunk(2, dim=1)
    gated = norm_linear(residual, norm, weight, bias, tile(), gated=True)
    assert_near(gated, silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "size", "width"), SHAPES)
def test_products_added_to_the_residual_stream(
    device: torch.device, dtype: torch.dtype, rows: int, size: int, width: int
) -> None:
    """The product is rounded, the sum is float32, and its squares are those of the sum."""
    from covey.accel.kernels.decode_linear import add_linear

    torch.manual_seed(1)
    hidden, values = torch.randn(rows, width, device=device), torch.randn(rows, size, device=device)
    weight = numbers(width, size, device=device, dtype=dtype)
    values, before = values.to(dtype), hidden.clone()
    product = (values.double() @ weight.double().t()).to(dtype).double()
    residual = add_linear(hidden, values, weight, None, tile())
    assert residual.hidden is hidden
    assert residual.squares.shape == (rows, -(-width // 32))
    assert_near(hidden, before.double() + product, dtype)
    assert_near(residual.squares.sum(dim=1), hidden.double().square().sum(dim=1), torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("splits", [1, 3, 5])
def test_addends_of_a_product_are_added_and_rounded_by_the_norm(
    device: torch.device, dtype: torch.dtype, splits: int
) -> None:
    from covey.accel.kernels.decode_linear import split_linear
    from covey.accel.kernels.rms_norm import add_norm_in_place

    torch.manual_seed(2)
    hidden = torch.randn(5, 70, device=device)
    values = numbers(5, 130, device=device, dtype=dtype)
    weight = numbers(70, 130, device=device, dtype=dtype)
    gain, before = torch.rand(70, device=device).to(dtype), hidden.double()
    addends = split_linear(values, weight, tile(splits=splits))
    assert addends.shape == (splits, 5, 70)
    product = values.double() @ weight.double().t()
    assert_near(addends.double().sum(dim=0), product, dtype)
    normed = add_norm_in_place(hidden, addends, gain, 1e-5)
    assert_near(hidden, before + product.to(dtype).double(), dtype)
    assert_near(normed, exact_norm(before + product.to(dtype).double(), gain, 1e-5), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_embeddings_begin_a_residual_stream(device: torch.device, dtype: torch.dtype) -> None:
    from covey.accel.kernels.decode_linear import embed

    torch.manual_seed(3)
    table = numbers(9, 70, device=device, dtype=dtype)
    tokens = torch.tensor([8, 0, 3], device=device)
    residual = embed(tokens, table)
    assert torch.equal(residual.hidden, table[tokens].float())
    torch.testing.assert_close(residual.squares[:, 0], table[tokens].float().square().sum(dim=1))
