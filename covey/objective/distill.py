"""Advantages from a teacher, on the student's own samples: on-policy distillation.

    d_t = old_logp_t - teacher_logp_t
    A_t = task A_i - scale sum_{u >= t} discount^(u-t) d_u        over trained tokens

Only the KL estimator k1 can serve as a reward, because k3 would give the gradient of another
divergence. The advantage is not normalized, so it keeps the scale of the KL.
"""

from __future__ import annotations

import torch

from covey.objective.advantage import group_standardized, returns
from covey.objective.loss import Need
from covey.objective.masked import difference
from covey.types import Batch

READS: frozenset[Need] = frozenset({"old_logp", "teacher"})
LEAST_LOGP = -20.0
"""Lower bound to which smaller teacher log-probabilities are clamped."""


def towards_teacher(
    batch: Batch,
    *,
    discount: float = 0.0,
    scale: float = 1.0,
    task: float = 0.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Advantages from the reverse KL to the teacher, plus `task` times GRPO's advantage."""
    advantage = scale * returns(teacher_gap(batch), batch.mask, gamma=discount)
    if task:
        advantage = advantage + task * group_standardized(batch, ddof=ddof, eps=eps)
    return advantage


def teacher_gap(batch: Batch) -> torch.Tensor:
    """Return max(teacher_logp, floor) - old_logp [B, T], and 0 for tokens that are not trained."""
    assert batch.teacher_logp is not None, "distillation needs a teacher"
    assert batch.old_logp is not None, "distillation needs old_logp"
    teacher = batch.teacher_logp.double().clamp(min=LEAST_LOGP)
    return difference(teacher, batch.old_logp.double(), batch.mask)
