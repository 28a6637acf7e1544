"""Computes gradients of the parameters from gradients of log-probs and entropies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from covey.analysis.explain.effect import Effect
from covey.models.micro_batches import micro_batches
from covey.objective.advantage import zero_variance
from covey.training.optimizer import Optimizer
from covey.training.policy import Policy
from covey.types import Batch


def parameter_gradients(
    policy: Policy, batch: Batch, effects: Mapping[str, Effect], budget: int
) -> dict[str, torch.Tensor]:
    """Return the gradient of all trained parameters for each algorithm in `effects`, as a vector.

    All algorithms share the forward pass, and each algorithm has its own backward pass. All
    gradients are in memory at the same time.
    """
    # The optimizer collects gradients as in training, because some bypass autograd on a GPU.
    optimizer = policy.optimizer
    size = sum(parameter.numel() for parameter in optimizer.parameters.values())
    totals = {name: torch.zeros(size, device=batch.tokens.device) for name in effects}
    policy.model.model.train()
    for rows in _passes(batch, budget):
        width = max(1, int(batch.lengths[rows].max()))
        slopes = {
            name: (e.gradient[rows, :width], e.entropy_gradient[rows, :width])
            for name, e in effects.items()
        }
        nonzero = {name: s for name, s in slopes.items() if any(bool(part.any()) for part in s)}
        if not nonzero:
            continue
        now = policy.plain_logp(batch.rows(rows))
        for name, (by_logp, by_entropy) in nonzero.items():
            outputs, sent = [now.logp], [by_logp.to(now.logp.dtype)]
            if by_entropy.any():
                outputs.append(now.entropy)
                sent.append(by_entropy.to(now.entropy.dtype))
            optimizer.zero_grad()
            torch.autograd.backward(outputs, sent, retain_graph=True)
            totals[name] += _flat_gradient(optimizer)
    optimizer.zero_grad()
    return totals


def _flat_gradient(optimizer: Optimizer) -> torch.Tensor:
    found = optimizer.gradients()
    parts = [
        torch.zeros_like(p) if (g := found[n]) is None else g
        for n, p in optimizer.parameters.items()
    ]
    return torch.cat([part.flatten().float() for part in parts])


def _passes(batch: Batch, budget: int) -> Iterator[torch.Tensor]:
    """Yield, for each forward pass, the indices of its rows in the batch.

    Groups whose completions all have the same reward get forward passes of their own. In most
    algorithms, a group with a single reward value has no gradient, so its backward pass can be
    skipped.
    """
    equal = zero_variance(batch.rewards, batch.group)
    for chosen in (~equal, equal):
        rows = chosen.nonzero().squeeze(1)
        if len(rows):
            yield from (rows[part] for part in micro_batches(batch.rows(rows), budget))
