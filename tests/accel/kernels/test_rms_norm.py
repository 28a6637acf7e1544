from __future__ import annotations

import pytest
import torch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def plain(hidden, delta, gain, eps):
    total = hidden if delta is None else hidden + delta
    return total, total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * gain


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.detach().to(found.device)
    return float((found.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 1500), (1100, 6)])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_norm_and_its_gradients_match_float64(
    device: torch.device, dtype: torch.dtype, rows: int, size: int, adds: bool, goes_on: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from covey.accel.kernels import rms_norm as module
    from covey.accel.kernels.rms_norm import add_norm, norm

    monkeypatch.setattr(module, "PROGRAMS", 2)  # each then goes through several tiles
    torch.manual_seed(0)
    hidden = torch.randn(rows, size, device=device, requires_grad=True)
    delta = torch.randn(rows, size, device=device).to(dtype).requires_grad_()
    gain = torch.randn(size, device=device).to(dtype).requires_grad_()
    given = [hidden, delta, gain] if adds else [hidden, gain]
    if adds or goes_on:
        total, normed = add_norm(hidden, delta if adds else None, gain, 1e-5)
    else:
        total, normed = hidden, norm(hidden, gain, 1e-5)
    assert normed.dtype == dtype
    assert total.dtype == torch.float32
    exact = [t.detach().double().cpu().requires_grad_() for t in given]
    expected = plain(exact[0], exact[1] if adds else None, exact[-1], 1e-5)
    pull = torch.randn(rows, size, dtype=torch.float64)
    push = torch.randn(rows, size, dtype=torch.float64) * float(goes_on)
    loss = (normed.double() * pull.to(device)).sum()
    if goes_on:
        loss = loss + (total.double() * push.to(device)).sum()
    loss.backward()
    ((expected[1] * pull).sum() + (expected[0] * push).sum()).backward()
    assert apart(normed, expected[1]) < TOLERANCE[dtype]
    for one, other in zip(given, exact, strict=True):
        assert one.grad.dtype == one.dtype
        assert apart(one.grad, other.grad) < TOLERANCE[dtype]


def test_the_gradient_of_the_gain_is_added_to_its_sink_without_rounding(
    device: torch.device,
) -> None:
    from covey.accel.fused_parameters import GradHolder, attach_grad_sinks
    from covey.accel.kernels.rms_norm import norm

    torch.manual_seed(0)
    hidden = torch.randn(700, 40, device=device, requires_grad=True)
    gain = torch.nn.Parameter(torch.randn(40, device=device).bfloat16())
    holder = GradHolder(gain)
    attach_grad_sinks([(gain, holder)])
    pull = torch.randn(700, 40, device=device)
    for _ in range(2):  # the first sum is written, the second is added
        (norm(hidden, gain, 1e-5, dtype=torch.float32) * pull).sum().backward()
    unit = torch.nn.functional.rms_norm(hidden.detach().double(), (40,), eps=1e-5)
    assert gain.grad is None
    assert holder.grad is not None
    assert apart(holder.grad, 2 * (unit * pull).sum(0).cpu()) < 1e-6


def test_the_sum_alone_passes_its_gradient_on(device: torch.device) -> None:
    from covey.accel.kernels.rms_norm import add_norm

    hidden = torch.randn(3, 8, device=device, requires_grad=True)
    delta = torch.randn(3, 8, device=device, requires_grad=True)
    total, _ = add_norm(hidden, delta, torch.ones(8, device=device), 1e-5)
    total.sum().backward()
    assert torch.equal(hidden.grad, torch.ones_like(hidden))
    assert torch.equal(delta.grad, torch.ones_like(delta))


def test_the_in_place_sum_keeps_its_address(device: torch.device) -> None:
    from covey.accel.kernels.rms_norm import add_norm_in_place

    torch.manual_seed(0)
    hidden, delta = torch.randn(2, 3, 70, device=device)
    gain, before = torch.rand(70, device=device), hidden.clone()
    expected = torch.nn.functional.rms_norm(before + delta, (70,), gain, 1e-5)
    got = add_norm_in_place(hidden, delta, gain, 1e-5)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    assert torch.equal(hidden, before + delta)
    again = add_norm_in_place(hidden, None, gain, 1e-5)
    torch.testing.assert_close(again, expected, atol=2e-6, rtol=0)
    assert torch.equal(hidden, before + delta)
