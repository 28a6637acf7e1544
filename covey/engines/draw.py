"""Sample tokens and their log-probs from logits, with temperature, top-k, top-p and min-p.

In tensor shapes, S is the number of sequences and V is the vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The sampling distribution; by default, it is not truncated.

    Temperature 0 means greedy decoding.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens get probability 0, by truncation or greedy decoding."""
        return self.temperature == 0.0 or self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def log_distribution(logits: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """Return the log-probabilities [S, V], in float32, of the distribution to sample from.

    Truncation applies top-k, then top-p, then min-p, each of which renormalizes the probabilities
    of the remaining tokens. Removed tokens have the log-probability -inf.
    """
    logp = torch.log_softmax(logits.float() / distribution.temperature, dim=-1)
    if not distribution.truncates:
        return logp
    if 0 < distribution.top_k < logp.shape[-1]:
        least = logp.topk(distribution.top_k, dim=-1).values[:, -1:]
        logp = _keep(logp, logp >= least)
    if distribution.top_p < 1.0:
        ordered, index = logp.sort(dim=-1, descending=True)
        # A token stays if the probability mass before it is below top_p; the first token always
        # stays.
        before = _running_sum(ordered.exp()) - ordered.exp()
        stays = (before < distribution.top_p).scatter(-1, index, before < distribution.top_p)
        logp = _keep(logp, stays)
    if distribution.min_p > 0.0:
        floor = logp.amax(dim=-1, keepdim=True).exp() * distribution.min_p
        logp = _keep(logp, logp.exp() >= floor)
    return logp


def _keep(logp: torch.Tensor, stays: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logp.where(stays, -torch.inf), dim=-1)


def _running_sum(values: torch.Tensor) -> torch.Tensor:
    """Return bitwise reproducible cumulative sums along each row of `values` [S, V]."""
    if (
        values.is_cuda and len(values) == 1
    ):  # torch splits a single row into parts, whose order of addition varies
        return values.expand(2, -1).cumsum(dim=-1)[:1]
    return values.cumsum(dim=-1)


def pick_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, distribution: Distribution
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row of `logits` by inverse-CDF sampling with `uniforms` [S].

    Returns token ids [S] and their log-probabilities [S]; greedy choices have log-probability 0. If
    the logits of a row are NaN, the log-probability of the row's token is NaN.
    """
    if distribution.temperature == 0.0:
        largest, tokens = logits.max(dim=-1)
        return tokens, (largest - largest).float()
    return pick_from(log_distribution(logits, distribution), uniforms)


def pick_from(logp: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row of log-probabilities [S, V]; return ids and log-probabilities [S]."""
    cumulative = _running_sum(logp.exp())
    total = cumulative[:, -1:].contiguous()
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # Rounding may make u * total equal to total. Then take the last token with any mass.
    last = torch.searchsorted(cumulative, total).clamp(max=logp.shape[-1] - 1)
    tokens = torch.minimum(tokens, last).squeeze(-1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)
