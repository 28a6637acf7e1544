"""CPU copies of the batch fields that determine the layout of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from covey.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """A CPU copy of the batch fields that determine the layout, with the same names and shapes.

    The CPU copy avoids reading lengths from the GPU; such a read would wait for all queued GPU
    work.
    """

    prompt_tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor
    rollout: torch.Tensor | None = None

    @staticmethod
    def of(batch: Batch) -> HostRows:
        """Copy the layout fields of a batch to the CPU."""
        fields = ((name, getattr(batch, name)) for name in HostRows.__slots__)
        return HostRows(**{name: value.cpu() for name, value in fields if value is not None})

    def rows(self, index: torch.Tensor, width: int, prompt_width: int) -> HostRows:
        """Return some rows, cut to `width` completion tokens and `prompt_width` prompt tokens."""
        return HostRows(
            prompt_tokens=self.prompt_tokens[index, :prompt_width],
            prompt_lengths=self.prompt_lengths[index],
            tokens=self.tokens[index, :width],
            lengths=self.lengths[index],
            mask=self.mask[index, :width],
            rollout=None if self.rollout is None else self.rollout[index],
        )
