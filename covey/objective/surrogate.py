"""Surrogates: the per-token objectives that training maximizes.

On policy, where the ratio r is 1, the gradient of every surrogate with respect to logp is the
advantage. The gradients of surrogates differ for tokens whose probability has changed since the
batch was collected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from covey.objective.masked import bounded, sequence_mean


class Tokens(NamedTuple):
    """The inputs of a surrogate, each [B, T] and 0 outside the mask."""

    log_ratio: torch.Tensor
    """The log-ratio log r, through which the gradient flows."""
    logp: torch.Tensor
    old_logp: torch.Tensor
    advantage: torch.Tensor
    mask: torch.Tensor
    marked: torch.Tensor | None = None
    """The result of the objective's function `marks`; None if the objective has no `marks`."""
    ref_logp: torch.Tensor | None = None
    """Log-probabilities under the reference, for pairwise surrogates such as DPO; None if there is
    no reference."""
    beta: float = 0.0
    """The objective's coefficient beta, for pairwise surrogates such as DPO."""


class Gain(NamedTuple):
    """The outputs of a surrogate, each [B, T]."""

    value: torch.Tensor
    clipped_low: torch.Tensor
    """Mask of the tokens with a ratio below the lower bound, where the gradient is 0 or reduced. Of
    tokens that `marks` excludes, those with A < 0 count here, and those with A > 0 as too high."""
    clipped_high: torch.Tensor
    """Mask of the tokens with a ratio above the upper bound, where the gradient is 0 or reduced."""
    clipped_dual: torch.Tensor | None = None
    """Mask of the tokens with A < 0 and a ratio above the bound `dual`; None if `dual` is 0."""


def clipped(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual: float = 0.0
) -> Gain:
    """The PPO surrogate min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), arXiv 1707.06347.

    The gradient with respect to logp is r A for an unclipped token and 0 for a clipped token. A
    token is clipped if A > 0 and r > 1 + clip_high, or if A < 0 and r < 1 - clip_low. A token with
    A > 0 and r < 1 is never clipped. With `dual` (arXiv 1912.09729), a token with A < 0 is also
    clipped if r > dual, so the surrogate is at least dual * A.
    """
    ratio, advantage = tokens.log_ratio.exp(), tokens.advantage
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    above_dual = None
    if dual:
        value = torch.where(advantage < 0, torch.maximum(value, dual * advantage), value)
        above_dual = (advantage < 0) & (ratio > dual)
    return Gain(
        value=value,
        clipped_low=(advantage < 0) & (ratio < 1 - clip_low),
        clipped_high=(advantage > 0) & (ratio > 1 + clip_high),
        clipped_dual=above_dual,
    )


def unclipped(tokens: Tokens) -> Gain:
    """The surrogate r A: importance sampling without a bound."""
    return unbounded(tokens.log_ratio.exp() * tokens.advantage, tokens)


def log_likelihood(tokens: Tokens) -> Gain:
    """The REINFORCE surrogate A logp, without a ratio.

    The gradient with respect to logp is the advantage A, however far the policy has moved since
    sampling.
    """
    return unbounded(tokens.advantage * tokens.logp, tokens)


def truncated_weight(tokens: Tokens, *, max_weight: float = 5.0, min_weight: float = 0.0) -> Gain:
    """The surrogate w A logp, where the weight w is r clipped to [min_weight, max_weight].

    CISPO, arXiv 2506.13585. The weight w is clipped but never set to 0, so every token keeps its
    gradient. No gradient flows through the weight w.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(min_weight, max_weight)
    return Gain(
        value=weight * tokens.advantage * tokens.logp,
        clipped_low=tokens.mask & (ratio < min_weight),
        clipped_high=tokens.mask & (ratio > max_weight),
    )


def geometric_clipped(tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Gain:
    """The surrogate of GMPO: advantage times exp(mean of clipped token log-ratios)."""
    x, advantage = tokens.log_ratio, tokens.advantage
    held = x.clamp(-clip_low, clip_high)
    z = torch.where(advantage > 0, torch.minimum(x, held), torch.maximum(x, held))
    return Gain(
        value=advantage * bounded(sequence_mean(z, tokens.mask)).exp(),
        clipped_low=(advantage < 0) & (x < -clip_low),
        clipped_high=(advantage > 0) & (x > clip_high),
    )


def soft_gate(tokens: Tokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Gain:
    """The surrogate f(r) A with the soft gate f(r) = 4 / tau sigmoid(tau (r - 1))."""
    tau = _either(tokens.advantage > 0, tau_pos, tau_neg, tokens)
    gate = torch.sigmoid(tau * (tokens.log_ratio.exp() - 1)) * 4 / tau
    return unbounded(gate * tokens.advantage, tokens)


def gamma_weight(
    tokens: Tokens,
    *,
    power_pos: float = 2.0,
    rate_pos: float = 3.0,
    power_neg: float = 3.0,
    rate_neg: float = 2.0,
) -> Gain:
    """The surrogate phi(r) A logp with the weight phi(r) = r^power exp(rate (1 - r)).

    VESPO, arXiv 2602.10693. No gradient flows through phi.
    """
    good = tokens.advantage >= 0
    power = _either(good, power_pos, power_neg, tokens)
    rate = _either(good, rate_pos, rate_neg, tokens)
    # The ratio of a whole completion may be tiny.
    log_ratio = tokens.log_ratio.detach().clamp(min=math.log(1e-8))
    phi = (power * log_ratio - rate * torch.expm1(log_ratio)).exp()
    return unbounded(phi * tokens.advantage * tokens.logp, tokens)


def trust_mask(
    tokens: Tokens, *, clip_low: float = 0.15, clip_high: float = 0.15, max_weight: float = 20.0
) -> Gain:
    """The surrogate min(r, max_weight) A logp, or 0 if the token's probability changed too much."""
    moved = (tokens.logp.exp() - tokens.old_logp.exp()).detach()
    good = tokens.advantage > 0
    outside_high = good & (moved > clip_high)
    outside_low = ~good & (moved < -clip_low)
    weight = tokens.log_ratio.detach().exp().clamp(max=max_weight)
    kept = ~(outside_high | outside_low)
    return Gain(
        value=(weight * tokens.advantage * tokens.logp).where(kept, 0.0),
        clipped_low=outside_low & (tokens.advantage < 0),
        clipped_high=outside_high,
    )


def clipped_without_marked(
    tokens: Tokens, *, clip_low: float = 1.0, clip_high: float = 1.0
) -> Gain:
    """The PPO surrogate, or 0 for tokens that `marks` selects. Clip-Cov, 2505.22617."""
    assert tokens.marked is not None
    gain = clipped(tokens, clip_low=clip_low, clip_high=clip_high)
    return gain._replace(
        value=gain.value.where(~tokens.marked, 0.0),
        clipped_low=gain.clipped_low | (tokens.marked & (tokens.advantage < 0)),
        clipped_high=gain.clipped_high | (tokens.marked & (tokens.advantage > 0)),
    )


def unclipped_without_marked(tokens: Tokens) -> Gain:
    """The surrogate r A, or 0 for tokens that `marks` selects. M2PO, arXiv 2510.01161."""
    assert tokens.marked is not None
    gain = unclipped(tokens)
    return Gain(
        value=gain.value.where(~tokens.marked, 0.0),
        clipped_low=tokens.marked & (tokens.advantage < 0),
        clipped_high=tokens.marked & (tokens.advantage > 0),
    )


def clipped_at_marks(tokens: Tokens) -> Gain:
    """The surrogate min(r A, clip(r) A), where `marks` gives the bound of each ratio.

    BAPO, arXiv 2510.18927. Each token has only one clip bound: an upper bound if A > 0, and
    otherwise a lower bound.
    """
    assert tokens.marked is not None
    ratio, advantage = tokens.log_ratio.exp(), tokens.advantage
    bound = tokens.marked.to(tokens.logp.dtype)
    good = advantage > 0
    held = torch.where(good, torch.minimum(ratio, bound), torch.maximum(ratio, bound))
    return Gain(
        value=held * advantage,
        clipped_low=(advantage < 0) & (ratio < bound),
        clipped_high=good & (ratio > bound),
    )


def penalized_where_marked(tokens: Tokens, *, coefficient: float = 1.0) -> Gain:
    """The surrogate r A, minus coefficient * |log r| for tokens that `marks` selects. KL-Cov."""
    assert tokens.marked is not None
    penalty = (coefficient * tokens.log_ratio.abs()).where(tokens.marked, 0.0)
    return unbounded(tokens.log_ratio.exp() * tokens.advantage - penalty, tokens)


def _either(good: torch.Tensor, yes: float, no: float, tokens: Tokens) -> torch.Tensor:
    # torch.where with two Python numbers would always give float32.
    return torch.full_like(tokens.logp, no).masked_fill(good, yes)


def unbounded(value: torch.Tensor, tokens: Tokens) -> Gain:
    """Return the gain of a surrogate that clips no token."""
    never = torch.zeros_like(tokens.mask)
    return Gain(value=value, clipped_low=never, clipped_high=never)


SURROGATES: Mapping[str, Callable[..., Gain]] = MappingProxyType(
    {
        "clipped": clipped,
        "unclipped": unclipped,
        "log_likelihood": log_likelihood,
        "truncated_weight": truncated_weight,
        "geometric_clipped": geometric_clipped,
        "soft_gate": soft_gate,
        "gamma_weight": gamma_weight,
        "trust_mask": trust_mask,
    }
)
