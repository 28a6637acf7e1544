"""Per-row values of a batch on the CPU, for totals, mini-batches and the row filter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from covey.rng import mini_batch_order
from covey.types import Batch, Totals

if TYPE_CHECKING:
    from covey.training.step import StepSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Values [B] about the rows of a batch, on the CPU.

    Reading a value from a GPU waits for all work that is queued on the GPU. So the tensors of this
    class are copied to the CPU once, before the first optimizer step. The CPU uses these copies to
    choose the rows of each optimizer step.
    """

    group: torch.Tensor
    rollout: torch.Tensor
    tokens: torch.Tensor
    """Number of trained tokens in the row."""
    useful: torch.Tensor
    """Whether the row goes through the forward pass. Without the row filter, the value is true for
    all rows. With the row filter, it is true for a rollout's rows if any trained token of the
    rollout has a nonzero advantage."""
    one_row_each: bool
    """Whether every rollout is one row."""
    whole_groups: bool = False
    """Whether an optimizer step must contain all rollouts of a group, because the loss compares
    pairs of rollouts."""

    @staticmethod
    def of(batch: Batch, *, skip: bool, whole_groups: bool = False) -> RowFacts:
        """Read the values from a batch with advantages; `skip` turns the row filter on."""
        assert batch.advantage is not None, "with_advantage comes first"
        useful = ((batch.advantage != 0) & batch.mask).any(dim=1).long()
        whole = torch.stack([batch.group, batch.mask.sum(dim=1), useful]).cpu()
        rollout = batch.rollout if batch.host is None else batch.host.rollout
        number = torch.arange(len(batch)) if rollout is None else rollout
        # Passes include all rows of a rollout or none, because a sequence ratio spans all its rows.
        some = torch.isin(number, number[whole[2].bool()])
        return RowFacts(
            group=whole[0],
            rollout=number,
            tokens=whole[1],
            useful=some if skip else torch.ones(len(batch), dtype=torch.bool),
            one_row_each=batch.one_row_each,
            whole_groups=whole_groups,
        )

    def totals(self, index: torch.Tensor) -> Totals:
        """Return the totals of the given rows: numbers of groups, rollouts and tokens."""
        rollout = None if self.one_row_each else self.rollout[index]
        return Totals.counted(self.group[index], self.tokens[index], rollout)

    def pair_counts(self) -> dict[str, float]:
        """Return the number of groups with a preference pair, and of groups without one.

        The row filter must be on.
        """
        groups, paired = len(self.group.unique()), len(self.group[self.useful].unique())
        return {"pairs/count": paired, "pairs/ties": groups - paired}

    def in_passes(self, index: torch.Tensor) -> torch.Tensor:
        """Return the positions in `index` of all rows that the row filter keeps.

        The row filter does not change the gradient, because token weights are computed before rows
        are left out. At least one row remains, so that a gradient exists, even if it is zero.
        """
        useful = self.useful[index].clone()
        useful[0] |= ~useful.any()
        return useful.nonzero().squeeze(1)

    def mini_batches(self, settings: StepSettings, step: int) -> Iterator[torch.Tensor]:
        """Yield the row indices of each mini-batch, one mini-batch per optimizer step.

        A rollout is never split. A group is split only if mini-batches would otherwise have unequal
        sizes.
        """
        groups, place = self.group.unique(return_inverse=True)
        by_rollout = self.rollout.argsort(stable=True)
        for epoch in range(settings.epochs):
            order = mini_batch_order(seed=settings.seed, step=step, epoch=epoch, groups=len(groups))
            rank = torch.empty_like(groups)
            rank[torch.tensor(order)] = torch.arange(len(groups))
            rows = by_rollout[rank[place[by_rollout]].argsort(stable=True)]
            unit = self.group if self.whole_groups else self.rollout
            _, sizes = unit[rows].unique_consecutive(return_counts=True)
            counts = [int(part.sum()) for part in sizes.tensor_split(settings.mini_batches)]
            yield from (part for part in rows.split(counts) if len(part))
