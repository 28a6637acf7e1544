"""Totals: the denominators of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from covey.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The denominators of one optimizer step, over all its micro-batches and ranks."""

    sequences: int
    """Rollouts."""
    tokens: int
    groups: int
    group_tokens: Mapping[int, int]
    """Tokens of each group, by its id: a group may lie in several micro-batches or ranks."""
    rollout_tokens: Mapping[int, int] | None = None
    """Tokens of each rollout, by its id. None: every rollout is one row, which knows its own."""

    @staticmethod
    def of(batch: Batch) -> Totals:
        """Count a batch. A rollout without trained tokens counts: it shrinks the step."""
        rollout = None if batch.one_row_each else batch.rollout
        return Totals.counted(batch.group, batch.mask.sum(dim=1), rollout)

    @staticmethod
    def counted(
        group: torch.Tensor, tokens: torch.Tensor, rollout: torch.Tensor | None = None
    ) -> Totals:
        """Count rows [B] by their trained tokens, their group and, if not one each, rollout."""
        groups = _sums(group, tokens)
        rollouts = None if rollout is None else _sums(rollout, tokens)
        return Totals(
            sequences=len(group) if rollouts is None else len(rollouts),
            tokens=int(tokens.sum()),
            groups=len(groups),
            group_tokens=groups,
            rollout_tokens=rollouts,
        )


def _sums(ids: torch.Tensor, values: torch.Tensor) -> dict[int, int]:
    """Return the sum of the values [B] of each id [B]."""
    found, place = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    sums = values.new_zeros(len(found)).index_add(0, place, values)
    return dict(zip(found.tolist(), sums.tolist(), strict=True))
