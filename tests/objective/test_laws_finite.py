"""The functional interface: it is the pieces, and it stays finite far off policy in any precision."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import covey.functional
from covey.objective.correction import CORRECTIONS
from covey.objective.penalty import PENALTIES
from tests.objective.laws import (
    CASES,
    NEEDED,
    Step,
    extras,
    make_step,
    objective_of,
    outcome,
    ready,
    seeds,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["32", "bf16"])
FAR = 50.0
ALGORITHMS = {
    "token ratio": "dapo",
    "completion ratio": "gspo",
    "product of ratios": "rloo",
    "mean of ratios": "grpo_s, arithmetic",
    "no group": "reinforce_pp",
}


def far_off_policy(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the arguments of `loss`, with differences of up to 50 between any two log-probs."""
    generator = torch.Generator().manual_seed(seed)
    batch = make_step(seed).batch

    def gap() -> torch.Tensor:
        shape = batch.mask.shape
        edge = torch.tensor([-FAR, FAR, 0.0, -20.0, 20.0])
        picked = edge[torch.randint(0, len(edge), shape, generator=generator)]
        between = (2 * torch.rand(shape, generator=generator) - 1) * FAR
        return torch.where(torch.rand(shape, generator=generator) < 0.7, picked, between)

    old = torch.full(batch.mask.shape, -2 * FAR)
    logp = old + gap()
    return {
        "logp": padded(logp, batch.mask, dtype).requires_grad_(),
        "old_logp": padded(old, batch.mask, dtype),
        "ref_logp": padded(logp - gap(), batch.mask, dtype),
        "sampler_logp": padded(old - gap(), batch.mask, dtype),
        "entropy": padded(12 * torch.rand(old.shape, generator=generator), batch.mask, dtype),
        "mask": batch.mask,
        "rewards": batch.rewards.to(dtype),
        "success": batch.success,
        "group": batch.group,
        "tokens": batch.tokens,
        "parts": batch.parts,
        "teacher_logp": padded(old - gap(), batch.mask, dtype),
        "values": padded(batch.values, batch.mask, dtype),
        **turns_of(seed, batch.mask),
    }


def padded(values: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.where(mask, torch.nan).to(dtype)


def turns_of(seed: int, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return turns of two tokens each, in one of two states and with rewards."""
    generator = torch.Generator().manual_seed(seed)
    turn = (torch.arange(mask.shape[1]) // 2).expand(mask.shape)
    shape = len(mask), int(turn.max()) + 1
    rewards = torch.rand(shape, generator=generator, dtype=torch.float64)
    state = torch.randint(0, 2, shape, generator=generator)
    return {"turn": turn, "state": state.gather(1, turn), "turn_reward": rewards.gather(1, turn)}


def check_finite(case: str, arguments: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    name, own = CASES[case]
    out = covey.functional.loss(name, **arguments, **{**NEEDED.get(name, {}), **own, **options})
    (gradient,) = torch.autograd.grad(out.loss, arguments["logp"], materialize_grads=True)
    assert out.loss.isfinite()
    assert out.loss.dtype == torch.float32
    assert gradient.isfinite().all()
    assert gradient.dtype == arguments["logp"].dtype
    assert out.advantage.isfinite().all()
    assert {k: v for k, v in out.metrics.items() if not math.isfinite(v)} == {}
    assert (gradient[~arguments["mask"]] == 0).all()


@DTYPES
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=10)
@given(data=st.data(), seed=seeds)
def test_every_algorithm_stays_finite_far_off_policy(
    case: str, dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    check_finite(case, far_off_policy(seed, dtype), data.draw(extras(case)))


@DTYPES
@pytest.mark.parametrize("case", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize(
    ("kl", "kl_in"),
    [(k, where) for k in PENALTIES for where in ("loss", "reward")
     if (k, where) != ("k3_sequence", "reward")],
)  # fmt: skip
def test_every_estimator_stays_finite_far_off_policy(
    kl: str, kl_in: str, case: str, dtype: torch.dtype
) -> None:
    check_finite(case, far_off_policy(1, dtype), {"beta": 0.1, "kl": kl, "kl_in": kl_in})


@DTYPES
@pytest.mark.parametrize("case", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("mean_one", [False, True])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_stays_finite_far_off_policy(
    correction: str, mean_one: bool, case: str, dtype: torch.dtype
) -> None:
    options = {"correction": correction, "correction_mean_one": mean_one, "veto": 1e-4}
    check_finite(case, far_off_policy(2, dtype), {**options, "correction_high": 1e9})


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=10)
@given(data=st.data(), seed=seeds)
def test_the_functional_loss_is_that_of_the_pieces(
    case: str, data: st.DataObject, seed: int
) -> None:
    step, extra = make_step(seed), data.draw(extras(case))
    step = Step(replace(step.batch, **turns_of(seed, step.batch.mask)), step.logp)
    names = (
        "old_logp", "ref_logp", "sampler_logp", "teacher_logp", "entropy", "mask", "rewards",
        "success", "group", "tokens", "parts", "values", "turn", "state", "turn_reward",
    )  # fmt: skip
    arguments = {name: getattr(step.batch, name) for name in names}
    name, own = CASES[case]
    options = {**NEEDED.get(name, {}), **own, **extra}
    logp = step.logp.clone().requires_grad_()
    out = covey.functional.loss(name, logp=logp, **arguments, **options)
    (gradient,) = torch.autograd.grad(out.loss, logp, materialize_grads=True)
    objective = objective_of(case, **extra)
    if "sampler_as_old" in objective.needs:
        step = Step(replace(step.batch, old_logp=step.batch.sampler_logp), step.logp)
    expected, batch = outcome(objective, step), ready(objective, step)
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(gradient, expected.gradient)
    assert torch.equal(out.advantage, batch.advantage)
    assert torch.equal(out.weight, batch.weight)
    # The sampler is compared with the policy that the batch was collected with, not with that now.
    # What the critic and the pairs are worth is measured here only.
    ours = {k: v for k, v in out.metrics.items() if not k.startswith(("debug", "critic", "pairs"))}
    assert ours == {k: v for k, v in expected.metrics.items() if "debug" not in k}
