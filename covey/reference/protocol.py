"""What a reference policy is."""

from __future__ import annotations

from typing import Protocol

from covey.policy.policy import LogProbs
from covey.types import Batch


class Reference(Protocol):
    """Gives log-probabilities that are never differentiated. No reference at all is `None`."""

    def logp(self, batch: Batch) -> LogProbs:
        """Return log-probability and entropy of every trained token under the reference."""
