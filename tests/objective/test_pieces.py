import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.objective.correction import none, truncated
from covey.objective.penalty import k3
from covey.objective.ratio import token_log_ratio
from covey.objective.surrogate import clipped
from covey.objective.weights import sequence_mean_token_mean, token_mean
from covey.types import Totals

ALL = torch.ones(1, 1, dtype=torch.bool)


def one(value: float, **kwargs: bool) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64, **kwargs)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.5, 2.0, 2.4, 0.0),  # good and already raised: cut at 1 + high
        (0.5, 2.0, 1.0, 1.0),  # good but fallen: not cut
        (0.5, -2.0, -1.6, 0.0),  # bad and already lowered: cut at 1 - low
        (1.5, -2.0, -3.0, -3.0),  # bad but risen: not cut
        (1.1, -2.0, -2.2, -2.2),
    ],
)
def test_clipped_surrogate_values_and_slopes(
    ratio: float, advantage: float, value: float, slope: float
) -> None:
    log_ratio = one(math.log(ratio), requires_grad=True)
    gain = clipped(
        log_ratio=log_ratio, logp=log_ratio, advantage=one(advantage), mask=ALL, low=0.2, high=0.2
    )
    gain.value.sum().backward()
    assert gain.value.item() == pytest.approx(value)
    assert log_ratio.grad.item() == pytest.approx(slope)
    assert bool(gain.clipped_low | gain.clipped_high) == (slope == 0.0)


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_k3_is_never_negative_and_has_the_slope_it_says(now: float, ref: float) -> None:
    logp = one(now, requires_grad=True)
    value = k3(logp=logp, ref_logp=one(ref), mask=ALL)
    value.sum().backward()
    assert value.item() >= 0.0
    assert value.item() == pytest.approx(math.exp(ref - now) - 1 + now - ref, abs=1e-9)
    assert logp.grad.item() == pytest.approx(1 - math.exp(ref - now), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [50.0, -50.0])
def test_everything_stays_finite_far_off_policy(gap: float, dtype: torch.dtype) -> None:
    logp = torch.tensor([[-60.0 + gap]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-60.0]], dtype=dtype)
    log_ratio = token_log_ratio(logp, old, ALL)
    for advantage in (1.0, -1.0):
        gain = clipped(
            log_ratio=log_ratio, logp=logp, advantage=torch.tensor([[advantage]], dtype=dtype),
            mask=ALL, low=0.2, high=0.2,
        )  # fmt: skip
        total = gain.value.sum() + k3(logp=logp, ref_logp=old, mask=ALL).sum()
        (grad,) = torch.autograd.grad(total, logp, retain_graph=True)
        assert total.isfinite()
        assert grad.isfinite().all()


def test_weights_of_a_ragged_batch() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    totals = Totals(sequences=3, tokens=5, groups=2)
    group = torch.tensor([0, 0, 1])
    sequence = sequence_mean_token_mean(mask, group, totals)
    assert sequence.tolist() == [
        pytest.approx([1 / 12] * 4), pytest.approx([1 / 3, 0, 0, 0]), [0.0] * 4
    ]  # fmt: skip
    assert token_mean(mask, group, totals).tolist() == [
        pytest.approx([0.2] * 4), pytest.approx([0.2, 0, 0, 0]), [0.0] * 4
    ]  # fmt: skip


def test_correction_is_constant_truncated_and_one_where_samplers_agree() -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    sampler = torch.tensor([[-1.0, -3.0, -0.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    weight = truncated(old, sampler, mask, max_weight=2.0)
    assert weight.tolist() == [pytest.approx([1.0, 2.0, math.exp(-0.5)])]
    assert not weight.requires_grad
    assert none(old, sampler, mask).tolist() == [[1.0, 1.0, 1.0]]
