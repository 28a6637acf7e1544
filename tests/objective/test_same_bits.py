"""On policy, algorithms that are the same have the same gradient to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.objective import build
from covey.objective.masked import row_mean, sequence_mean, spread
from tests.objective.laws import Step, gradient_of, make_step, outcome

FAMILIES = [
    ("grpo", ["gspo", "gspo_token", "gmpo"]),
    ("dapo", ["cispo", "vespo", "dppo", "kl_cov"]),
]
PAIRS = [(first, other) for first, others in FAMILIES for other in others]


def on_policy(seed: int, *, known: bool = False) -> Step:
    """Return a float32 step of the policy that sampled; `known` fills in its old_logp."""
    step = make_step(seed, rows=12, width=37)
    logp = step.logp.float()
    reference = step.batch.ref_logp.float()
    old = logp.clone() if known else None
    return Step(replace(step.batch, old_logp=old, ref_logp=reference), logp)


@pytest.mark.parametrize("known", [False, True], ids=["old_logp absent", "old_logp equal"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(("first", "other"), PAIRS)
def test_the_gradient_is_the_same_to_the_last_bit(
    first: str, other: str, beta: float, known: bool
) -> None:
    for seed in range(5):
        step = on_policy(seed, known=known)
        one, two = (outcome(build(name, beta=beta), step) for name in (first, other))
        assert torch.equal(one.gradient, two.gradient)
        assert one.gradient.abs().max() > 0


def test_so_are_the_loss_and_every_number_of_grpo_and_gspo() -> None:
    step = on_policy(3)
    one, two = (outcome(build(name, beta=0.04), step) for name in ("grpo", "gspo"))
    assert torch.equal(one.loss, two.loss)
    assert one.metrics == two.metrics


def test_a_mean_that_is_taken_naively_rounds_differently() -> None:
    """What the tests above would find if the mean were written down as it is."""

    def plain(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return spread(row_mean(x, mask), mask)

    grpo = build("grpo", beta=0.0)
    naive = replace(build("gspo"), ratio=plain)
    equal = [
        torch.equal(gradient_of(grpo, s), gradient_of(naive, s)) for s in map(on_policy, range(5))
    ]
    assert equal != [True] * 5


def test_the_mean_of_an_answer_has_the_value_and_gradient_of_a_mean() -> None:
    step = make_step(11)
    mask, values = step.batch.mask, step.logp.clone().requires_grad_()
    upstream = torch.randn(
        values.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    (found,) = torch.autograd.grad((sequence_mean(values, mask) * upstream).sum(), values)
    (wanted,) = torch.autograd.grad((spread(row_mean(values, mask), mask) * upstream).sum(), values)
    assert torch.equal(sequence_mean(values, mask), spread(row_mean(values, mask), mask))
    torch.testing.assert_close(found, wanted, atol=1e-15, rtol=1e-13)
    assert (found[~mask] == 0).all()
    assert not mask.any(dim=1).all()  # a completion without trained tokens is among them


def test_the_mean_of_an_answer_is_differentiated_right() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    values = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: sequence_mean(v, mask).square(), (values,))
