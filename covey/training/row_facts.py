"""What has to be known of a batch's rows before its optimizer steps: asked once, for all of them.

Whatever is asked of a device waits until it has done all that it was told to do. So this is fetched
before the first optimizer step, in one piece, and which rows a step takes is then found on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from covey.rng import mini_batch_order
from covey.types import Batch, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """All are [B] int64, on the CPU."""

    group: torch.Tensor
    tokens: torch.Tensor
    """How many are trained."""
    useful: torch.Tensor
    """1 if some trained token has an advantage, else 0."""

    @staticmethod
    def of(batch: Batch) -> RowFacts:
        """Fetch them from a batch with advantages."""
        assert batch.advantage is not None, "with_advantage comes first"
        useful = ((batch.advantage != 0) & batch.mask).any(dim=1).long()
        whole = torch.stack([batch.group, batch.mask.sum(dim=1), useful]).cpu()
        return RowFacts(group=whole[0], tokens=whole[1], useful=whole[2])

    def totals(self, index: torch.Tensor) -> Totals:
        """Count the given rows."""
        return Totals.counted(self.group[index], self.tokens[index])

    def any_useful(self, index: torch.Tensor) -> bool:
        """Tell whether some of the given rows has an advantage."""
        return bool(self.useful[index].any())

    def with_gradient(self, index: torch.Tensor) -> torch.Tensor:
        """Return which of the given rows have some advantage.

        The weights of the others are fixed by then, so nothing changes without them.
        """
        useful = self.useful[index].bool()
        # One row stays in any case, so that there is a gradient, if only of zeros.
        useful[0] |= ~useful.any()
        return useful.nonzero().squeeze(1)


def mini_batches(
    group: torch.Tensor, *, count: int, epochs: int, seed: int, step: int
) -> Iterator[torch.Tensor]:
    """Yield the rows of each optimizer step, `count` to an epoch; `group` [B] is on the CPU.

    Groups stay together as far as the sizes allow.
    """
    groups, place = group.unique(return_inverse=True)
    for epoch in range(epochs):
        order = mini_batch_order(seed=seed, step=step, epoch=epoch, groups=len(groups))
        rank = torch.empty_like(groups)
        rank[torch.tensor(order)] = torch.arange(len(groups))
        rows = rank[place].argsort(stable=True)
        yield from (part for part in rows.tensor_split(count) if len(part))
