"""Token weights: the loss is minus the weighted sum of the per-token objectives.

Each function returns the weights [B, T] of all tokens. Covey computes the weights once per
optimizer step, from the step's total numbers of tokens, rollouts and groups. The loss of a step is
a plain weighted sum, which does not depend on how the step is split into micro-batches or over
ranks. Weights are computed in float64, and rounded once to the dtype of the loss.

In the formulas, an optimizer step has N rollouts, T tokens and P groups. Rollout i has T_i tokens,
and group g has T_g tokens. Rollouts without a reward are not among them, unless a teacher gives the
advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from covey.objective.masked import row_tokens
from covey.types import Batch, Totals


def sequence_mean_token_mean(batch: Batch, totals: Totals) -> torch.Tensor:
    """Weights 1 / (N T_i): average over each rollout's tokens, then over the N rollouts.

    GRPO, arXiv 2402.03300. Tokens of short completions get more weight than tokens of long
    completions, so long wrong completions are penalized too little (arXiv 2503.20783). If the
    objective uses one ratio per completion, the weighted sum is the mean of the rollouts'
    surrogates.
    """
    tokens = row_tokens(batch.mask)
    if totals.rollout_tokens is not None and batch.rollout is not None:
        tokens = _looked_up(totals.rollout_tokens, batch.rollout)
    return batch.mask.double() / (tokens * max(1, totals.sequences))


def sequence_mean_token_sum(batch: Batch, totals: Totals) -> torch.Tensor:
    """Weights 1 / N: sum over each rollout's tokens, then average over the N rollouts."""
    return batch.mask.double() / max(1, totals.sequences)


def sequence_mean_token_sum_norm(batch: Batch, totals: Totals, *, length: int) -> torch.Tensor:
    """Weights 1 / (N length) with a constant `length`, equal for tokens of short and long rollouts.

    Dr.GRPO, arXiv 2503.20783.
    """
    return sequence_mean_token_sum(batch, totals) / length


def token_mean(batch: Batch, totals: Totals) -> torch.Tensor:
    """Weights 1 / T: the mean over all tokens of the step."""
    return batch.mask.double() / max(1, totals.tokens)


def group_mean_token_mean(batch: Batch, totals: Totals) -> torch.Tensor:
    """Weights 1 / (P T_g): average over each group's tokens, then over the P groups.

    DAPO's equation 8.
    """
    tokens = _looked_up(totals.group_tokens, batch.group)
    return batch.mask.double() / (tokens * max(1, totals.groups))


def group_mean_sequence_sum(batch: Batch, totals: Totals) -> torch.Tensor:
    """Weights 1 / (P T_i): average over each rollout's tokens, sum the averages, and divide by P.

    The weights 1 / (P T_i) are for pairwise losses such as DPO, where each group has one pair of
    completions.
    """
    return sequence_mean_token_mean(batch, totals) * (totals.sequences / max(1, totals.groups))


def _looked_up(tokens: Mapping[int, int], ids: torch.Tensor) -> torch.Tensor:
    """Return the token count of each rollout id or group id, but at least 1, as float64 [B, 1]."""
    values = [max(1, tokens.get(i, 0)) for i in ids.tolist()]  # 0 for rows that do not count
    return torch.tensor(values, dtype=torch.double, device=ids.device)[:, None]


WEIGHTS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        "sequence_mean_token_mean": sequence_mean_token_mean,
        "sequence_mean_token_sum": sequence_mean_token_sum,
        "sequence_mean_token_sum_norm": sequence_mean_token_sum_norm,
        "token_mean": token_mean,
        "group_mean_token_mean": group_mean_token_mean,
    }
)
