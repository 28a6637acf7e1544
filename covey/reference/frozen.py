"""The model that training started from, kept as it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from covey.policy.model import LanguageModel
from covey.policy.policy import LogProbs, batch_logp
from covey.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReference:
    """A second copy of the starting weights."""

    model: LanguageModel
    temperature: float
    logits_megabytes: float

    def __post_init__(self) -> None:
        self.model.model.requires_grad_(False).eval()

    @torch.no_grad()
    def logp(self, batch: Batch) -> LogProbs:
        """Return log-probability and entropy of every trained token under the starting weights."""
        return batch_logp(
            self.model,
            batch,
            temperature=self.temperature,
            logits_megabytes=self.logits_megabytes,
        )
