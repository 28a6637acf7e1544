from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
"""The interpreter multiplies no bfloat16 numbers, so float16 stands for both 16-bit types."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("tokens", "size", "width"),
    [(1, 64, 32), (3, 70, 90), (130, 96, 50)],
    ids=["part of a tile", "parts of several", "several rows of tiles"],
)
def test_swiglu_of_a_product_matches_float64(
    device: torch.device, dtype: torch.dtype, biased: bool, tokens: int, size: int, width: int
) -> None:
    """Gate and up are rounded, as separate kernels round them."""
    from covey.accel.kernels.gated_linear import gated_linear

    torch.manual_seed(0)
    values = torch.randn(tokens, size, device=device).to(dtype)
    weight = torch.randn(2 * width, size, device=device).div(8).to(dtype)
    bias = torch.randn(2 * width, device=device).to(dtype) if biased else None
    exact = values.double() @ weight.double().t()
    gate, up = (exact if bias is None else exact + bias.double()).to(dtype).double().chunk(2, dim=1)
    expected = silu(gate) * up
    found = gated_linear(values, weight, bias)
    assert found.dtype == dtype
    assert float((found.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


def test_the_kernel_is_used_for_small_products_and_for_the_parity_check() -> None:
    from covey.accel.kernels.gated_linear import fuses_swiglu

    small = torch.empty(2 * 1536, 576, dtype=torch.bfloat16, device="meta")
    large = torch.empty(2 * 8960, 1536, dtype=torch.bfloat16, device="meta")
    assert fuses_swiglu(1024, small)
    assert not fuses_swiglu(128, large)
    assert fuses_swiglu(3, small.float())
    assert not fuses_swiglu(128, small.float())
