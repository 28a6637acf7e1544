from __future__ import annotations

import pytest
import torch

from covey.policy import optimizer as plain
from covey.policy.optimizer import keys_of, numbers_of, split

SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0}
NUMBERS = numbers_of(SETTINGS, step=3, rate=1e-2, clip=0.37)


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize(("count", "first"), [(7, 0), (5000, 2**32 - 999)])
def test_the_kernel_equals_torch_bit_for_bit(
    device: torch.device, halves: bool, count: int, first: int
) -> None:
    from covey.accel.kernels.adamw import adamw

    torch.manual_seed(count)
    values = torch.randn(count) * torch.randn(count).exp()
    values[:4] = torch.tensor([torch.nan, torch.inf, 3.4e38, -1e-40])
    weight, low = split(values) if halves else (values, None)
    moments = torch.randn(2, count).square().mul(1e-3).bfloat16().view(torch.int16)
    grad = torch.randn(count) * torch.randn(count).mul(4).exp()
    found = []
    for step in (plain.adamw, adamw):
        own = [None if t is None else t.to(device).clone() for t in (weight, low, *moments)]
        step(own[0], own[1], grad.to(device), (own[2], own[3]), NUMBERS, keys_of(1, 2, 3), first)
        found.append([t.view(torch.int16) for t in own if t is not None])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0][-1].cpu(), moments[1])
