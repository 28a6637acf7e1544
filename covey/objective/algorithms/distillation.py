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

    With discount 0, each token is penalised only for its own KL, given its prefix. On policy, the
    gradient with discount 0 equals that of a k2 penalty to the teacher in the loss. With discount
    1, the gradient is the exact gradient of the KL of whole completions, and has more variance.
    GRPO's advantage is added with the weight `task`; with `task = 0`, `opd` needs no rewards and no
    groups.

    The teacher must use the student's tokenizer. Teacher log-probabilities below -20 count as -20.

    The paper differentiates the KL over the whole vocabulary. In Covey, the KL of the sampled token
    is a reward, so the teacher may also run on a server that returns only the sampled token's
    log-probability.

    Choice: the student's log-probability is old_logp, a constant of the batch. Other libraries use
    the log-probability of the sampler or of the current policy; on policy, all three
    log-probabilities are the same.
    """
    return Objective(
        advantage=distill.towards_teacher,
        ratio=ratio.token,
        surrogate=surrogate.unclipped,
        weights=weights.token_mean,
        reads=distill.READS | ({"groups"} if task else set()),
    )
