"""The losses of all algorithms as functions of tensors, for your own training loop.

    out = covey.functional.loss(
        "dapo", logp=logp, old_logp=old_logp, mask=mask, rewards=rewards, group=group, clip_high=0.3
    )
    out.loss.backward()

In tensor shapes, B is the number of completions, and T is the padded number of tokens per
completion. The completions of a group need not be in adjacent rows. Values outside the mask,
including NaN, have no effect. Log-probabilities may have any float type; the loss is computed in
float32 or higher precision. Rewards are converted to float64.

Call `loss` with the complete batch of an optimizer step. To accumulate gradients over micro-batches
or ranks, use `covey.objective` instead of `covey.functional`. With `covey.objective`, compute
advantages and token weights for the complete batch, and add up the losses of the micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from covey.errors import ConfigError
from covey.objective import (
    Objective,
    build,
    policy_loss,
    with_advantage,
    with_marks,
    with_weight,
)
from covey.objective.advantage import group_sum
from covey.objective.algorithms.ppo import explained_variance
from covey.objective.algorithms.ppo import gae as gae
from covey.objective.diagnostics import (
    Meter,
    observe,
    observe_correction,
    observe_pairs,
    observe_sampler,
    observe_values,
    summary,
)
from covey.objective.loss import Need, value_loss
from covey.objective.options import option
from covey.types import Batch

ARGUMENTS: Mapping[Need, tuple[str, str]] = MappingProxyType(
    {
        "reference": ("ref_logp", "its beta is not 0"),
        "sampler_logp": ("sampler_logp", "it compares the policy with the sampler"),
        "sampler_as_old": ("sampler_logp", "its ratios are to the policy that sampled"),
        "old_entropy": ("entropy", "it reads entropies"),
        "entropy": ("entropy", "it reads entropies"),
        "tokens": ("tokens", "it compares tokens"),
        "parts": ("parts", "it compares the parts of the reward"),
        "teacher": ("teacher_logp", "it learns from a teacher"),
        "values": ("values", "its advantages use the values of a critic"),
        "turns": ("turn", "it compares turns"),
        "states": ("state", "it compares turns in equal states"),
    }
)
"""Maps each input of an objective to the argument of `loss` that provides the input, and to a text
that says why the objective needs the input."""


PER_ROW = ("rewards", "group", "success", "rollout")
"""Names of the arguments of `loss` that are tensors of shape [B]."""


class LossOutput(NamedTuple):
    """The result of `loss`: loss, advantages, token weights and metrics of a batch."""

    loss: torch.Tensor
    """The loss to minimize."""
    advantage: torch.Tensor
    """Advantages [B, T], without gradient."""
    weight: torch.Tensor
    """The weight [B, T] of each token in the loss."""
    metrics: Mapping[str, float]
    """Metric values by metric name; docs/metrics.md explains the names."""
    value_loss: torch.Tensor | None = None
    """Loss of the critic, for the critic's own optimizer. None without `new_values`."""


def loss(
    algorithm: str,
    *,
    logp: torch.Tensor,
    old_logp: torch.Tensor | None = None,
    mask: torch.Tensor,
    rewards: torch.Tensor,
    group: torch.Tensor,
    ref_logp: torch.Tensor | None = None,
    sampler_logp: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    success: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
    teacher_logp: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    new_values: torch.Tensor | None = None,
    rollout: torch.Tensor | None = None,
    turn: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    turn_reward: torch.Tensor | None = None,
    **options: Any,
) -> LossOutput:
    """Return the loss of an algorithm for one optimizer step, with advantages and metrics.

    Args:
        algorithm: a name of `covey algorithms`, "composed", or MODULE:FUNCTION (trusted).
        logp: [B, T] log-probabilities under the current policy, with gradient.
        old_logp: [B, T] log-probabilities when the batch was collected. If the algorithm's ratios
            are to the policy that sampled (scalerl, bapo, m2po, dppo), the loss reads sampler_logp
            instead, and old_logp only serves for metrics and may be left out.
        mask: [B, T] true, or not 0, for the tokens that are trained.
        rewards: [B]; NaN for a completion that could not be scored; statistics leave it out.
        group: [B] index of each completion's group; completions of a prompt share it.
        ref_logp: [B, T] under the reference; needed if the algorithm's beta is not 0.
        sampler_logp: [B, T] under the sampled distribution; needed for a sampler correction, and by
            algorithms whose ratios are to the policy that sampled.
        entropy: [B, T] of the sampling policy; for an entropy bonus, of the current policy.
        success: [B] whether each rollout succeeds, if the algorithm uses it; default: reward > 0.
        tokens: [B, T] token ids, if the algorithm uses them.
        parts: [B, K] parts of the reward, if the algorithm uses them; NaN like rewards.
        teacher_logp: [B, T] under the teacher, for distillation.
        values, new_values: [B, T] critic values at collection and now; the latter for `value_loss`.
        rollout: [B] index of each row's rollout; by default every row is its own rollout.
        turn, state, turn_reward: [B, T] for algorithms that compare turns: index of the token's
            turn, number of the environment's state before the turn, and reward of the turn
            (default 0).
        options: options of the algorithm; an unknown option raises an error.
    """
    objective = build(algorithm, **options)
    _check_shapes(mask, {"logp": logp, "new_values": new_values})
    if old_logp is None and "sampler_as_old" not in objective.needs:
        raise ConfigError(
            f"{algorithm} needs the argument old_logp, the log-probabilities when the batch was "
            "collected; for a batch of the current policy, pass logp.detach()"
        )
    batch = _batch(
        objective, mask=mask, rewards=rewards, group=group, old_logp=old_logp, ref_logp=ref_logp,
        sampler_logp=sampler_logp, entropy=entropy, success=success, tokens=tokens, parts=parts,
        teacher_logp=teacher_logp, values=values, rollout=rollout, turn=turn, state=state,
        turn_reward=turn_reward,
    )  # fmt: skip
    trainers = None if sampler_logp is None else old_logp
    return _loss(objective, batch, logp, entropy, new_values, trainers)


def _loss(
    objective: Objective,
    batch: Batch,
    logp: torch.Tensor,
    entropy: torch.Tensor | None,
    new_values: torch.Tensor | None,
    trainers: torch.Tensor | None,
) -> LossOutput:
    """Return the result of `loss`; `trainers` are log-probs to compare with the sampler's."""
    if new_values is not None and objective.value_loss is None:
        raise ConfigError("this algorithm has no critic, so leave out new_values")
    now = _at_least_float32(logp)
    batch = with_weight(objective, with_advantage(objective, batch))
    batch = with_marks(objective, batch, now.detach())
    output = policy_loss(objective, batch, now, entropy)
    assert batch.advantage is not None
    assert batch.weight is not None
    meter = Meter()
    observe(meter, objective, batch, output, entropy)
    observe_correction(meter, batch)
    if trainers is not None:
        observe_sampler(meter, batch, _at_least_float32(trainers))
    observe_pairs(meter, objective, batch)
    of_critic = None
    if new_values is not None:
        found = value_loss(objective, batch, _at_least_float32(new_values))
        observe_values(meter, batch, found)
        of_critic = found.loss
    metrics = summary(meter.measured())
    if batch.targets is not None and batch.values is not None:
        explained = explained_variance(batch.values, batch.targets, batch.mask)
        if math.isfinite(explained):  # it is not finite if all targets are equal
            metrics["critic/explained_variance"] = explained
    return LossOutput(output.loss, batch.advantage, batch.weight, metrics, of_critic)


def advantages(
    algorithm: str,
    *,
    mask: torch.Tensor,
    rewards: torch.Tensor,
    group: torch.Tensor,
    old_logp: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    success: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
    teacher_logp: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    rollout: torch.Tensor | None = None,
    turn: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    turn_reward: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return an algorithm's advantages [B, T] in float64; see `loss` for the arguments.

    With a KL penalty in the reward, an algorithm whose ratios are to the policy that sampled
    (scalerl, bapo, m2po, dppo) reads sampler_logp in place of old_logp: pass it as old_logp.
    """
    objective = build(algorithm, **options)
    in_reward = objective.kl_in_reward
    if in_reward and old_logp is None:
        raise ConfigError(
            f"{algorithm} needs old_logp, because it subtracts the KL penalty from the reward"
        )
    if "teacher" in objective.reads and old_logp is None:
        raise ConfigError(
            f"{algorithm} needs old_logp, because it compares old_logp with the log-probs of the "
            "teacher"
        )
    # Advantages do not need the inputs that only the loss needs.
    only = replace(
        objective, beta=objective.beta if in_reward else 0.0, correction=None, veto=0.0,
        off_policy_limit=0.0, entropy_bonus=0.0, reads=objective.reads - {"sampler_as_old"},
    )  # fmt: skip
    batch = _batch(
        only,
        mask=mask, rewards=rewards, group=group, old_logp=old_logp, ref_logp=ref_logp,
        sampler_logp=None, entropy=entropy, success=success, tokens=tokens, parts=parts,
        teacher_logp=teacher_logp, values=values, rollout=rollout, turn=turn, state=state,
        turn_reward=turn_reward,
    )  # fmt: skip
    result = with_advantage(objective, batch).advantage
    assert result is not None
    return result


def _batch(
    objective: Objective,
    *,
    mask: torch.Tensor,
    rewards: torch.Tensor,
    group: torch.Tensor,
    **optional: torch.Tensor | None,
) -> Batch:
    """Check the shapes of the tensors, and return a Batch with empty prompts."""
    _check_shapes(mask, {"rewards": rewards, "group": group, **optional})
    for need, (name, why) in ARGUMENTS.items():
        if need in objective.needs and optional[name] is None:
            raise ConfigError(f"this objective needs the argument {name}, because {why}")
    if "groups" in objective.needs:
        _check_groups(objective, group)
    mask, rewards = mask.bool(), rewards.detach().double()
    rows, width = mask.shape
    tokens, success, parts = (optional[name] for name in ("tokens", "success", "parts"))
    entropy, turn_reward = optional["entropy"], optional["turn_reward"]
    constants: dict[str, Any] = {
        name: None if (value := optional[name]) is None else _at_least_float32(value.detach())
        for name in ("old_logp", "ref_logp", "teacher_logp", "values", "sampler_logp")
    }
    for name in ("turn", "state"):
        value = optional[name]
        constants[name] = None if value is None else value.long().where(mask, 0)
    sampler_logp = constants.pop("sampler_logp")
    if "sampler_as_old" in objective.needs:
        constants["old_logp"] = sampler_logp
    if sampler_logp is None:
        zeros = mask.new_zeros(mask.shape, dtype=torch.float32)
        sampler_logp = zeros if constants["old_logp"] is None else constants["old_logp"]
    return Batch(
        prompt_tokens=mask.new_zeros((rows, 0), dtype=torch.long),
        prompt_lengths=mask.new_zeros(rows, dtype=torch.long),
        tokens=mask.new_zeros(mask.shape, dtype=torch.long) if tokens is None else tokens,
        lengths=mask.new_full((rows,), width, dtype=torch.long),
        mask=mask,
        sampler_logp=sampler_logp,
        rewards=rewards,
        success=rewards > 0 if success is None else success.bool(),
        group=group,
        truncated=mask.new_zeros(rows),
        parts=None if parts is None else parts.detach().double(),
        rollout=optional["rollout"],
        turn_reward=None if turn_reward is None else turn_reward.detach().double(),
        entropy=None if entropy is None else entropy.detach(),
        **constants,
    )


def _check_shapes(mask: torch.Tensor, tensors: Mapping[str, torch.Tensor | None]) -> None:
    if mask.ndim != 2:
        raise ConfigError(f"the tensor mask must have the shape [B, T], not {list(mask.shape)}")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        expected = mask.shape[:1] if name in PER_ROW else mask.shape
        if name == "parts" and tensor.ndim == 2:
            expected = torch.Size((len(mask), tensor.shape[1]))
        if tensor.shape != expected:
            raise ConfigError(
                f"the tensor {name} must have the shape {list(expected)}, not {list(tensor.shape)}"
            )


def _check_groups(objective: Objective, group: torch.Tensor) -> None:
    sizes = group_sum(torch.ones_like(group, dtype=torch.long), group)
    if (sizes == 1).any():
        number = int(group[sizes == 1][0])
        raise ConfigError(
            f"group {number} has only one completion; a group needs at least two completions"
        )
    k = option(objective.advantage, "k")
    if k is not None and (sizes < k).any():
        least = int(sizes.min())
        raise ConfigError(
            f"k = {k} must be at most {least}, the number of completions in the smallest group"
        )


def _at_least_float32(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
