from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("size", [11, 5000])
@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logp_entropy_and_gradient_match_float64(
    device: torch.device, size: int, cap: float | None, biased: bool, dtype: torch.dtype
) -> None:
    from covey.accel.kernels.token_logp import logp_backward, logp_forward

    torch.manual_seed(0)
    rows, scale = 5, 0.7
    logits = torch.randn(rows, size, device=device) * 4
    logits[0] += 300.0  # exponentials of the logits themselves would overflow
    bias = torch.randn(size, device=device).to(dtype) if biased else None
    tokens = torch.randint(0, size, (rows,), device=device)
    out = tuple(torch.empty(rows, device=device) for _ in range(3))
    logp_forward(logits, bias, tokens, out, scale, cap)

    exact = logits.double().cpu().requires_grad_()
    z = (exact if bias is None else exact + bias.double().cpu()) * scale
    z = z if cap is None else cap * torch.tanh(z / cap)
    whole = z.log_softmax(dim=-1)
    expected = (
        whole.gather(-1, tokens.cpu()[:, None]).squeeze(-1),
        -(whole.exp() * whole).sum(-1),
        z.logsumexp(dim=-1),
    )
    for found, right in zip(out, expected, strict=True):
        torch.testing.assert_close(found.double().cpu(), right, atol=1e-4, rtol=1e-6)

    pulls = torch.randn(2, rows, dtype=torch.float64)
    sum((p * e).sum() for p, e in zip(pulls, expected[:2], strict=True)).backward()
    grad = logits if dtype == torch.float32 else torch.empty_like(logits, dtype=dtype)
    given = tuple(p.float().to(device) for p in pulls)
    logp_backward(logits, bias, tokens, (out[2], out[1]), given, grad, scale, cap)
    apart = (grad.double().cpu() - exact.grad).norm() / exact.grad.norm()
    assert float(apart) < (1e-4 if dtype == torch.float32 else 1e-2)
