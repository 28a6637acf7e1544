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
    """Number of rollouts."""
    tokens: int
    groups: int
    group_tokens: Mapping[int, int]
    """Number of trained tokens of each group, by group id. A group may be split over micro-batches
    and ranks."""
    rollout_tokens: Mapping[int, int] | None = None
    """Number of trained tokens of each rollout, by rollout id. The value is None if every rollout
    is one row."""

    @staticmethod
    def of(batch: Batch) -> Totals:
        """Count a batch.

        A rollout without trained tokens still counts in the number of rollouts.
        """
        rollout = None if batch.one_row_each else batch.rollout
        return Totals.counted(batch.group, batch.mask.sum(dim=1), rollout)

    @staticmethod
    def counted(
        group: torch.Tensor, tokens: torch.Tensor, rollout: torch.Tensor | None = None
    ) -> Totals:
        """Count the rollouts, trained tokens and groups of some rows.

        Without `rollout`, each row is a rollout.
        """
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
    """Return the sum of `values` [B] for each id in `ids` [B]."""
    found, place = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    sums = values.new_zeros(len(found)).index_add(0, place, values)
    return dict(zip(found.tolist(), sums.tolist(), strict=True))
