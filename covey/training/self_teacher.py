"""Self-distillation: the policy is its own teacher, with privileged text in the teacher's prompt.

Each rollout may have a teacher prompt (rollout/privileged.py). The teacher sees the teacher prompt
instead of the rollout's prompt, followed by the rollout's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from covey.accel.packing import to_device
from covey.objective import Objective
from covey.teacher_prompts import as_teacher_reads, taught_rows
from covey.types import Batch


def self_taught(batch: Batch, logp: Callable[[Batch], torch.Tensor]) -> Batch:
    """Fill in teacher_logp.

    In rows without a teacher prompt, teacher_logp is old_logp, so the teacher has no effect there.
    """
    assert batch.old_logp is not None, "a self-teacher is compared with old_logp"
    teacher = batch.old_logp.float().clone()
    index = taught_rows(batch).nonzero().squeeze(1)
    if len(index):
        found = logp(as_teacher_reads(batch.rows(index)))
        (rows,) = to_device([index], teacher.device)
        teacher[rows, : found.shape[1]] = found
    return replace(batch, teacher_logp=teacher)


def only_taught(objective: Objective, batch: Batch) -> Batch:
    """Mask rows that have no teacher prompt, if the objective learns only from the teacher."""
    if "privileged" not in objective.needs or "groups" in objective.needs:
        return batch
    return replace(batch, mask=batch.mask & taught_rows(batch).to(batch.mask.device)[:, None])


def taught_share(batch: Batch) -> float:
    """Return the fraction of rows that have a teacher prompt."""
    return float(taught_rows(batch).double().mean())
