"""Row-wise quantization: values, scales, and the products of quantized matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import silu

if TYPE_CHECKING:
    from covey.accel.kernels.quantize import Product, Quantized, Weight

LARGEST = 448.0
SIZES = [48, 5000]
"""Sizes of rows: less than a tile, and more than one."""


def reference(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q = round(x / s) and s = max |x| / 448 of each row, from the definition."""
    values = values.float().cpu()
    scales = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (values / scales).to(torch.float8_e4m3fn).float(), scales


def dequantized(matrix: Quantized | Weight) -> torch.Tensor:
    """Return the float32 numbers that a quantized matrix represents."""
    values, scales = matrix
    if scales.dtype == torch.int8:
        return torch.ldexp(values.float(), scales[:, None])
    return values.float() * scales


def check(found: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Compare with the definition; a number on the edge of two float8 numbers may be either."""
    expected, right = reference(values)
    torch.testing.assert_close(scales.cpu(), right, rtol=1e-5, atol=0.0)
    other = found.float().cpu() != expected
    assert other.float().mean() < 2e-3
    apart = (found.float().cpu() - expected)[other].abs() / expected[other].abs().clamp(min=2**-6)
    assert not other.any() or apart.max() <= 1 / 8  # neighbours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_rounded_by_their_own_scale(
    device: torch.device, dtype: torch.dtype, size: int
) -> None:
    from covey.accel.kernels.quantize import quantize_rows

    torch.manual_seed(0)
    factors = torch.logspace(-6, 3, 6, device=device)[:, None]
    values = (torch.randn(6, size, device=device) * factors).to(dtype)
    values[2] = 0
    found = quantize_rows(values)
    check(found.values, found.scales, values)
    back, exact = dequantized(found), values.float()
    assert not back[2].any()
    # Four bits of a normal number give a relative error of at most 1/16.
    large = exact.abs() > exact.abs().amax(dim=1, keepdim=True) / 2**14
    assert ((back - exact).abs() / exact.abs())[large].max() <= 1 / 16 + 1e-6
    assert 0.02 < float((back - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_scaled_by_powers_of_two_in_place(
    device: torch.device, dtype: torch.dtype
) -> None:
    from covey.accel.kernels.quantize import Weight, quantize_weight

    torch.manual_seed(0)
    factors = torch.logspace(-4, 3, 5, device=device)[:, None]
    values = (torch.randn(5, 96, device=device) * factors).to(dtype)
    values[3] = 0
    values[4, 40] = values[4, 32:64].abs().max() * 2
    room = Weight.empty(7, 32, device)
    room.values.view(torch.uint8).zero_()
    quantize_weight(values[:, 32:64], room.rows(1, 6))
    found, exact = room.rows(1, 6), values[:, 32:64].float()
    largest = found.values.float().abs().amax(dim=1)
    assert ((largest > 200) & (largest <= 448))[[0, 1, 2, 4]].all()
    back = dequantized(found)
    assert not back[3].any()
    assert ((back - exact).abs() <= exact.abs() / 16 + largest.max() * 2**-9 * factors).all()
    scaled = torch.ldexp(exact, -found.exponents[:, None].int())
    assert torch.equal(found.values.float(), scaled.to(torch.float8_e4m3fn).float())
    assert not room.values.float()[[0, 6]].any()


def made(
    count: int, outputs: int, device: torch.device, *, biased: bool
) -> tuple[Product, torch.Tensor]:
    """Return a product and the float32 numbers that it stands for."""
    from covey.accel.kernels.quantize import product, quantize_rows, quantize_weight

    left = quantize_rows(torch.randn(count, 64, device=device))
    right = quantize_weight(torch.randn(outputs, 64, device=device))
    bias = torch.randn(outputs, device=device).bfloat16() if biased else None
    found = product(left, right, bias)
    exact = dequantized(left) @ dequantized(right).t()
    scaled = torch.ldexp(found.values.float() * left.scales, right.exponents)
    # The library rounds to bfloat16.
    torch.testing.assert_close(scaled, exact, rtol=2**-8, atol=1e-3)
    return found, scaled if bias is None else scaled + bias.float()


@pytest.mark.parametrize("biased", [False, True])
def test_norms_and_gates_read_scaled_products(device: torch.device, biased: bool) -> None:
    from covey.accel.kernels.quantize import add_norm_quantized, rescaled, silu_mul_quantized

    torch.manual_seed(1)
    hidden = torch.randn(5, 304, device=device)
    delta, exact = made(5, 304, device, biased=biased)
    gain, total = torch.randn(304, device=device).bfloat16(), hidden + exact
    normed = total * (total.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * gain.float()
    found = add_norm_quantized(hidden, delta, gain, 1e-6)
    torch.testing.assert_close(hidden, total)
    check(found.values, found.scales, normed)
    again = add_norm_quantized(hidden, None, gain, 1e-6)
    torch.testing.assert_close(hidden, total)
    check(again.values, again.scales, normed)

    gates, exact = made(5, 304, device, biased=biased)
    found = silu_mul_quantized(gates)
    gate, up = exact.chunk(2, dim=1)
    check(found.values, found.scales, silu(gate) * up)
    torch.testing.assert_close(rescaled(gates).float(), exact, rtol=2**-7, atol=0.0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # from the interpreter
def test_what_is_not_finite_stays_so(device: torch.device) -> None:
    from covey.accel.kernels.quantize import quantize_rows, quantize_weight

    values = torch.ones(3, 32, device=device)
    values[0, 5], values[1, 5] = float("nan"), float("inf")
    for found in map(dequantized, (quantize_rows(values), quantize_weight(values))):
        assert found[:2].isnan().any(dim=1).all()
        assert found[2].isfinite().all()
