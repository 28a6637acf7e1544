"""From the slopes of tokens to the gradient of the parameters."""

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
    """Return the gradient of all trained parameters, as one row [parameters] for each effect.

    One forward pass for all of them, and a backward pass for each. They stay in memory together.
    """
    # Gradients are taken where training takes them: on a GPU some never pass through autograd.
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
        felt = {name: s for name, s in slopes.items() if any(bool(part.any()) for part in s)}
        if not felt:
            continue
        now = policy.plain_logp(batch.rows(rows))
        for name, (by_logp, by_entropy) in felt.items():
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
    """Yield the rows of forward passes. Groups that teach nothing go by themselves.

    To most algorithms they have no gradient at all, and the backward pass can be left out.
    """
    flat = zero_variance(batch.rewards, batch.group)
    for chosen in (~flat, flat):
        rows = chosen.nonzero().squeeze(1)
        if len(rows):
            yield from (rows[part] for part in micro_batches(batch.rows(rows), budget))
