"""Checks for log-probabilities that are not finite, before a step trains on them.

Probability ratios and penalties are clamped, and the gradient of a clamp is 0 for NaN. A NaN in
ref_logp would silently remove the KL penalty of its token. A NaN in the log-probs of the sampling
policy would remove its token from the loss. So every batch is checked before a step trains on it.
"""

from __future__ import annotations

import torch

from covey.errors import ModelError
from covey.types import Batch

CAUSES = {
    "ref_logp": (
        "the reference",
        "check the weights and the dtype of the reference (reference.kind), or set objective.beta "
        "= 0 to train without a reference",
    ),
    "teacher_logp": (
        "the teacher",
        "check the weights of the teacher (teacher.path) and model.dtype",
    ),
    "old_logp": (
        "the policy",
        "check the weights and model.dtype; if earlier steps were finite, lower "
        "optimizer.learning_rate and resume from an earlier checkpoint",
    ),
}
"""For each field of a batch: which component computes it, and advice to the user if a value is not
finite."""


def check_finite(batch: Batch, step: int) -> None:
    """Raise ModelError if a log-prob of a trained token is NaN or infinite."""
    known = {name: getattr(batch, name) for name in CAUSES}
    known = {name: values for name, values in known.items() if values is not None}
    if not known:
        return
    wrong = [(~values.isfinite() & batch.mask).sum() for values in known.values()]
    *counts, tokens = torch.stack([*wrong, batch.mask.sum()]).tolist()  # one read from the device
    for name, count in zip(known, counts, strict=True):
        if count:
            source, remedy = CAUSES[name]
            raise ModelError(
                f"step {step} was not trained, because the log-probs of {source} are not finite "
                f"for {count} of {tokens} tokens; {remedy}"
            )
