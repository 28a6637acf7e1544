"""The policy that is trained: a language model with its optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from covey.policy.head import token_logp
from covey.policy.layout import Side, lay_out
from covey.policy.model import LanguageModel
from covey.policy.optimizer import MasterAdamW, Stepped
from covey.types import Batch


class LogProbs(NamedTuple):
    """Per-token results [B, T], 0 where not trained."""

    logp: torch.Tensor
    entropy: torch.Tensor


def batch_logp(
    model: LanguageModel,
    batch: Batch,
    *,
    temperature: float = 1.0,
    logits_megabytes: float = 256.0,
    side: Side = "right",
    width: int = 0,
) -> LogProbs:
    """Run the model over a batch and return what it says of every trained token.

    The layout (side and width of the padding) changes nothing but rounding.
    """
    layout = lay_out(batch, side=side, width=width)
    hidden = model.backbone(
        input_ids=layout.input_ids,
        attention_mask=layout.attention_mask,
        position_ids=layout.position_ids,
        use_cache=False,
    ).last_hidden_state
    rows = torch.arange(len(batch), device=hidden.device)[:, None].expand_as(layout.predictor)
    chosen = hidden[rows[batch.mask], layout.predictor[batch.mask]]
    logp, entropy = token_logp(
        model.head,
        chosen,
        batch.tokens[batch.mask],
        temperature=temperature,
        megabytes=logits_megabytes,
    )
    blank = logp.new_zeros(batch.mask.shape)
    return LogProbs(
        logp=blank.masked_scatter(batch.mask, logp),
        entropy=blank.masked_scatter(batch.mask, entropy),
    )


@dataclass(slots=True, kw_only=True)
class Policy:
    """The weights, how log-probabilities are taken of them, and how they change."""

    model: LanguageModel
    optimizer: MasterAdamW
    temperature: float
    """The sampling temperature: training sees the distribution that was sampled."""
    logits_megabytes: float
    version: int = field(default=0)
    """Optimizer steps taken."""

    def logp(self, batch: Batch) -> LogProbs:
        """Return log-probability and entropy of every trained token, with gradient if enabled."""
        return batch_logp(
            self.model,
            batch,
            temperature=self.temperature,
            logits_megabytes=self.logits_megabytes,
        )

    def step(self, rate: float) -> Stepped:
        """Take an optimizer step on the gradients collected so far."""
        self.version += 1
        return self.optimizer.step(rate)
