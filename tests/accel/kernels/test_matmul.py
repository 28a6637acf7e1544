from __future__ import annotations

import torch

from covey.accel.kernels.matmul import add_matmul, matmul


def test_bfloat16_products_with_float32_results_are_not_rounded(
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(2, 96, 96, device=device).bfloat16()
    out = torch.empty(96, 96, device=device)
    matmul(left, right, out)
    exact = left.double() @ right.double()
    torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=0)
    add_matmul(left, right, out)
    torch.testing.assert_close(out.double(), 2 * exact, atol=2e-4, rtol=0)
