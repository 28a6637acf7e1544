"""Weights: how the gains of single tokens add up to one loss.

Aggregation is data. Each function gives the factor [B, T] of every token, computed once for an
optimizer step from its totals; the loss is then a plain sum, which comes out the same however the
step is split into micro-batches or spread over ranks. Weights are float64, and rounded once to the
precision of the loss.
"""

from __future__ import annotations

import torch

from covey.types import Totals


def sequence_mean_token_mean(
    mask: torch.Tensor, group: torch.Tensor, totals: Totals
) -> torch.Tensor:
    """1 / (N T_i): the mean over answers of the mean over their tokens. GRPO, arXiv 2402.03300.

    Short answers have heavier tokens; long wrong ones are under-penalised (arXiv 2503.20783).
    """
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mask.double() / (tokens * max(1, totals.sequences))


def token_mean(mask: torch.Tensor, group: torch.Tensor, totals: Totals) -> torch.Tensor:
    """1 / T: the mean over all tokens of the step. DAPO's released code, arXiv 2503.14476."""
    return mask.double() / max(1, totals.tokens)
