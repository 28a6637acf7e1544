"""A rollout of several rows counts once: as one row with the same tokens would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.objective import (
    ALGORITHMS,
    Objective,
    build,
    policy_loss,
    with_advantage,
    with_marks,
    with_weight,
)
from covey.objective.diagnostics import Meter, observe_reference, summary
from covey.objective.masked import joined
from covey.step import RowFacts
from covey.types import Batch, Totals
from tests.conftest import make_batch
from tests.objective.laws import OF_PAIRS
from tests.training.test_step import settings

NEEDED = {name: {"length": 9} for name in ("dr_grpo", "maxrl", "pkpo")}
CUT = 3
"""The first row of a rollout keeps this many tokens, its second the rest."""


def whole_batch() -> Batch:
    """Eight rollouts in two groups, with all that any objective reads."""
    batch = make_batch(rows=8, groups=2, seed=3)
    noise = torch.Generator().manual_seed(1)
    fields = ("old_logp", "ref_logp", "teacher_logp", "entropy", "values")
    numbers = {name: torch.rand(batch.mask.shape, generator=noise) for name in fields}
    numbers |= {name: -numbers[name] for name in fields[:3]}
    numbers["parts"] = torch.rand(8, 2, generator=noise).double()
    truncated = torch.arange(8) == 2
    return replace(batch, **numbers, truncated=truncated, rollout=torch.arange(8))


def in_two_rows(batch: Batch) -> Batch:
    """Cut every rollout that is long enough into two rows of the same rollout."""
    rows: list[dict[str, torch.Tensor]] = []
    for number in range(len(batch)):
        length = int(batch.lengths[number])
        cuts = [(0, CUT), (CUT, length)] if length > CUT else [(0, length)]
        for start, end in cuts:
            row = {}
            for name in batch.__slots__:
                value = getattr(batch, name)
                if not isinstance(value, torch.Tensor):
                    continue
                part = value[number]
                if value.ndim == 2 and name not in ("prompt_tokens", "parts"):
                    blank = torch.zeros_like(part)
                    blank[: end - start] = part[start:end]
                    part = blank
                row[name] = torch.tensor(end - start) if name == "lengths" else part
            rows.append(row)
    return replace(batch, **{name: torch.stack([r[name] for r in rows]) for name in rows[0]})


def back(cut: Batch, values: torch.Tensor, width: int) -> torch.Tensor:
    """Return values [B, T] of cut rows in the rows of their rollouts."""
    return joined(cut).join(values)[:, :width]


def objective_of(name: str) -> Objective:
    if name in OF_PAIRS:
        return build(name)
    return build(name, **NEEDED.get(name, {}), beta=0.1, correction="sequence_truncate", veto=0.01)


def test_rows_are_cut_and_joined_again() -> None:
    batch = whole_batch()
    cut = in_two_rows(batch)
    assert len(cut) > len(batch)
    assert not cut.one_row_each
    again = joined(cut).batch
    for name in ("tokens", "mask", "lengths", "rewards", "group", "rollout"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
    assert again.old_logp is not None
    assert batch.old_logp is not None
    assert torch.equal(again.old_logp[batch.mask], batch.old_logp[batch.mask])
    assert joined(batch).batch is batch


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_corrections_and_weights_are_those_of_one_row(name: str) -> None:
    objective, batch = objective_of(name), whole_batch()
    width = batch.tokens.shape[1]
    filled = []
    for each in (batch, in_two_rows(batch)):
        ready = with_weight(objective, with_advantage(objective, each))
        logp = each.old_logp
        assert logp is not None
        filled.append(with_marks(objective, ready, logp + 0.1))
    whole, cut = filled
    for field in ("advantage", "targets", "token_penalty", "correction", "weight", "marked"):
        expected, found = getattr(whole, field), getattr(cut, field)
        if expected is None:
            assert found is None
        else:
            again, once = back(cut, found, width)[batch.mask], expected[batch.mask]
            assert torch.equal(again.nan_to_num(), once.nan_to_num()), field


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "luspo", "gpg"])
def test_the_loss_of_token_ratios_is_that_of_one_row(name: str) -> None:
    options = {} if name == "luspo" else {"beta": 0.1}
    objective, batch = build(name, **NEEDED.get(name, {}), **options), whole_batch()
    if name == "luspo":  # on policy its ratio of a sequence is 1, of whatever rows
        batch = replace(batch, old_logp=None)
    losses = []
    for each in (batch, in_two_rows(batch)):
        ready = with_weight(objective, with_advantage(objective, each))
        losses.append(policy_loss(objective, ready, each.sampler_logp).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-7)


def test_totals_count_rollouts() -> None:
    batch = whole_batch()
    whole, cut = Totals.of(batch), Totals.of(in_two_rows(batch))
    assert (cut.sequences, cut.tokens, cut.groups) == (whole.sequences, whole.tokens, whole.groups)
    assert whole.sequences == 8
    assert cut.group_tokens == whole.group_tokens
    assert whole.rollout_tokens is None
    assert cut.rollout_tokens == dict(enumerate(batch.mask.sum(dim=1).tolist()))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_mini_batches_take_the_same_rollouts_and_never_part_of_one(count: int) -> None:
    objective, batch = build("grpo", beta=0.0), whole_batch()
    taken = []
    for each in (batch, in_two_rows(batch)):
        each = with_advantage(objective, each)
        facts, wanted = RowFacts.of(each, skip=False), settings(mini_batches=count)
        assert each.rollout is not None
        steps = [each.rollout[index] for index in facts.mini_batches(wanted, step=4)]
        taken.append([rollouts.unique_consecutive().tolist() for rollouts in steps])
        totals = [facts.totals(index).sequences for index in facts.mini_batches(wanted, step=4)]
        assert totals == [len(rollouts) for rollouts in taken[-1]]
    assert taken[0] == taken[1]
    assert sorted(n for rollouts in taken[0] for n in rollouts) == list(range(8))


def test_the_kl_to_the_reference_is_summed_over_rollouts() -> None:
    whole, meters = whole_batch(), (Meter(), Meter())
    for meter, batch in zip(meters, (whole, in_two_rows(whole)), strict=True):
        assert batch.old_logp is not None
        observe_reference(meter, batch, batch.old_logp)
    one, two = (summary(meter.measured()) for meter in meters)
    assert one == pytest.approx(two)
    gap = (whole.old_logp - whole.ref_logp).where(whole.mask, 0.0).sum(dim=1)  # type: ignore[operator]
    assert one["objective/kl"] == pytest.approx(float(gap[whole.mask.any(dim=1)].mean()))
