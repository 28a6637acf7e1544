"""Algorithms against a second implementation: most by loops, Clip-Cov by counting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from covey.objective import with_advantage, with_marks
from covey.objective.algorithms.marked import covariance
from covey.types import Batch
from tests.objective.laws import Step, close, make_step, objective_of, outcome, rows_of, seeds

BOUNDS = st.tuples(st.floats(0.001, 0.6), st.floats(0.001, 0.6))


def standardized_by_hand(batch: Batch) -> list[float]:
    rewards, groups = batch.rewards.tolist(), batch.group.tolist()
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(mine) / len(mine)
        deviation = (sum((r - mean) ** 2 for r in mine) / (len(mine) - 1)) ** 0.5
        result.append((reward - mean) / (deviation + 1e-6))
    return result


def completions(step: Step, logp: torch.Tensor) -> Iterator[tuple[float, torch.Tensor]]:
    """Yield the advantage and the log-ratios of the trained tokens of each completion."""
    batch = step.batch
    assert batch.old_logp is not None
    for row, advantage in enumerate(standardized_by_hand(batch)):
        chosen = batch.mask[row]
        if chosen.any():
            yield advantage, (logp[row] - batch.old_logp[row])[chosen]


def same_as(name: str, step: Step, loss: torch.Tensor, logp: torch.Tensor, **options: Any) -> None:
    (gradient,) = torch.autograd.grad(loss, logp)
    ours = outcome(objective_of(name, **options), step)
    close(ours.loss[None], loss.detach()[None], 1e-10)
    close(ours.gradient, gradient, 1e-10)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@settings(max_examples=10)
@given(seed=seeds, bounds=BOUNDS)
def test_gspo_is_autograd_through_the_geometric_mean(
    name: str, seed: int, bounds: tuple[float, float]
) -> None:
    clip_low, clip_high = bounds
    step = make_step(seed)
    logp = step.logp.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for advantage, x in completions(step, logp):
        s = x.exp().prod() ** (1 / len(x))
        assume(min(abs(float(s.detach()) - edge) for edge in (1 - clip_low, 1 + clip_high)) > 1e-6)
        total = total + torch.minimum(
            s * advantage, s.clamp(1 - clip_low, 1 + clip_high) * advantage
        )
    same_as(name, step, -total / len(step.batch), logp, clip_low=clip_low, clip_high=clip_high)


@settings(max_examples=10)
@given(seed=seeds, bounds=BOUNDS)
def test_gmpo_is_the_geometric_mean_of_ratios_clipped_one_by_one(
    seed: int, bounds: tuple[float, float]
) -> None:
    clip_low, clip_high = bounds
    step = make_step(seed)
    logp = step.logp.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for advantage, x in completions(step, logp):
        product = torch.ones((), dtype=torch.float64)
        for each in x:
            value = float(each.detach())
            # A good token may not rise above its bound, a bad one may not fall below.
            if advantage > 0 and value > clip_high:
                product = product * torch.tensor(clip_high, dtype=torch.float64).exp()
            elif advantage <= 0 and value < -clip_low:
                product = product * torch.tensor(-clip_low, dtype=torch.float64).exp()
            else:
                product = product * each.exp()
        total = total + advantage * product ** (1 / len(x))
    same_as("gmpo", step, -total / len(step.batch), logp, clip_low=clip_low, clip_high=clip_high)


@pytest.mark.parametrize("scope", ["group", "batch"])
@settings(max_examples=10)
@given(seed=seeds, beta1=st.floats(0.1, 2.0), beta2=st.floats(0.0, 1.0))
def test_grpo_s_shares_its_bonus_by_the_entropy_of_answers(
    scope: str, seed: int, beta1: float, beta2: float
) -> None:
    batch = make_step(seed, empty=False).batch
    assert batch.entropy is not None
    rows, groups = range(len(batch)), batch.group.tolist()
    entropy = [float(batch.entropy[i][batch.mask[i]].mean()) for i in rows]
    shaped = []
    for i in rows:
        right = bool(batch.success[i])
        size = [h if right else 1 / h for h in entropy]
        compared = [
            k for k in rows
            if bool(batch.success[k]) == right and (scope == "batch" or groups[k] == groups[i])
        ]  # fmt: skip
        part = len(compared) * size[i] / sum(size[k] for k in compared)
        shaped.append(beta1 + beta2 * part if right else -beta1 - beta2 * part)
    by_hand = replace(batch, rewards=torch.tensor(shaped, dtype=torch.float64))
    objective = objective_of("grpo_s", scope=scope, beta1=beta1, beta2=beta2)
    advantage = with_advantage(objective, batch).advantage
    assert advantage is not None
    expected = torch.tensor(standardized_by_hand(by_hand), dtype=torch.float64)
    close(advantage, expected[:, None].expand_as(batch.mask).where(batch.mask, 0.0))


def marked(step: Step, **options: Any) -> tuple[torch.Tensor, Batch]:
    objective = objective_of("clip_cov", **options)
    batch = with_marks(objective, with_advantage(objective, step.batch), step.logp)
    assert batch.marked is not None
    return batch.marked, batch


@settings(max_examples=10)
@given(
    seed=seeds,
    share=st.sampled_from([0.0, 2e-4, 0.1, 0.5, 1.0]),
    cov=st.tuples(st.floats(-1, 0.5), st.floats(0.5, 5)),
    bounds=BOUNDS,
)
def test_clip_cov_picks_as_many_as_it_says_within_its_bounds(
    seed: int, share: float, cov: tuple[float, float], bounds: tuple[float, float]
) -> None:
    step, (clip_low, clip_high) = make_step(seed), bounds
    options = {
        "share": share,
        "cov_low": cov[0],
        "cov_high": cov[1],
        "clip_low": clip_low,
        "clip_high": clip_high,
    }
    picked, batch = marked(step, **options)
    assert batch.advantage is not None
    assert batch.old_logp is not None

    advantage, logp = batch.advantage[batch.mask], step.logp[batch.mask]
    size = (advantage - advantage.mean()) * (logp - logp.mean())
    ratio = (logp - batch.old_logp[batch.mask]).exp()
    cut = ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))
    candidates = (size > cov[0]) & (size < cov[1]) & ~cut
    wanted = max(1, int(share * len(size)))
    assert int(picked.sum()) == min(wanted, int(candidates.sum()))
    assert candidates[picked[batch.mask]].all()
    assert not picked[~batch.mask].any()


def test_clip_cov_picks_the_same_every_time_and_others_in_another_step() -> None:
    step, others = make_step(1, rows=30, width=20), make_step(2, rows=30, width=20)
    picked, _ = marked(step)
    assert torch.equal(picked, marked(step)[0])
    resampled = Step(replace(step.batch, sampler_logp=others.batch.sampler_logp), step.logp)
    assert not torch.equal(picked, marked(resampled)[0])


def test_clip_cov_spreads_its_picks_evenly_over_tokens() -> None:
    # All advantages differ and no bound excludes a token, so every token is as likely as another:
    # whatever the row, the column, or how uncertain the sampler was.
    rows, width, trials, share = 12, 10, 300, 0.25
    options = {"share": share, "cov_low": -1e9, "cov_high": 1e9, "clip_low": 1e6, "clip_high": 1e6}
    times = torch.zeros(rows, width)
    of_likely = []
    for seed in range(trials):
        step = make_step(seed, rows=rows, width=width, empty=False)
        full = torch.ones_like(step.batch.mask)
        sampler = step.batch.sampler_logp.float()  # as samplers give it
        picked, _ = marked(
            Step(replace(step.batch, mask=full, sampler_logp=sampler), step.logp), **options
        )
        assert int(picked.sum()) == int(share * rows * width)
        times += picked
        likely = sampler > sampler.median()
        of_likely.append(float(picked[likely].double().mean()))
    expected, variance = trials * share, trials * share * (1 - share)
    squares = (times - expected).square() / variance
    assert squares.sum() < rows * width + 4 * (2 * rows * width) ** 0.5
    for totals in (times.sum(dim=0) / rows, times.sum(dim=1) / width):
        assert (totals - expected).abs().max() < 4 * (variance / 10) ** 0.5
    assert abs(sum(of_likely) / trials - share) < 0.01


@settings(max_examples=10)
@given(seed=seeds, shared=st.integers(1, 5))
def test_clip_cov_tells_answers_apart_that_begin_alike(seed: int, shared: int) -> None:
    # Answers to one prompt often begin with the same tokens, and then so do their log-probs.
    step = make_step(seed, empty=False)
    sampler = step.batch.sampler_logp.clone()
    sampler[:, :shared] = sampler[0, :shared]
    # The last token of each differs: where one completion is the beginning of another.
    last = step.batch.lengths - 1
    sampler[torch.arange(len(last)), last] -= torch.arange(len(last)) / 100
    step = Step(replace(step.batch, sampler_logp=sampler), step.logp)
    options = {"share": 0.3, "cov_low": -1e9, "cov_high": 1e9}
    order = torch.randperm(len(sampler), generator=torch.Generator().manual_seed(seed))
    ours, theirs = marked(rows_of(step, order), **options)[0], marked(step, **options)[0]
    assert torch.equal(ours, theirs[order])


@settings(max_examples=10)
@given(seed=seeds, share=st.sampled_from([2e-4, 0.1, 0.3]))
def test_kl_cov_holds_the_tokens_with_the_largest_covariance(seed: int, share: float) -> None:
    step, coefficient = make_step(seed), 0.7
    objective = objective_of("kl_cov", share=share, coefficient=coefficient)
    batch = with_marks(objective, with_advantage(objective, step.batch), step.logp)
    assert batch.marked is not None
    assert batch.advantage is not None
    assert batch.old_logp is not None
    cov = covariance(batch.advantage, step.logp, batch.mask)
    tokens = int(batch.mask.sum())
    assert int(batch.marked.sum()) == max(1, int(share * tokens))
    assert cov[batch.marked].min() >= cov[batch.mask & ~batch.marked].max()
    # loss = -1/T sum (r A - coefficient |log r| where held)
    logp = step.logp.clone().requires_grad_()
    x = (logp - batch.old_logp)[batch.mask]
    gain = x.exp() * batch.advantage[batch.mask] - coefficient * x.abs() * batch.marked[batch.mask]
    (gradient,) = torch.autograd.grad(-gain.sum() / tokens, logp)
    close(outcome(objective, step).gradient, gradient)
