"""Laws 5, 6 and 7: what must not change anything, of every algorithm.

How a step is split over ranks and micro-batches, what stands in the padding, the order of rows, the
names of groups, and rows that could not be scored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.objective import with_advantage, with_marks, with_weight
from covey.objective.diagnostics import Meter, observe_correction, summary
from covey.types import Totals
from tests.objective.laws import (
    CASES,
    Outcome,
    Step,
    close,
    descend,
    extras,
    make_step,
    objective_of,
    outcome,
    ready,
    rows_of,
    seeds,
)

PADDED = (
    "tokens", "mask", "sampler_logp", "old_logp", "ref_logp", "teacher_logp", "entropy", "values",
)  # fmt: skip
GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30]

every_algorithm = pytest.mark.parametrize("case", CASES)
IN_ORDER = ("gfpo", "dpo", "ipo")
"""Of completions of equal length they take the earlier row."""
# opd: what the teacher says of a completion holds whether or not it was scored. scalerl: its mean
# is over mixed groups, and a group that lost all its rewards is one of those that do not count; so
# are dpo and ipo. ppo: such rows are in no denominator; test_worked_critic_and_pairs.py.
of_rewards_alone = pytest.mark.parametrize(
    "case",
    [c for c in CASES if not c.startswith(("gfpo", "opd", "sdpo", "scalerl", "ppo", "dpo", "ipo"))],
)


# Metrics that ask for the sign of an advantage, where that may be 0 up to rounding. By polarity, a
# token that only one correct completion of its group reaches stands exactly at the mean.
SIGNS = {
    "gtpo, by polarity": (
        "policy/clipfrac_low", "policy/clipfrac_high", "policy/clipfrac_avg", "policy/off_policy_dropped",
    )
}  # fmt: skip


def same_outcome(case: str, ours: Outcome, theirs: Outcome) -> None:
    close(ours.loss[None], theirs.loss[None])
    close(ours.gradient, theirs.gradient)
    a, b = (
        {k: v for k, v in each.metrics.items() if k not in SIGNS.get(case, ())}
        for each in (ours, theirs)
    )
    assert a == pytest.approx(b, rel=1e-9, abs=1e-11)


def pieces(seed: int, rows: int, parts: int) -> list[torch.Tensor]:
    """Cut shuffled rows into uneven parts, none of them empty."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(rows - 1, generator=generator)[: parts - 1].sort().values + 1
    return list(torch.randperm(rows, generator=generator).tensor_split(cuts.tolist()))


def on_ranks(objective: Any, step: Step, seed: int, ranks: int, micro: int) -> Outcome:
    """Train a step as ranks do: each has its own rows, and only totals of the others'."""
    totals = Totals.of(step.batch)
    known = with_marks(objective, with_advantage(objective, step.batch), step.logp)
    loss, gradient, meter = torch.zeros((), dtype=torch.float64), step.logp * 0, Meter()
    for rank, mine in enumerate(pieces(seed, len(known), ranks)):
        rows = rows_of(Step(known, step.logp), mine)
        batch = with_weight(objective, rows.batch, totals)
        observe_correction(meter, batch)
        for part in pieces(seed + 1 + rank, len(mine), micro):
            small = rows_of(Step(batch, rows.logp), part)
            one, grad = descend(objective, small.batch, small.logp, meter)
            loss = loss + one
            gradient[mine[part], : grad.shape[1]] += grad
    return Outcome(loss, gradient, summary(meter.measured()))


@every_algorithm
@settings(max_examples=8)
@given(data=st.data(), seed=seeds)
def test_law_5_two_ranks_of_three_micro_batches_add_up_to_the_step(
    case: str, data: st.DataObject, seed: int
) -> None:
    objective = objective_of(case, **data.draw(extras(case)))
    step = make_step(seed)
    same_outcome(case, on_ranks(objective, step, seed, ranks=2, micro=3), outcome(objective, step))


@every_algorithm
def test_law_5_micro_batches_of_single_answers_add_up_to_the_step(case: str) -> None:
    objective, step = objective_of(case), make_step(5)
    alone = on_ranks(objective, step, 5, ranks=1, micro=len(step.batch))
    same_outcome(case, alone, outcome(objective, step))


def test_law_5_a_correction_of_mean_one_is_filled_in_over_the_step() -> None:
    # Not from ranks, as above: totals do not hold the sum of corrections, so that ranks which fill
    # in their own rows would each divide by their own mean.
    objective = objective_of("dapo", correction="token_truncate", correction_mean_one=True)
    step = make_step(1)
    batch = ready(objective, step)
    _, whole = descend(objective, batch, step.logp)
    parts = torch.zeros_like(whole)
    for index in pieces(1, len(batch), 4):
        small = rows_of(Step(batch, step.logp), index)
        grad = descend(objective, small.batch, small.logp)[1]
        parts[index, : grad.shape[1]] = grad
    close(parts, whole)


def spoiled(step: Step, garbage: float) -> Step:
    def spoil(values: torch.Tensor) -> torch.Tensor:
        return values.where(step.batch.mask, garbage)

    changes: dict[str, Any] = {
        name: spoil(getattr(step.batch, name)) for name in PADDED if name not in ("tokens", "mask")
    }
    tokens = step.batch.tokens.where(step.batch.mask, 2**62)
    return Step(replace(step.batch, tokens=tokens, **changes), spoil(step.logp))


def widened(step: Step, more: int) -> Step:
    def widen(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, more))

    changes: dict[str, Any] = {name: widen(getattr(step.batch, name)) for name in PADDED}
    return Step(replace(step.batch, **changes), widen(step.logp))


def reordered(step: Step, seed: int, contiguous: bool) -> tuple[Step, torch.Tensor]:
    """Give groups other names and rows another order, which is returned too."""
    names = torch.tensor([907, -3, 41])[
        torch.randperm(3, generator=torch.Generator().manual_seed(seed))
    ]
    order = torch.randperm(len(step.batch), generator=torch.Generator().manual_seed(seed + 1))
    if contiguous:  # as against interleaved, which make_step gives
        order = step.batch.group.argsort()
    named = replace(step.batch, group=names[step.batch.group])
    return rows_of(Step(named, step.logp), order), order


@every_algorithm
@settings(max_examples=8)
@given(
    data=st.data(),
    seed=seeds,
    garbage=st.sampled_from(GARBAGE),
    more=st.integers(1, 9),
    contiguous=st.booleans(),
)
def test_laws_6_and_7_padding_order_of_rows_and_names_of_groups_change_nothing(
    case: str, data: st.DataObject, seed: int, garbage: float, more: int, contiguous: bool
) -> None:
    """All are compared with one outcome, because it takes as long as each of them."""
    objective = objective_of(case, **data.draw(extras(case)))
    step = make_step(seed)
    expected = outcome(objective, step)

    found = outcome(objective, spoiled(step, garbage))
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.gradient, expected.gradient)
    assert (found.gradient[~step.batch.mask] == 0).all()
    assert found.metrics == expected.metrics

    wide = torch.nn.functional.pad(expected.gradient, (0, more))
    found = outcome(objective, widened(step, more))
    same_outcome(case, expected._replace(gradient=wide), found)

    if not case.startswith(IN_ORDER):
        other, order = reordered(step, seed, contiguous)
        same_outcome(
            case, outcome(objective, other), expected._replace(gradient=expected.gradient[order])
        )


def unscored(step: Step, rows: torch.Tensor) -> Step:
    """Let the scoring of some rows fail."""
    rewards = step.batch.rewards.clone()
    rewards[rows] = torch.nan
    return Step(replace(step.batch, rewards=rewards), step.logp)


@of_rewards_alone
@settings(max_examples=8)
@given(data=st.data(), seed=seeds, failures=st.integers(1, 6))
def test_rows_that_could_not_be_scored_count_nowhere(
    case: str, data: st.DataObject, seed: int, failures: int
) -> None:
    objective = objective_of(case, **data.draw(extras(case)))
    step = make_step(seed)
    order = torch.randperm(len(step.batch), generator=torch.Generator().manual_seed(seed + 1))
    failed, scored = order[:failures], order[failures:]
    with_failures = unscored(step, failed)
    without = rows_of(step, scored)
    width = without.batch.mask.shape[1]

    ours = ready(objective, with_failures)
    assert ours.advantage is not None
    theirs = ready(objective, without)
    assert theirs.advantage is not None
    close(ours.advantage[scored, :width], theirs.advantage)
    assert (ours.advantage[failed] == 0).all()

    loss, gradient = descend(objective, ours, step.logp)
    expected, wanted = descend(objective, theirs, without.logp)
    close(loss, expected)
    assert (gradient[failed] == 0).all()
    close(gradient[scored, :width], wanted)
