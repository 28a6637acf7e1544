"""Algorithms that learn from a teacher's log-probabilities on the student's own samples."""

from __future__ import annotations

from covey.objective import distill, ratio, surrogate, weights
from covey.objective.compose import takes
from covey.objective.loss import Objective


@takes("discount", "scale", "task", "beta", "kl", "ddof", "eps")
def opd(*, task: float = 0.0) -> Objective:
    """On-policy distillation, arXiv 2306.13649: reverse KL to a teacher, token by token.

        A_t  = task A_i - scale sum_{u>=t} discount^(u-t) (old_logp - teacher_logp)_u
        loss = - 1/T sum_i sum_t r A_t,  r = exp(logp - old_logp)

    With discount 0 each token answers for its own KL, prefixes held fixed; on policy the gradient
    is then that of k2 to the teacher in the loss. With discount 1 it is the exact gradient of the
    KL of whole completions, with more variance. `task` adds GRPO's advantage of the reward; 0
    needs no reward and no groups.

    The teacher must have the student's tokens. Its log-probabilities count as at least -20.

    The paper differentiates the KL over the vocabulary; here it is a reward of the sampled token,
    which a teacher behind a server can give too.

    Choice: the student's side is old_logp, a constant of the batch; other codes take the sampler's
    or the live policy's, which is the same on policy.
    """
    return Objective(
        advantage=distill.towards_teacher,
        ratio=ratio.token,
        surrogate=surrogate.unclipped,
        weights=weights.token_mean,
        reads=distill.READS | ({"groups"} if task else set()),
    )
