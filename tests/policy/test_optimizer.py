import math

import pytest
import torch
from torch import nn

from covey.config.schema import StopAfter, Train
from covey.policy.optimizer import MasterAdamW
from covey.policy.schedule import Budget, Schedule, Used

SETTINGS = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1e9}


def make(dtype: torch.dtype) -> tuple[nn.Parameter, MasterAdamW]:
    parameter = nn.Parameter(torch.linspace(-1, 1, 6, dtype=dtype))
    return parameter, MasterAdamW([("w", parameter)], **SETTINGS)


def test_bfloat16_weights_follow_float32_masters() -> None:
    half, optimizer = make(torch.bfloat16)
    full, plain = make(torch.float32)
    with torch.no_grad():
        full.copy_(half.float())
    for step in range(200):
        grad = torch.cos(torch.arange(6) + step / 50.0)
        half.grad = None
        (half * grad.bfloat16()).sum().backward()
        full.grad = grad.bfloat16().float()
        # Steps far below bfloat16's resolution are lost without masters.
        optimizer.step(1e-5)
        plain.step(1e-5)
    torch.testing.assert_close(optimizer.masters["w"], full, atol=1e-7, rtol=0)
    assert torch.equal(half, optimizer.masters["w"].bfloat16())


def test_gradients_add_up_in_float32() -> None:
    half, optimizer = make(torch.bfloat16)
    for value in (256.0, 1.0, 1.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        (half * value).sum().backward()
    assert half.grad is None
    assert optimizer.masters["w"].grad.tolist() == [260.0] * 6


def test_norm_is_reported_before_clipping_and_clipping_bounds_the_step() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = MasterAdamW([("w", parameter)], **{**SETTINGS, "max_grad_norm": 0.5})
    parameter.grad = torch.full((4,), 3.0)
    clipped = parameter.grad
    assert optimizer.step(1.0).grad_norm == pytest.approx(6.0)
    assert clipped.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    parameter, optimizer = make(torch.float32)
    before = parameter.detach().clone()
    parameter.grad = torch.tensor([1.0, math.nan, 0, 0, 0, 0])
    assert optimizer.step(1.0).skipped
    assert torch.equal(parameter, before)
    assert parameter.grad is None


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 0, 0.25), ("constant", 3, 1.0), ("constant", 99, 1.0),
        ("linear", 4, 1.0), ("linear", 52, 0.5), ("linear", 100, 0.0),
        ("cosine", 4, 1.0), ("cosine", 52, 0.5), ("cosine", 76, 0.14644660940672627),
    ],
)  # fmt: skip
def test_schedules(schedule: str, step: int, expected: float) -> None:
    rate = Schedule(peak=1.0, shape=schedule, warmup_steps=4, total_steps=100)
    assert rate(step, Used()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("warmup_steps", [1, 2, 5])
def test_no_rate_exceeds_its_peak_where_steps_are_no_whole_numbers(warmup_steps: int) -> None:
    tokens = Budget(settings=Train(steps=20, stop_after=StopAfter(tokens=2000)))
    rate = Schedule(
        peak=1.0, shape="linear", warmup_steps=warmup_steps, total_steps=20, budget=tokens
    )
    # Each training step uses 97 tokens, which is 0.97 of a step's worth.
    rates = [rate(n, Used(tokens=97 * n, updates=n)) for n in range(20)]
    assert max(rates) == 1.0


def test_moments_survive_saving_and_loading() -> None:
    parameter, optimizer = make(torch.float32)
    other, restored = make(torch.float32)
    for step in range(5):
        parameter.grad = torch.full((6,), float(step))
        optimizer.step(0.01)
    restored.load(
        {"w": parameter.detach().clone()}, {k: v.clone() for k, v in optimizer.state().items()}
    )
    for p, o in ((parameter, optimizer), (other, restored)):
        p.grad = torch.ones(6)
        o.step(0.01)
    assert torch.equal(parameter, other)
