"""What a loss does to each token: exact, because a loss is a function of log-probabilities.

    gradient[i,t] = d loss / d logp[i,t]

A descent step moves logp against it, so a negative one makes the token likelier. The parameters'
gradient is the sum over tokens of gradient[i,t] times that of logp[i,t]: these numbers are all that
an algorithm has a say in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from covey.models.logp import LogProbs
from covey.objective import Objective, PolicyLoss, policy_loss, with_marks, with_weight
from covey.types import Batch

CLIPPED = ("", "low", "high", "dual")
"""At which bound of its ratio a token was clipped, by number."""


class Effect(NamedTuple):
    """What an optimizer step takes from each token, [B, T] and 0 where not trained."""

    loss: torch.Tensor
    """The loss itself, a number."""
    gradient: torch.Tensor
    """d loss / d logp."""
    entropy_gradient: torch.Tensor
    """d loss / d entropy: 0 without an entropy bonus."""
    old_logp: torch.Tensor
    ratio: torch.Tensor
    """The one that the objective uses: of the token, or of its answer."""
    clipped: torch.Tensor
    """int64: see CLIPPED."""
    kl: torch.Tensor | None
    """The KL estimate in use, against the reference. None: there is none."""


def effect(objective: Objective, batch: Batch, now: LogProbs) -> Effect:
    """Differentiate the loss of a batch that has its weights by each token's logp and entropy."""
    logp = now.logp.detach().requires_grad_()
    entropy = now.entropy.detach().requires_grad_()
    with torch.enable_grad():
        output = policy_loss(objective, batch, logp, entropy)
    slopes = torch.autograd.grad(
        output.loss, (logp, entropy), allow_unused=True, materialize_grads=True
    )
    kl = output.penalty
    if kl is None and batch.token_penalty is not None:
        kl = batch.token_penalty / objective.beta
    return Effect(
        loss=output.loss.detach(),
        gradient=slopes[0],
        entropy_gradient=slopes[1],
        old_logp=logp.detach() - output.x,
        ratio=output.log_ratio.exp(),
        clipped=_clipped(output).where(batch.mask, 0),
        kl=kl,
    )


def whole_effect(objective: Objective, batch: Batch, now: LogProbs) -> Effect:
    """Return the effect of a batch with advantages, learned from in one optimizer step."""
    batch = with_marks(objective, with_weight(objective, batch), now.logp)
    return effect(objective, batch, now)


def _clipped(output: PolicyLoss) -> torch.Tensor:
    gain = output.gain
    at = gain.clipped_low.long() + 2 * gain.clipped_high.long()
    return at if gain.clipped_dual is None else at.masked_fill(gain.clipped_dual, 3)
