"""Checks for log-probabilities that are not finite, before a step trains on them.

Ratios and penalties are clamped, and the gradient of a clamp at NaN is 0. A NaN from a reference
would take the penalty off its token without a trace in the gradient, and a NaN of the policy that
sampled would take off the token itself. So they are counted before anything is computed from them.
"""

from __future__ import annotations

import torch

from covey.errors import ModelError
from covey.types import Batch

CAUSES = {
    "ref_logp": (
        "the reference",
        "without them there is no KL penalty. Check the weights and the dtype of the reference "
        "(reference.kind), or set objective.beta = 0 to train without one",
    ),
    "teacher_logp": (
        "the teacher",
        "without them there is nothing to learn from. Check its weights (teacher.path) and "
        "model.dtype",
    ),
    "old_logp": (
        "the policy",
        "without them there are no ratios. Check its weights and model.dtype, and lower "
        "optimizer.learning_rate if it was sound at first; earlier checkpoints may be",
    ),
}
"""For each field: where it comes from, and what to do where it is not finite."""


def check_finite(batch: Batch, step: int) -> None:
    """Refuse a batch with log-probabilities of trained tokens that are NaN or infinite."""
    known = {name: getattr(batch, name) for name in CAUSES}
    known = {name: values for name, values in known.items() if values is not None}
    if not known:
        return
    wrong = [(~values.isfinite() & batch.mask).sum() for values in known.values()]
    *counts, tokens = torch.stack([*wrong, batch.mask.sum()]).tolist()  # one fetch from the device
    for name, count in zip(known, counts, strict=True):
        if count:
            whose, remedy = CAUSES[name]
            raise ModelError(
                f"step {step}: log-probabilities from {whose} are not finite for {count} of "
                f"{tokens} tokens; {remedy}. No optimizer step was taken"
            )
