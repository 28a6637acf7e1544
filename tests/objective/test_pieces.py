"""Single pieces against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from covey.objective.correction import CORRECTIONS, mean_one, no_veto
from covey.objective.penalty import adapted_beta
from covey.objective.ratio import RATIOS
from covey.objective.surrogate import Gain, Tokens, clipped, geometric_clipped, trust_mask
from covey.objective.weights import WEIGHTS
from covey.types import Totals
from tests.conftest import make_batch


def row(*values: float, requires_grad: bool = False) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=requires_grad)


def tokens(x: torch.Tensor, advantage: float, old: float = -1.0) -> Tokens:
    """Return trained tokens with log r = x, which may carry a gradient."""
    return Tokens(
        log_ratio=x,
        logp=old + x,
        old_logp=torch.full_like(x, old).detach(),
        advantage=torch.full_like(x, advantage).detach(),
        mask=torch.ones_like(x, dtype=torch.bool),
    )


def slope(gain: Gain, x: torch.Tensor) -> list[float]:
    return torch.autograd.grad(gain.value.sum(), x)[0].squeeze(0).tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "wanted"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.5, 2.0, 2.4, 0.0),  # good and already raised: cut at 1 + clip_high
        (0.5, 2.0, 1.0, 1.0),  # good but fallen: not cut
        (0.5, -2.0, -1.6, 0.0),  # bad and already lowered: cut at 1 - clip_low
        (1.5, -2.0, -3.0, -3.0),  # bad but risen: not cut
        (1.1, -2.0, -2.2, -2.2),
    ],
)
def test_clipped_surrogate_values_and_slopes(
    ratio: float, advantage: float, value: float, wanted: float
) -> None:
    x = row(math.log(ratio), requires_grad=True)
    gain = clipped(tokens(x, advantage), clip_low=0.2, clip_high=0.2)
    assert gain.value.item() == pytest.approx(value)
    assert slope(gain, x) == pytest.approx([wanted])
    assert bool(gain.clipped_low | gain.clipped_high) == (wanted == 0.0)
    assert bool(gain.clipped_high) == (ratio == 1.5 and advantage > 0)
    assert gain.clipped_dual is None


@pytest.mark.parametrize(("ratio", "value", "wanted"), [(2.9, -5.8, -5.8), (3.1, -6.0, 0.0)])
def test_dual_clip_bounds_the_loss_of_a_bad_token(
    ratio: float, value: float, wanted: float
) -> None:
    x = row(math.log(ratio), requires_grad=True)
    gain = clipped(tokens(x, -2.0), clip_low=0.2, clip_high=0.2, dual=3.0)
    assert gain.value.item() == pytest.approx(value)
    assert slope(gain, x) == pytest.approx([wanted])
    assert gain.clipped_dual is not None
    assert bool(gain.clipped_dual) == (wanted == 0.0)
    # A good token has no such bound.
    assert clipped(
        tokens(x, 2.0), clip_low=0.2, clip_high=9.0, dual=3.0
    ).value.item() == pytest.approx(2 * ratio)


def test_geometric_clip_has_bounds_of_the_logarithm() -> None:
    x = row(0.6, -0.9, 0.2, requires_grad=True)
    good, bad = (geometric_clipped(tokens(x, a), clip_low=0.4, clip_high=0.5) for a in (2.0, -2.0))
    assert good.clipped_high.tolist() == [[True, False, False]]
    assert bad.clipped_low.tolist() == [[False, True, False]]
    up, down = 2 * math.exp((0.5 - 0.9 + 0.2) / 3), -2 * math.exp((0.6 - 0.4 + 0.2) / 3)
    assert good.value.tolist() == [pytest.approx([up] * 3)]
    assert bad.value.tolist() == [pytest.approx([down] * 3)]
    # The value stands at every token, so the slope of their sum is that of the completion's own.
    assert slope(good, x) == pytest.approx([0.0, up, up])
    assert slope(bad, x) == pytest.approx([down, 0.0, down])


@pytest.mark.parametrize(
    ("old", "now", "advantage", "weight"),
    [
        (0.5, 0.64, 1.0, 1.28),  # p - p_old = 0.14 <= clip_high
        (0.5, 0.66, 1.0, 0.0),  # 0.16 > clip_high: cut
        (0.5, 0.75, -1.0, 1.5),  # a bad token that rose is not cut
        (0.5, 0.25, -1.0, 0.0),  # -0.25 < -clip_low: cut
        (0.5, 0.25, 1.0, 0.5),  # a good token that fell is not cut
        (0.001, 0.1, 1.0, 20.0),  # a rare token may rise a hundredfold, with a bounded weight
    ],
)
def test_trust_mask_has_bounds_of_probabilities(
    old: float, now: float, advantage: float, weight: float
) -> None:
    x = row(math.log(now / old), requires_grad=True)
    gain = trust_mask(tokens(x, advantage, old=math.log(old)))
    assert slope(gain, x) == pytest.approx([weight * advantage])
    assert bool(gain.clipped_low | gain.clipped_high) == (weight == 0.0)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        # Slopes of the sum over tokens of log r.
        ("token", [0.3, 0.0, -0.1, 0.4], [1, 0, 1, 1]),
        ("sequence", [0.2, 0.0, 0.2, 0.2], [1, 0, 1, 1]),
        ("sequence_token", [0.2, 0.0, 0.2, 0.2], [1, 0, 1, 1]),
        ("product", [0.6, 0.0, 0.6, 0.6], [3, 0, 3, 3]),
        ("one", [0.0, 0.0, 0.0, 0.0], [1, 0, 1, 1]),
    ],
)
def test_ratios(name: str, value: list[float], wanted: list[float]) -> None:
    mask = torch.tensor([[True, False, True, True]])
    x = row(0.3, 7.0, -0.1, 0.4, requires_grad=True)
    ratio = RATIOS[name](x.where(mask, 0.0), mask)
    assert ratio.tolist() == [pytest.approx(value)]
    (gradient,) = torch.autograd.grad(ratio.sum(), x)
    assert gradient.tolist() == [pytest.approx(wanted)]


def test_the_arithmetic_ratio_is_the_mean_of_ratios() -> None:
    mask = torch.tensor([[True, False, True, True], [False] * 4])
    x = torch.tensor([[0.3, 0.0, -0.1, 0.4], [0.0] * 4], dtype=torch.float64, requires_grad=True)
    ratio = RATIOS["arithmetic"](x, mask)
    mean = (math.exp(0.3) + math.exp(-0.1) + math.exp(0.4)) / 3
    assert ratio.exp()[0].tolist() == pytest.approx([mean, 1.0, mean, mean])
    assert ratio[1].tolist() == [0.0] * 4
    (gradient,) = torch.autograd.grad(ratio.exp()[0, 0], x)
    expected = [math.exp(v) / 3 for v in (0.3, -0.1, 0.4)]
    assert gradient[0, [0, 2, 3]].tolist() == pytest.approx(expected)
    assert (gradient[1] == 0).all()


@pytest.mark.parametrize("name", [n for n in RATIOS if n != "one"])
@pytest.mark.parametrize("x", [1e4, -1e4])
def test_ratios_are_bounded(name: str, x: float) -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert RATIOS[name](row(x, x, x), mask).tolist() == [pytest.approx([math.copysign(20, x)] * 3)]


# The weights of the first token of each completion; the others of a completion are the same.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sequence_mean_token_mean", [1 / 20, 1 / 5, 0]),
        ("sequence_mean_token_sum", [1 / 5, 1 / 5, 0]),
        ("sequence_mean_token_sum_norm", [1 / 50, 1 / 50, 0]),
        ("token_mean", [1 / 7, 1 / 7, 0]),
        ("group_mean_token_mean", [1 / 12, 1 / 12, 0]),
    ],
)
def test_weights_of_a_ragged_batch(name: str, expected: list[float]) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    # Each group has another rollout, of one token, elsewhere in the step.
    totals = Totals(sequences=5, tokens=7, groups=2, group_tokens={4: 6, 9: 1})
    options = {"length": 10} if name == "sequence_mean_token_sum_norm" else {}
    batch = replace(make_batch(rows=3), mask=mask, group=torch.tensor([4, 4, 9]))
    weights = WEIGHTS[name](batch, totals, **options)
    assert weights.dtype == torch.float64
    wanted = [[w if m else 0.0 for m in r] for w, r in zip(expected, mask.tolist(), strict=True)]
    assert weights.tolist() == [pytest.approx(w) for w in wanted]


# rho of the three trained tokens: 0.8, 2 and 0.5. Their product is 0.8, its cube root 0.928, and
# the mean of rho - 1 - log rho 0.174.
RHO = (0.8, 2.0, 0.5)
MEAN = 0.8 ** (1 / 3)


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        ("token_truncate", 0.6, 1.5, [0.8, 1.5, 0.6]),
        ("token_mask", 0.6, 1.5, [0.8, 0.0, 0.0]),
        ("sequence_truncate", 0.9, 1.5, [0.9] * 3),
        ("sequence_truncate", 0.0, 2.0, [0.8] * 3),
        ("sequence_mask", 0.9, 1.5, [0.0] * 3),
        ("sequence_mask", 0.5, 1.5, [0.8] * 3),
        ("geometric_truncate", 0.5, 0.9, [0.9] * 3),
        ("geometric_truncate", 0.5, 1.5, [MEAN] * 3),
        ("geometric_mask", 0.9, 1.5, [1.0] * 3),
        ("geometric_mask", 0.95, 1.5, [0.0] * 3),
        ("divergence_mask", 0.0, 0.18, [1.0] * 3),
        ("divergence_mask", 0.0, 0.17, [0.0] * 3),
    ],
)
def test_corrections(name: str, low: float, high: float, expected: list[float]) -> None:
    mask = torch.tensor([[True, True, False, True]])
    log_rho = row(*(math.log(r) for r in RHO))[:, [0, 1, 0, 2]].where(mask, 0.0)
    factor = CORRECTIONS[name](log_rho, mask, low=low, high=high)
    assert factor[mask].tolist() == pytest.approx(expected)


def test_veto_drops_the_whole_answer() -> None:
    log_rho = torch.tensor([[0.0, -9.0], [0.0, -10.0]])
    assert no_veto(log_rho, veto=1e-4).tolist() == [[True], [False]]


def test_corrections_of_mean_one() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    factor = mean_one(torch.tensor([[1.0, 2.0, 50.0], [3.0, 50.0, 50.0]]), mask)
    assert factor[mask].tolist() == [0.5, 1.0, 1.5]
    nothing = torch.zeros_like(factor)
    assert torch.equal(mean_one(nothing, mask), nothing)


@pytest.mark.parametrize(("kl", "expected"), [(0.1, 1.0), (0.11, 1.01), (5.0, 1.02), (0.0, 0.98)])
def test_beta_follows_the_kl_by_a_fifth_at_most(kl: float, expected: float) -> None:
    # A tenth of the horizon's completions: a KL that is a tenth too large raises beta by a hundredth.
    assert adapted_beta(1.0, kl, target=0.1, horizon=1000, rollouts=100) == pytest.approx(expected)


@pytest.mark.parametrize("completions", [1000, 5000, 100_000])
def test_beta_keeps_its_sign_however_many_answers_a_step_has(completions: int) -> None:
    assert adapted_beta(1.0, 0.0, target=0.1, horizon=1000, rollouts=completions) == pytest.approx(
        0.8
    )
