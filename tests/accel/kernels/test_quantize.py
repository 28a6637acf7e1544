"""Row-wise quantization: values, scales, and the products of quantized matrices."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

LARGEST = 448.0
SIZES = [48, 5000]
"""Sizes of rows: less than a tile, and more than one."""


def reference(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q = round(x / s) and s = max |x| / 448 of each row, from the definition."""
    values = values.float().cpu()
    scales = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (values / scales).to(torch.float8_e4m3fn).float(), scales


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
    back, exact = found.dequantized(), values.float()
    assert not back[2].any()
    # Four bits of a normal number give a relative error of at most 1/16.
    large = exact.abs() > exact.abs().amax(dim=1, keepdim=True) / 2**14
    assert ((back - exact).abs() / exact.abs())[large].max() <= 1 / 16 + 1e-6
    assert 0.02 < float((back - exact).norm() / exact.norm()) < 0.03


def test_rows_may_be_part_of_a_larger_matrix_and_are_written_in_place(
    device: torch.device,
) -> None:
    from covey.accel.kernels.quantize import Quantized, quantize_rows

    values = torch.randn(5, 96, device=device)
    room = Quantized.empty(7, 32, device)
    room.values.view(torch.uint8).zero_()
    quantize_rows(values[:, 32:64], Quantized(room.values[1:6], room.scales[1:6]))
    check(room.values[1:6], room.scales[1:6], values[:, 32:64])
    assert not room.values.float()[[0, 6]].any()


@pytest.mark.parametrize("size", SIZES)
def test_norms_and_gates_are_quantized_without_rounding_in_between(
    device: torch.device, size: int
) -> None:
    from covey.accel.kernels.quantize import add_norm_quantized, silu_mul_quantized

    torch.manual_seed(1)
    hidden, delta = torch.randn(2, 4, size, device=device)
    delta, gain = delta.bfloat16(), torch.randn(size, device=device).bfloat16()
    total = hidden + delta.float()
    normed = total * (total.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * gain.float()
    found = add_norm_quantized(hidden, delta, gain, 1e-6)
    torch.testing.assert_close(hidden, total)
    check(found.values, found.scales, normed)
    again = add_norm_quantized(hidden, None, gain, 1e-6)
    torch.testing.assert_close(hidden, total)
    check(again.values, again.scales, normed)

    gate, up = torch.randn(4, 2 * size, device=device).mul(3).bfloat16().split(size, dim=1)
    found = silu_mul_quantized(gate, up)
    check(found.values, found.scales, silu(gate.float()) * up.float())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # from the interpreter
def test_what_is_not_finite_stays_so(device: torch.device) -> None:
    from covey.accel.kernels.quantize import quantize_rows

    values = torch.ones(3, 32, device=device)
    values[0, 5], values[1, 5] = float("nan"), float("inf")
    found = quantize_rows(values).dequantized()
    assert found[:2].isnan().any(dim=1).all()
    assert found[2].isfinite().all()


@pytest.mark.parametrize(("programs", "biased"), [(1, False), (5, True), (100, False)])
def test_products_do_not_depend_on_how_they_are_split(
    device: torch.device, programs: int, biased: bool
) -> None:
    from covey.accel.kernels.float8_matmul import Tile, Workspace, float8_linear, split_matmul
    from covey.accel.kernels.quantize import quantize_rows

    torch.manual_seed(2)
    left, right = (quantize_rows(torch.randn(n, 256, device=device)) for n in (21, 304))
    bias = torch.randn(304, device=device).bfloat16() if biased else None
    expected = left.dequantized() @ right.dequantized().t() + (0.0 if bias is None else bias)
    tile, workspace = Tile(16, 64, 32, programs, 4, 3), Workspace(device)
    for _ in range(2):  # the second call finds the counters of the first
        found = split_matmul(left, right, bias, tile, workspace)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=0.05)
    library = float8_linear(left, right, bias, workspace)
    torch.testing.assert_close(library.float(), expected, rtol=1e-2, atol=0.05)
