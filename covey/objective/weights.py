"""Weights: how the gains of single tokens add up to one loss.

Aggregation is data. Each function gives the factor [B, T] of every token, computed once for an
optimizer step from its totals; the loss is then a plain sum, which comes out the same however the
step is split into micro-batches or spread over ranks. Weights are float64, and rounded once to the
precision of the loss.

N answers, T tokens and P groups in the step; T_i tokens in answer i, T_g in group g.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from covey.objective.masked import row_tokens
from covey.types import Totals


def sequence_mean_token_mean(
    mask: torch.Tensor, group: torch.Tensor, totals: Totals
) -> torch.Tensor:
    """1 / (N T_i): the mean over answers of the mean over their tokens. GRPO, arXiv 2402.03300.

    Short answers have heavier tokens; long wrong ones are under-penalised (arXiv 2503.20783). It is
    also the mean over answers of a gain that all tokens of an answer share.
    """
    return mask.double() / (row_tokens(mask) * max(1, totals.sequences))


def sequence_mean_token_sum(
    mask: torch.Tensor, group: torch.Tensor, totals: Totals
) -> torch.Tensor:
    """1 / N: the mean over answers of the sum over their tokens."""
    return mask.double() / max(1, totals.sequences)


def sequence_mean_token_sum_norm(
    mask: torch.Tensor, group: torch.Tensor, totals: Totals, *, length: int
) -> torch.Tensor:
    """1 / (N length), with a constant length: no length bias. Dr.GRPO, arXiv 2503.20783."""
    return sequence_mean_token_sum(mask, group, totals) / length


def token_mean(mask: torch.Tensor, group: torch.Tensor, totals: Totals) -> torch.Tensor:
    """1 / T: the mean over all tokens of the step. DAPO's released code, arXiv 2503.14476."""
    return mask.double() / max(1, totals.tokens)


def group_mean_token_mean(mask: torch.Tensor, group: torch.Tensor, totals: Totals) -> torch.Tensor:
    """1 / (P T_g): the mean over groups of the mean over their tokens. DAPO's equation 8."""
    ids, place = group.unique(return_inverse=True)
    tokens = mask.new_tensor(
        [max(1, totals.group_tokens[i]) for i in ids.tolist()], dtype=torch.double
    )
    return mask.double() / (tokens[place, None] * max(1, totals.groups))


WEIGHTS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        "sequence_mean_token_mean": sequence_mean_token_mean,
        "sequence_mean_token_sum": sequence_mean_token_sum,
        "sequence_mean_token_sum_norm": sequence_mean_token_sum_norm,
        "token_mean": token_mean,
        "group_mean_token_mean": group_mean_token_mean,
    }
)
