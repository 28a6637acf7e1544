"""Expected gradients by enumeration of every group over a small vocabulary: what is unbiased."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from covey import functional
from covey.objective.advantage import subset_gains

LOGITS = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64)
BINARY = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
GRADED = torch.tensor([1.0, 0.2, 0.5], dtype=torch.float64)


def expected_gradient(
    rewards: torch.Tensor, size: int, advantages: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return E[1/G sum_i A_i grad log p(y_i)] over all groups of `size` tokens drawn from p."""
    p = LOGITS.softmax(0)
    total = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=size):
        drawn = torch.tensor(group)
        scores = torch.nn.functional.one_hot(drawn, 3) - p  # d log p(y) / d logits
        total += p[drawn].prod() * (advantages(rewards[drawn])[:, None] * scores).mean(dim=0)
    return total


def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    (found,) = torch.autograd.grad(of(logits.softmax(0)), logits)
    return found


def advantages(name: str, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def of(rewards: torch.Tensor) -> torch.Tensor:
        size = len(rewards)
        one = torch.ones(size, 1)
        group = torch.zeros(size, dtype=torch.long)
        return functional.advantages(
            name, mask=one, rewards=rewards, group=group, length=1, **options
        ).squeeze(1)

    return of


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("all_wrong", "short"), [("zero", 1), ("minus_one", 0)])
def test_maxrl_is_the_logarithm_of_the_pass_rate_to_order_g_minus_1(
    size: int, all_wrong: str, short: int
) -> None:
    def expanded(p: torch.Tensor) -> torch.Tensor:
        orders = range(1, size - short + 1)
        return -torch.stack([(1 - p[0]) ** k / k for k in orders]).sum()

    found = expected_gradient(BINARY, size, advantages("maxrl", all_wrong=all_wrong))
    torch.testing.assert_close(found, gradient(expanded), atol=1e-12, rtol=0)


def best(rewards: torch.Tensor, k: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return max@k as a function of p: the mean of the largest of k draws."""

    def of(p: torch.Tensor) -> torch.Tensor:
        draws = [torch.tensor(each) for each in itertools.product(range(3), repeat=k)]
        return torch.stack([p[each].prod() * rewards[each].max() for each in draws]).sum()

    return of


@pytest.mark.parametrize("rewards", [BINARY, GRADED], ids=["binary", "graded"])
@pytest.mark.parametrize(
    ("k", "baseline"), [(1, "loo1"), (2, "loo1"), (3, "loo1"), (4, "loo1"), (2, "centred"), (3, "centred")]
)  # fmt: skip
def test_pkpo_is_the_gradient_of_the_best_of_k(
    k: int, baseline: str, rewards: torch.Tensor
) -> None:
    found = expected_gradient(rewards, 4, advantages("pkpo", k=k, baseline=baseline))
    torch.testing.assert_close(found, gradient(best(rewards, k)), atol=1e-12, rtol=0)


def test_the_baseline_of_equation_29_is_unbiased_with_its_flat_groups() -> None:
    # Without the rule that a group whose rewards are all equal teaches nothing.
    found = expected_gradient(
        GRADED, 3, lambda rewards: 3 * subset_gains(rewards, k=2, baseline="loo")
    )
    torch.testing.assert_close(found, gradient(best(GRADED, 2)), atol=1e-12, rtol=0)
    guarded = expected_gradient(GRADED, 3, advantages("pkpo", k=2, baseline="loo"))
    assert (guarded - found).abs().max() > 1e-3


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_distillation_is_the_gradient_of_the_kl_to_the_teacher(discount: float) -> None:
    """Sequences of two tokens of three: the second depends on the first, for both models."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        [torch.randn(*shape, 3, generator=generator, dtype=torch.float64) for shape in ((), (3,))]
        for _ in range(2)
    )

    def logp(model: list[torch.Tensor]) -> torch.Tensor:
        """[9, 2]: of both tokens of every sequence."""
        first, second = model[0].log_softmax(0), model[1].log_softmax(1)
        return torch.stack([first.repeat_interleave(3), second.flatten()], dim=1)

    for each in student:
        each.requires_grad_()
    ours, theirs = logp(student), logp(teacher)
    mask, one = torch.ones(9, 2), torch.zeros(9)
    given = {"mask": mask, "rewards": one, "group": torch.arange(9), "old_logp": ours.detach()}
    advantage = functional.advantages("opd", **given, teacher_logp=theirs, discount=discount)
    whole = ours.sum(dim=1).exp()
    surrogate = -(whole.detach()[:, None] * advantage * ours).sum()
    if discount:
        divergence = (whole * (ours - theirs).sum(dim=1)).sum()
    else:  # each position for itself, its prefix drawn but held fixed
        first = ours[:, 0].exp()
        per_token = [first * (ours - theirs)[:, 0] / 3, first.detach() * ours[:, 1].exp() * (ours - theirs)[:, 1]]  # fmt: skip
        divergence = torch.stack(per_token).sum()
    found = torch.autograd.grad(surrogate, student, retain_graph=True)
    expected = torch.autograd.grad(divergence, student)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
        assert math.isfinite(float(b.abs().sum()))
        assert b.abs().max() > 1e-3
