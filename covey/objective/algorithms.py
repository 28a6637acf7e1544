"""The algorithms, each one function that puts the pieces together.

A function's keyword arguments are the algorithm's hyper-parameters; its docstring is the formula,
its source, and where we depart from it. To add one: write the function, name it in `ALGORITHMS`,
give it a page under docs/algorithms and a worked number under tests/objective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch

from covey.objective import correction, penalty, ratio, surrogate, weights
from covey.objective.advantage import per_token, standardized
from covey.objective.loss import Objective
from covey.types import Batch


def _standardized_per_token(batch: Batch, *, ddof: int, eps: float) -> torch.Tensor:
    return per_token(standardized(batch.rewards, batch.group, ddof=ddof, eps=eps), batch.mask)


def grpo(
    *,
    low: float = 0.2,
    high: float = 0.2,
    beta: float = 0.04,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Objective:
    """Group Relative Policy Optimization, arXiv 2402.03300.

        A_i  = (R_i - mean_g R) / (std_g R + eps)
        loss = - 1/N sum_i 1/T_i sum_t [ min(r A, clip(r, 1-low, 1+high) A) - beta k3 ]

    with r = exp(logp - old_logp) per token and k3 = exp(-d) - 1 + d, d = logp - ref_logp.

    Where the paper is silent: ddof 1, eps 1e-6, clip 0.2. Departure: a group whose rewards are all
    equal has advantage exactly 0, instead of rounding error divided by eps. With beta 0, which most
    users want today, no reference model is loaded.
    """
    return Objective(
        advantage=partial(_standardized_per_token, ddof=ddof, eps=eps),
        ratio=ratio.token_log_ratio,
        surrogate=partial(surrogate.clipped, low=low, high=high),
        weights=weights.sequence_mean_token_mean,
        correction=correction.none,
        penalty=penalty.k3,
        beta=beta,
    )


ALGORITHMS: Mapping[str, Callable[..., Objective]] = MappingProxyType({"grpo": grpo})
