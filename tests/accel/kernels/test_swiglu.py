from __future__ import annotations

import pytest
import torch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.to(found.device)
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("size", [5, 1500])
def test_swiglu_and_its_gradients_match_float64(
    device: torch.device, dtype: torch.dtype, joint: bool, size: int
) -> None:
    from covey.accel.kernels.swiglu import silu_mul, silu_mul_backward

    torch.manual_seed(0)
    both = torch.randn(6, 2 * size, device=device).mul(3).to(dtype)
    gate, up = both.split(size, dim=1)
    if not joint:
        gate, up = gate.clone(), up.clone()
    grad = torch.randn(6, size, device=device).to(dtype)
    exact = both.double().cpu().requires_grad_()
    expected = torch.nn.functional.silu(exact[:, :size]) * exact[:, size:]
    expected.backward(grad.double().cpu())
    before = grad.clone()
    grads = silu_mul_backward(grad, gate, up)
    assert torch.equal(grad, before)
    assert apart(silu_mul(gate, up), expected.detach()) < TOLERANCE[dtype]
    assert apart(grads, exact.grad) < TOLERANCE[dtype]
    # The recomputed product overwrites its gradient.
    assert torch.equal(silu_mul_backward(grad, gate, up, grad), grads)
    assert torch.equal(grad, silu_mul(gate, up))
