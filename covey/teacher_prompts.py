"""Teacher prompts: prompts with extra text that only the teacher sees (self-distillation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from covey.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPrompts:
    """The teacher's prompts for a batch, one prompt per row, as CPU tensors."""

    tokens: torch.Tensor
    """[B, Q] int64: the tokens of the teacher's prompts, left-aligned."""
    lengths: torch.Tensor
    """[B] int64: the lengths of the teacher's prompts. A length of 0 means that the row has no
    teacher prompt, so the teacher skips the row."""

    @staticmethod
    def of(prompts: Sequence[Sequence[int]]) -> TeacherPrompts | None:
        """Pad the teacher prompts of all rows. Return None if every prompt is empty."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        if not lengths.any():
            return None
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        return TeacherPrompts(tokens=tokens, lengths=lengths)

    def rows(self, index: torch.Tensor) -> TeacherPrompts:
        """Return the prompts of the given rows, padded only to the longest of these prompts."""
        lengths = self.lengths[index]
        return TeacherPrompts(tokens=self.tokens[index, : int(lengths.max())], lengths=lengths)


def taught_rows(batch: Batch) -> torch.Tensor:
    """Return a bool mask [B] on the CPU that marks the rows with a teacher prompt."""
    if batch.teacher_prompts is None:
        return torch.zeros(len(batch), dtype=torch.bool)
    return batch.teacher_prompts.lengths > 0


def as_teacher_reads(batch: Batch) -> Batch:
    """Return a copy of the batch, with the teacher's prompts in place of the rollouts' prompts.

    The completion tokens stay the same.
    """
    prompts = batch.teacher_prompts
    assert prompts is not None, "the rows have teacher prompts"
    device = batch.tokens.device
    host = batch.host and replace(
        batch.host, prompt_tokens=prompts.tokens, prompt_lengths=prompts.lengths
    )
    return replace(
        batch,
        prompt_tokens=prompts.tokens.to(device),
        prompt_lengths=prompts.lengths.to(device),
        host=host,
        teacher_prompts=None,
    )
