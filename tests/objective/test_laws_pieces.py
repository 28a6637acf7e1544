"""Laws 9, 11, 14 and 15: of single pieces, by enumeration and by their slopes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from covey.accel.head import Head, token_logp
from covey.errors import ConfigError
from covey.objective import with_advantage
from covey.objective.loss import _uncertain
from covey.objective.penalty import PENALTIES
from covey.objective.surrogate import SURROGATES, Tokens
from tests.objective.laws import (
    CASES,
    OF_ANSWERS,
    close,
    descend,
    make_step,
    objective_of,
    preference_loss,
    ready,
    seeds,
)

ONE = torch.ones(1, 1, dtype=torch.bool)
logits = st.lists(st.floats(-2, 2), min_size=4, max_size=4)
far = st.floats(-15, 15)

# Value and slope of each estimator, from d = logp - ref_logp and r = exp(logp - old_logp).
SLOPES = {
    "k1": (lambda d, r: d, lambda d, r: 1.0),
    "k2": (lambda d, r: d * d / 2, lambda d, r: d),
    "k3": (lambda d, r: math.exp(-d) - 1 + d, lambda d, r: 1 - math.exp(-d)),
    "k3_plus": (lambda d, r: math.exp(-d) - 1 + d, lambda d, r: d),
    "k3_sequence": (lambda d, r: math.exp(-d) - 1 + d, lambda d, r: 1 - math.exp(-d)),
    "ratio_k1": (lambda d, r: r * d, lambda d, r: r * (d + 1)),
    "ratio_k3": (lambda d, r: r * (math.exp(-d) - 1 + d), lambda d, r: r * d),
}
# Whose expectation over the policy that sampled is which gradient: KL(policy || reference), KL the
# other way round, or none. Only those with a ratio are right for tokens of an older policy.
EXPECTED_GRADIENT = {
    "k1": "none",
    "k2": "forward",
    "k3": "reverse",
    "k3_plus": "forward",
    "k3_sequence": "reverse",
    "ratio_k1": "forward",
    "ratio_k3": "forward",
}
OFF_POLICY_TOO = {"ratio_k1", "ratio_k3"}
# Whose expectation is KL(policy || reference) itself; k2 is biased.
UNBIASED = {"k1", "k3", "k3_plus", "k3_sequence", "ratio_k1", "ratio_k3"}


def scalar(value: float, **kwargs: bool) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64, **kwargs)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) from log-probabilities."""
    return (p.exp() * (p - q)).sum()


def log_softmax(values: list[float], *, requires_grad: bool = False) -> tuple[torch.Tensor, ...]:
    z = torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)
    return z, z.log_softmax(0)


@pytest.mark.parametrize("name", PENALTIES)
@given(d=far, x=st.floats(-5, 5))
def test_law_9_estimators_have_the_value_and_slope_that_they_say(
    name: str, d: float, x: float
) -> None:
    logp = scalar(0.0, requires_grad=True)
    value = PENALTIES[name](logp + d, logp + x, ONE)
    (slope,) = torch.autograd.grad(value.sum(), logp)
    of_value, of_slope = SLOPES[name]
    r = math.exp(x)
    assert value.item() == pytest.approx(of_value(d, r), rel=1e-9, abs=1e-9)
    # At d = 0 the difference of two exponentials is rounding; elsewhere it is exact.
    assert slope.item() == pytest.approx(of_slope(d, r), rel=1e-9, abs=1e-9)
    if "k3" in name:
        assert value.item() >= 0.0


@pytest.mark.parametrize("name", PENALTIES)
@settings(max_examples=10)
@given(now=logits, reference=logits, older=logits)
def test_law_9_expected_gradients_over_a_categorical(
    name: str, now: list[float], reference: list[float], older: list[float]
) -> None:
    z, logp = log_softmax(now, requires_grad=True)
    _, ref = log_softmax(reference)
    old = log_softmax(older)[1] if name in OFF_POLICY_TOO else logp.detach()
    mask = torch.ones(4, 1, dtype=torch.bool)  # four completions of one token: all that there are
    values = PENALTIES[name]((logp - ref)[:, None], (logp - old)[:, None], mask).squeeze(1)
    expected = (old.exp() * values).sum()
    (gradient,) = torch.autograd.grad(expected, z, retain_graph=True)
    forward, reverse = kl(logp, ref), kl(ref, logp)
    wanted = {
        "forward": torch.autograd.grad(forward, z, retain_graph=True)[0],
        "reverse": torch.autograd.grad(reverse, z)[0],
        "none": torch.zeros_like(z),
    }
    close(gradient, wanted[EXPECTED_GRADIENT[name]], 1e-11)
    if name in UNBIASED:
        assert expected.item() == pytest.approx(forward.item(), abs=1e-12)


@settings(max_examples=10)
@given(now=logits, reference=logits)
def test_law_9_k3_of_answers_estimates_the_kl_of_answers(
    now: list[float], reference: list[float]
) -> None:
    # All sixteen completions of two independent tokens: their KL is twice that of one.
    (_, logp), (_, ref) = log_softmax(now), log_softmax(reference)
    first, second = torch.cartesian_prod(torch.arange(4), torch.arange(4)).T
    d = torch.stack([(logp - ref)[first], (logp - ref)[second]], dim=1)
    mask = torch.ones_like(d, dtype=torch.bool)
    value = PENALTIES["k3_sequence"](d, torch.zeros_like(d), mask)
    assert torch.equal(value[:, 0], value[:, 1])
    chance = (logp[first] + logp[second]).exp()
    assert (chance * value[:, 0]).sum().item() == pytest.approx(2 * kl(logp, ref).item(), abs=1e-12)


@settings(max_examples=10)
@given(values=st.lists(st.floats(-8, 8), min_size=5, max_size=5), temperature=st.floats(0.3, 2.0))
def test_law_11_gradient_of_the_entropy(values: list[float], temperature: float) -> None:
    linear = nn.Linear(5, 5, bias=False, dtype=torch.float64)
    linear.weight.data = torch.eye(5, dtype=torch.float64)
    z = torch.tensor([values], dtype=torch.float64, requires_grad=True)
    _, entropy = token_logp(
        Head(linear=linear), z, torch.tensor([0]), temperature=temperature, megabytes=1
    )
    (gradient,) = torch.autograd.grad(entropy.sum(), z)
    log_p = (z.detach() / temperature).log_softmax(1)
    p = log_p.exp()
    expected = -(p * log_p).sum()
    assert entropy.item() == pytest.approx(expected.item(), abs=1e-12)
    close(gradient, -p * (log_p + expected) / temperature)


@pytest.mark.parametrize("case", [c for c in CASES if CASES[c][0] not in OF_ANSWERS])
@settings(max_examples=8)
@given(seed=seeds, share=st.floats(0.05, 1.0))
def test_law_11_top_entropy_keeps_the_share_that_it_says(
    case: str, seed: int, share: float
) -> None:
    batch = make_step(seed).batch
    assert batch.entropy is not None
    whole, kept = (
        with_advantage(objective, batch).advantage
        for objective in (objective_of(case), objective_of(case, top_entropy=share))
    )
    assert whole is not None
    assert kept is not None
    tokens = int(batch.mask.sum())
    threshold = torch.quantile(batch.entropy[batch.mask], 1 - share)
    clear = (
        batch.entropy - threshold
    ).abs() > 1e-9  # on which side a token at it falls is rounding
    expected = whole.where(batch.entropy > threshold, 0.0)
    assert torch.equal(kept.where(clear, 0.0), expected.where(clear, 0.0))
    assert torch.equal(_uncertain(batch, 1.0), batch.mask)
    most = int(_uncertain(batch, share).sum())
    assert math.floor(share * (tokens - 1)) <= most <= math.floor(share * (tokens - 1)) + 1


@pytest.mark.parametrize("case", [c for c in CASES if CASES[c][0] not in OF_ANSWERS])
@settings(max_examples=8)
@given(seed=seeds)
def test_law_11_tokens_that_are_left_out_have_no_policy_gradient(case: str, seed: int) -> None:
    objective, step = objective_of(case, top_entropy=0.4, beta=0.0), make_step(seed)
    batch = ready(objective, step)
    _, gradient = descend(objective, batch, step.logp)
    left_out = batch.mask & ~_uncertain(batch, 0.4)
    assert left_out.any()
    assert (gradient[left_out] == 0).all()


def slope_at(surrogate: str, log_ratio: float, advantage: float) -> tuple[float, float]:
    """Return the value of a gain, and its slope in logp where log r = logp - old_logp."""
    logp = scalar(-1.0 + log_ratio, requires_grad=True)
    old = scalar(-1.0)
    tokens = Tokens(
        log_ratio=logp - old, logp=logp, old_logp=old, advantage=scalar(advantage), mask=ONE
    )
    value = SURROGATES[surrogate](tokens).value
    return value.item(), torch.autograd.grad(value.sum(), logp)[0].item()


@pytest.mark.parametrize("name", SURROGATES)
@given(advantage=st.floats(-10, 10))
def test_law_14_the_slope_of_every_gain_is_the_advantage_on_policy(
    name: str, advantage: float
) -> None:
    # phi(1) = 1 (VESPO) and f'(1) = 1 (SAPO) are this.
    assert slope_at(name, 0.0, advantage)[1] == pytest.approx(advantage, rel=1e-12, abs=1e-300)


@given(x=st.floats(-4, 4), advantage=st.sampled_from([-2.0, 3.0]))
def test_law_14_the_gate_of_sapo_is_steepest_where_the_ratio_is_one(
    x: float, advantage: float
) -> None:
    tau = 1.0 if advantage > 0 else 1.05
    p = 1 / (1 + math.exp(-tau * (math.exp(x) - 1)))
    value, slope = slope_at("soft_gate", x, advantage)
    assert value == pytest.approx(4 / tau * p * advantage)
    assert slope == pytest.approx(4 * p * (1 - p) * math.exp(x) * advantage, abs=1e-12)
    assert 4 * p * (1 - p) <= 1.0


@given(x=st.floats(-4, 3), advantage=st.sampled_from([-2.0, 3.0]))
def test_law_14_the_weight_of_vespo(x: float, advantage: float) -> None:
    power, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    phi = math.exp(x) ** power * math.exp(rate * (1 - math.exp(x)))
    value, slope = slope_at("gamma_weight", x, advantage)
    assert slope == pytest.approx(phi * advantage, rel=1e-9)
    assert value == pytest.approx(phi * advantage * (x - 1.0), rel=1e-9)


@given(x=st.floats(-18, 19), advantage=st.sampled_from([-2.0, 3.0]))
def test_law_14_cispo_bounds_the_weight_and_never_cuts(x: float, advantage: float) -> None:
    slope = slope_at("truncated_weight", x, advantage)[1]
    assert slope == pytest.approx(min(math.exp(x), 5.0) * advantage, rel=1e-12)
    assert slope != 0.0


@pytest.mark.parametrize("form", ["dpo", "ipo"])
@settings(max_examples=10)
@given(seed=seeds)
def test_law_15_preferences_push_as_much_down_as_up(form: str, seed: int) -> None:
    # Two pairs; the completions of each have equally many trained tokens, at any place.
    generator = torch.Generator().manual_seed(seed)
    logp, ref = -3 * torch.rand(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.zeros(4, 6, dtype=torch.bool)
    for row, tokens in enumerate([3, 5, 3, 5]):
        mask[row, torch.randperm(6, generator=generator)[:tokens]] = True
    chosen, rejected = torch.tensor([0, 1]), torch.tensor([2, 3])
    logp = logp.where(mask, torch.nan).requires_grad_()
    loss = preference_loss(logp, ref.where(mask, torch.inf), mask, chosen, rejected, form=form)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert (gradient[~mask] == 0).all()
    per_completion = gradient.sum(dim=1)
    close(per_completion[chosen], -per_completion[rejected])
    if form == "dpo":
        assert (per_completion[chosen] < 0).all()  # chosen completions become more likely
        gain = (logp.detach() - ref).where(mask, 0.0).sum(dim=1)
        delta = gain[chosen] - gain[rejected]
        slope = -0.1 * torch.sigmoid(-0.1 * delta) / 2
        close(gradient[chosen], slope[:, None].expand(2, 6).where(mask[chosen], 0.0))


def test_law_15_an_unequal_pair_is_pushed_by_its_lengths() -> None:
    logp = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    pair = torch.tensor([0]), torch.tensor([1])
    (gradient,) = torch.autograd.grad(preference_loss(logp, logp.detach(), mask, *pair), logp)
    assert gradient.sum().item() == pytest.approx(-0.1 / 2 * (4 - 1))


@pytest.mark.parametrize("name", sorted(OF_ANSWERS))
def test_law_11_top_entropy_is_refused_where_it_would_not_be_obeyed(name: str) -> None:
    with pytest.raises(ConfigError, match="top_entropy"):
        objective_of(name, top_entropy=0.5)
