"""Algorithms that learn from a teacher, on the student's own samples: on-policy distillation.

    d_t = old_logp_t - teacher_logp_t
    A_t = task A_i - scale sum_{u >= t} discount^(u-t) d_u        over trained tokens

Only the KL estimator k1 can serve as a reward, because k3 would give the gradient of another
divergence. The advantage is not normalized, so it keeps the scale of the KL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from covey.objective import surrogate, weights
from covey.objective.advantage import group_standardized, returns
from covey.objective.loss import Need, Objective
from covey.objective.masked import difference
from covey.objective.options import algorithm
from covey.objective.penalty import PENALTIES, Kl
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


@algorithm(title="On-policy distillation", source="arXiv 2306.13649")
def opd(
    *, discount: float = 0.0, scale: float = 1.0, task: float = 0.0, beta: float = 0.0,
    kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """Reverse KL to a teacher, token by token.

        A_t  = task A_i - scale sum_{u>=t} discount^(u-t) (old_logp - teacher_logp)_u
        loss = - 1/T sum_i sum_t r A_t,  r = exp(logp - old_logp)

    With discount 0, a token's advantage depends only on the KL estimate at that token, not at later
    tokens. With discount 0 and on policy, the gradient equals the gradient of a k2 KL penalty in
    the loss, with the teacher as the reference. With discount 1, the gradient is an unbiased
    estimate of the gradient of the KL over whole completions, but the estimate has more variance.
    `task` is the weight of GRPO's advantage A_i. With `task = 0`, `opd` needs no rewards and no
    groups.

    The teacher must use the student's tokenizer. Teacher log-probabilities below -20 count as -20.

    The paper differentiates the KL over the whole vocabulary. In Covey, a KL estimate from the
    sampled token is part of the advantage. The teacher may run on a server that returns only the
    sampled token's log-probability.

    Choice: the student's log-probability is `old_logp`, which does not change between the optimizer
    steps of a batch. Other libraries take the student's log-probability from the engine or from the
    current policy. On policy, `old_logp` equals the log-probabilities of the engine and of the
    current policy.
    """
    return Objective(
        advantage=partial(
            towards_teacher, discount=discount, scale=scale, task=task, ddof=ddof, eps=eps
        ),
        surrogate=surrogate.unclipped,
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        reads=READS | ({"groups"} if task else set()),
    )


@algorithm(title="Self-Distillation Policy Optimization", source="arXiv 2601.20802")
def sdpo(
    *, discount: float = 0.0, scale: float = 1.0, task: float = 0.0, max_weight: float = 2.0,
    beta: float = 0.0, kl: Kl = "k3", ddof: int = 1, eps: float = 1e-6,
) -> Objective:  # fmt: skip
    """The policy is its own teacher.

        teacher_logp = log pi(y_t | prompt with privileged text, y_<t)
        A_t  = task A_i - scale sum_{u>=t} discount^(u-t) (old_logp - teacher_logp)_u
        loss = - 1/T sum_i sum_t sg(min(r, max_weight)) A_t logp,  r = exp(logp - old_logp)

    The teacher is the policy itself, with privileged text in its prompt. Privileged text is a
    correct completion from the same group, the reward function's feedback on the completion, or
    text from a column of the dataset. The teacher's log-probabilities show whether the policy would
    still choose each sampled token if the policy knew the privileged text. The setting
    `teacher.policy` chooses the teacher's weights.

    `task` is the weight of GRPO's advantage A_i. With `task = 0`, completions without privileged
    text are not trained on, and the token count T leaves out their tokens, as in the authors' code.
    With `task` above 0, completions without privileged text are trained with GRPO's advantage only.

    Departure: the authors differentiate a Jensen-Shannon divergence over the 100 likeliest tokens.
    In Covey's `sdpo`, a KL estimate from the sampled token is part of the advantage, as in `opd`
    and in TRL's SDPO.
    """
    return Objective(
        advantage=partial(
            towards_teacher, discount=discount, scale=scale, task=task, ddof=ddof, eps=eps
        ),
        surrogate=partial(surrogate.truncated_weight, max_weight=max_weight),
        weights=weights.token_mean,
        beta=beta,
        penalty=PENALTIES[kl],
        reads=READS | ({"privileged", "groups"} if task else {"privileged"}),
    )


FAMILY: Mapping[str, Callable[..., Objective]] = {
    "opd": opd,
    "sdpo": sdpo,
}
