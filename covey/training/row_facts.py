"""What optimizer steps know of the rows of a batch: totals, mini-batches, and the row filter."""

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
    """What optimizer steps must know of the rows of a batch, each [B] on the CPU.

    Reading from a device waits for all the work that is queued there. So this is fetched once,
    before the first optimizer step, and which rows a step takes is then found on the CPU.
    """

    group: torch.Tensor
    rollout: torch.Tensor
    tokens: torch.Tensor
    """How many are trained."""
    useful: torch.Tensor
    """bool: takes part in forward passes. Without the row filter, all do; with it, rows in which
    some trained token has an advantage."""
    one_row_each: bool
    """Whether every rollout is one row."""
    whole_groups: bool = False
    """Whether an optimizer step takes all rollouts of a group, which are compared in pairs."""

    @staticmethod
    def of(batch: Batch, *, skip: bool, whole_groups: bool = False) -> RowFacts:
        """Fetch them from a batch with advantages; `skip` turns the row filter on."""
        assert batch.advantage is not None, "with_advantage comes first"
        useful = ((batch.advantage != 0) & batch.mask).any(dim=1).long()
        whole = torch.stack([batch.group, batch.mask.sum(dim=1), useful]).cpu()
        rollout = batch.rollout if batch.host is None else batch.host.rollout
        number = torch.arange(len(batch)) if rollout is None else rollout
        # A rollout is in passes with all of its rows, or not at all: its ratio may be of all.
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
        """Count the given rows."""
        rollout = None if self.one_row_each else self.rollout[index]
        return Totals.counted(self.group[index], self.tokens[index], rollout)

    def pair_counts(self) -> dict[str, float]:
        """Return how many groups have a pair, and how many have none; with the row filter on."""
        groups, paired = len(self.group.unique()), len(self.group[self.useful].unique())
        return {"pairs/count": paired, "pairs/ties": groups - paired}

    def in_passes(self, index: torch.Tensor) -> torch.Tensor:
        """Return which of the given rows take part in forward passes.

        Weights are fixed by then, so the gradient is the same without the others. One row stays in
        any case, so that there is a gradient, if only of zeros.
        """
        useful = self.useful[index].clone()
        useful[0] |= ~useful.any()
        return useful.nonzero().squeeze(1)

    def mini_batches(self, settings: StepSettings, step: int) -> Iterator[torch.Tensor]:
        """Yield the rows of each optimizer step.

        The rows of a rollout stay together, and groups as far as the sizes allow.
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
