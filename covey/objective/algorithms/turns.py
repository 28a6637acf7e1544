"""Advantages for the turns of multi-turn rollouts, and algorithms with such advantages.

An environment may give a reward to each turn of a rollout. If the turn rewards do not sum to the
rollout's reward R, the difference is added to the reward of the last turn. In the formulas, r_k is
the reward of turn k, and U_k is its discounted return:

    r_k = turn reward of turn k;  r_last += R - sum_k r_k        U_k = sum_{j>=k} gamma^(j-k) r_j

All tokens of a turn have the same advantage. A rollout that is not divided into turns counts as one
turn. In tensor shapes, B is the number of rollouts, with one row per rollout. T is the number of
tokens per row, and K is the largest number of turns in a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch

from covey.objective import surrogate, weights
from covey.objective.advantage import centered, per_token, returns, rollout_rewards, standardized
from covey.objective.loss import Need, Objective
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl
from covey.types import Batch

OF_TURNS: frozenset[Need] = frozenset({"groups", "turns"})
OF_STATES: frozenset[Need] = frozenset({"groups", "turns", "states"})
"""The inputs that the advantage functions of this module read."""


class TurnTable(NamedTuple):
    """The turns of a batch; the fields have the shape [B, K], except `number` [B, T]."""

    returns: torch.Tensor
    """The discounted return U of each turn, float64; NaN where scoring failed."""
    present: torch.Tensor
    """Boolean mask of the turns that the rollout has; False for padding."""
    state: torch.Tensor
    number: torch.Tensor
    """The index of the turn that a token belongs to, [B, T]."""

    def tokens(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Copy the value [B, K] of each turn to its trained tokens [B, T]; other tokens get 0."""
        return values.gather(1, self.number).where(mask, 0.0)


def turn_table(batch: Batch, gamma: float) -> TurnTable:
    """Return the turns of the batch with their discounted returns."""
    number = torch.zeros_like(batch.tokens) if batch.turn is None else batch.turn
    number = number.where(batch.mask, 0)
    count = int(number.max()) + 1 if number.numel() else 1
    shape = len(number), count
    rewards = torch.zeros(shape, dtype=torch.float64, device=number.device)
    state = torch.zeros(shape, dtype=torch.long, device=number.device)
    # All tokens of a turn have the same values; tokens outside the mask point beyond the table.
    place = number.where(batch.mask, count)
    present = _spread(batch.mask, place, count)
    if batch.turn_reward is not None:
        rewards = _spread(batch.turn_reward, place, count)
    if batch.state is not None:
        state = _spread(batch.state, place, count)
    last = present.long().cumsum(dim=1).argmax(dim=1, keepdim=True)
    rest = rollout_rewards(batch).double() - rewards.sum(dim=1)
    rewards = rewards.scatter_add(1, last, rest[:, None])
    return TurnTable(returns(rewards, present, gamma=gamma), present, state, number)


def _spread(values: torch.Tensor, place: torch.Tensor, count: int) -> torch.Tensor:
    """Return turn values [B, count] from token values [B, T] and turn indices `place` [B, T]."""
    table = values.new_zeros(len(values), count + 1)
    return table.scatter_(1, place, values)[:, :count]


def _compared(
    table: TurnTable, cell: torch.Tensor, rule: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Return each turn's advantage [B, K], relative to the turns with the same `cell` id."""
    found = rule(table.returns[table.present], cell[table.present])
    return torch.zeros_like(table.returns).masked_scatter(table.present, found)


def by_turn(
    batch: Batch,
    *,
    gamma: float = 1.0,
    compare: Literal["turn", "group"] = "turn",
    ddof: int = 1,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The return of each turn, standardized over the turns of its group.

    With `compare = "turn"`, a turn is compared only with turns of the same index. The k-th turns of
    two rollouts may start from different states.
    """
    table = turn_table(batch, gamma)
    turns = torch.arange(table.present.shape[1], device=batch.group.device)
    within = turns if compare == "turn" else torch.zeros_like(turns)
    cell = batch.group[:, None] * len(turns) + within
    rule = partial(standardized, ddof=ddof, eps=eps)
    return table.tokens(_compared(table, cell, rule), batch.mask)


def by_state(
    batch: Batch,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalize: Literal["std", "mean"] = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The sum A_episode + step_weight * A_step, where A_step compares turns in equal states.

    GiGPO, arXiv 2505.10978. If a state occurs in only one turn of the group, its A_step is 0.
    """
    rule = partial(standardized, ddof=ddof, eps=eps) if normalize == "std" else centered
    whole = per_token(rule(rollout_rewards(batch), batch.group), batch.mask)
    if batch.state is None:
        return whole
    table = turn_table(batch, gamma)
    pairs = torch.stack([batch.group[:, None].expand_as(table.state), table.state], dim=-1)
    cell = pairs.view(-1, 2).unique(dim=0, return_inverse=True)[1].view_as(table.state)
    return whole + step_weight * table.tokens(_compared(table, cell, rule), batch.mask)


@algorithm(title="Group-in-Group Policy Optimization", source="arXiv 2505.10978")
def gigpo(
    *, gamma: float = 0.95, step_weight: float = 1.0, normalize: Literal['std', 'mean'] = "std",
    clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0, kl: Kl = "k3",
    ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """Also compares turns in equal states.

        A_E  = (R_i - mean_g R) / (std_g R + eps)
        U_k  = sum_{j>=k} gamma^(j-k) r_j,  r_last includes R minus the sum of turn rewards
        A_S  = (U_k - mean U) / (std U + eps)  over the turns of the group in the same state
        A    = A_E + step_weight A_S
        loss = - 1/N sum_i 1/T_i sum_t min(r A, clip(r, 1-clip_low, 1+clip_high) A)

    Worth knowing: `gigpo` is for multi-turn rollouts with an environment that reports its states
    (in `covey.functional`, the arguments `turn`, `state` and `turn_reward`). A
    state that occurs only once does not change the advantage, so `gigpo` equals GRPO if no state
    occurs twice. With `normalize = "mean"`, advantages are not divided by a standard deviation.
    Covey takes the mean and standard deviation of the episode advantage A_E over the rollouts of a
    group. The authors' code takes the mean and standard deviation of A_E over turns, so long
    episodes count more.
    """
    return Objective(
        advantage=partial(
            by_state,
            gamma=gamma,
            step_weight=step_weight,
            normalize=normalize,
            ddof=ddof,
            eps=eps,
        ),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        reads=OF_STATES,
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "gigpo": gigpo,
}
