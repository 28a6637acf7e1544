"""Explains the gradient of each rollout and each token in a recorded training step.

Covey trains the policy on the recorded rollouts again, in the mini-batches of the original run. The
ratio, gradient and other values of a token come from the optimizer step that trains on the token.
If several epochs train on a token, the token's values come from the last epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from covey.lab.explain.effect import CLIPPED
from covey.lab.explain.recorded import (
    SECONDS,
    Origin,
    Recorded,
    RecordedRollout,
    Trainee,
    Watched,
    check_trained,
    relearn,
)
from covey.objective.advantage import zero_variance
from covey.records.records import episode_row, turn_lines
from covey.types import Batch

SEEN = ("logp", "old_logp", "ratio", "kl", "entropy", "weight", "gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedToken:
    """One token of a completion.

    A field is None if the step does not train on the token, or if the algorithm does not compute
    the field.
    """

    id: int
    text: str
    sampler_logp: float | None = None
    logp: float | None = None
    """The token's log-prob in the optimizer step that trains on the token."""
    old_logp: float | None = None
    ref_logp: float | None = None
    advantage: float | None = None
    ratio: float | None = None
    clipped: str | None = None
    """The clip bound that limits the token's ratio (low, high or dual); None if not clipped."""
    kl: float | None = None
    entropy: float | None = None
    weight: float | None = None
    gradient: float | None = None
    """The gradient d loss / d logp; an optimizer step makes a token with a negative gradient more
    likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRollout:
    """A rollout that the step trained on."""

    line: int
    """The rollout's line number in the step's rollout file, counted from 1."""
    group: int
    text: str
    reward: float | None
    success: bool | None
    finish: str
    advantage: float
    recorded_advantage: float
    update: int
    """The number of the optimizer step that trains on the rollout, counted from 1."""
    clipped: float
    gradient: float
    """The sum of `|d loss / d logp|` over the rollout's tokens."""
    projection: float | None
    """g . G / |G|^2, the rollout's part of the step's gradient: G is the gradient of the optimizer
    step that trains on the rollout, and g is the part of G that comes from the rollout. All parts
    add up to 1, with equal weight for each optimizer step. A part is negative if the other rollouts
    push the weights against the rollout. None if it was not computed."""
    push: float
    """The sum of `-d loss / d logp` over the rollout's tokens; if the sum is positive, an optimizer
    step makes the completion more likely."""
    tokens: tuple[ExplainedToken, ...]
    turns: tuple[tuple[str, bool], ...] = ()
    """The text of each turn, and whether the step trained on the turn; empty for a single-turn
    rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedGroup:
    """A prompt's group of rollouts, and how much the group contributes to the gradient."""

    group: int
    prompt: str
    lines: tuple[int, ...]
    zero_variance: bool
    clipped: float
    projection: float | None
    """The sum of the projections of the group's rollouts; None if one was not computed."""
    token_share: float
    """The group's share of the step's sum of `|d loss / d logp|`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of a training step, and the origin of the model weights used for it."""

    step: int
    algorithm: str
    origin: Origin
    updates: int
    groups: tuple[ExplainedGroup, ...]
    rollouts: tuple[ExplainedRollout, ...]
    filtered_out: int
    tokens: int
    """Number of trained tokens."""
    zero_gradient: int
    clipped: int
    token_share_raised: float
    """The fraction of the step's sum of `|d loss / d logp|` that comes from tokens that become more
    likely."""
    half_gradient_from: int | None
    """The smallest number of rollouts whose projections add up to half of the step's gradient; None
    if not all projections were computed."""
    half_token_share_from: int
    """The smallest number of rollouts whose tokens account for half of the step's sum of
    `|d loss / d logp|`."""
    metrics: dict[str, float]
    logged: dict[str, Any]
    """The values that the original run logged for the metrics in `metrics`."""


def explain_step(
    trainee: Trainee,
    recorded: Recorded,
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda text: None,
) -> Explanation:
    """Repeat a recorded training step, and explain the gradient of each rollout and token.

    The projections of rollouts on the gradient take at most `seconds`; `say` is told of progress.
    """
    check_trained(recorded)
    batch, watched, metrics = relearn(trainee, recorded, seconds, say)
    tokens = {token for one in recorded.learned for token in one.rollout.tokens}
    decode = trainee.run.policy.model.tokenizer.decode
    texts = {token: decode([token]) for token in tokens}
    rollouts = tuple(
        _rollout(batch, watched, row, one, texts) for row, one in enumerate(recorded.learned)
    )
    size = watched["gradient"].abs().sum(dim=1)
    mask, silent = batch.mask, (watched["gradient"] == 0) & (watched["entropy_gradient"] == 0)
    return Explanation(
        step=recorded.step,
        algorithm=trainee.run.config.objective.name,
        origin=trainee.origin,
        updates=int(watched["number"].max()) + 1,
        groups=_groups(batch, watched, recorded),
        rollouts=rollouts,
        filtered_out=len(recorded.rollouts) - len(rollouts),
        tokens=int(mask.sum()),
        zero_gradient=int((silent & mask).sum()),
        clipped=int((watched["clipped"] != 0).sum()),
        token_share_raised=_share(-watched["gradient"].clamp(max=0).sum(), size.sum()),
        half_gradient_from=(
            None if watched["projection"].isnan().any() else _half_from(watched["projection"], 0.5)
        ),
        half_token_share_from=_half_from(size, float(size.sum()) / 2),
        metrics=metrics,
        logged={
            name: recorded.metrics[name]
            for name in metrics
            if recorded.metrics.get(name) is not None
        },
    )


def _rollout(
    batch: Batch, watched: Watched, row: int, recorded: RecordedRollout, texts: dict[int, str]
) -> ExplainedRollout:
    rollout = recorded.rollout
    assert batch.advantage is not None
    assert recorded.advantage is not None
    mask, gradient = batch.mask[row], watched["gradient"][row]
    count = max(1, int(mask.sum()))
    return ExplainedRollout(
        line=recorded.line,
        group=recorded.group,
        text=rollout.text,
        reward=rollout.reward,
        success=rollout.success,
        finish=rollout.finish,
        advantage=float(batch.advantage[row].where(mask, 0.0).sum()) / count,
        recorded_advantage=recorded.advantage,
        update=int(watched["number"][row]) + 1,
        clipped=int((watched["clipped"][row] != 0).sum()) / count,
        gradient=float(gradient.abs().sum()),
        projection=_known(watched["projection"][row]),
        push=-float(gradient.sum()),
        tokens=_tokens(batch, watched, row, rollout.tokens, texts),
        turns=tuple(turn_lines(episode_row(rollout))),
    )


def _tokens(
    batch: Batch, watched: Watched, row: int, ids: Sequence[int], texts: dict[int, str]
) -> tuple[ExplainedToken, ...]:
    given = {n: getattr(batch, n) for n in ("sampler_logp", "ref_logp", "advantage")}
    seen = {n: watched[n] for n in SEEN if n in watched}
    lists = {n: v[row].tolist() for n, v in {**given, **seen}.items() if v is not None}
    clipped, mask = watched["clipped"][row].tolist(), batch.mask[row].tolist()
    return tuple(
        ExplainedToken(
            id=token,
            text=texts[token],
            clipped=CLIPPED[clipped[t]] or None,
            **{name: values[t] for name, values in lists.items()},
        )
        if mask[t]
        else ExplainedToken(id=token, text=texts[token])
        for t, token in enumerate(ids)
    )


def _groups(batch: Batch, watched: Watched, recorded: Recorded) -> tuple[ExplainedGroup, ...]:
    size = watched["gradient"].abs()
    flat = zero_variance(batch.rewards, batch.group)
    found = []
    for number in range(len(recorded.groups)):
        rows = (batch.group == number).nonzero().squeeze(1).tolist()
        rollouts = [recorded.learned[row] for row in rows]
        tokens = max(1, int(batch.mask[rows].sum()))
        found.append(
            ExplainedGroup(
                group=rollouts[0].group,
                prompt=rollouts[0].prompt,
                lines=tuple(one.line for one in rollouts),
                zero_variance=bool(flat[rows[0]]),
                clipped=int((watched["clipped"][rows] != 0).sum()) / tokens,
                projection=_known(watched["projection"][rows].sum()),
                token_share=_share(size[rows].sum(), size.sum()),
            )
        )
    return tuple(found)


def _half_from(parts: torch.Tensor, half: float) -> int:
    """Return the smallest number of parts that add up to `half`; 0 if all parts are 0."""
    parts = parts.cpu()  # on a GPU, sums have no fixed order
    reached = parts.sort(descending=True).values.cumsum(0)
    return int((reached < half).long().argmin()) + 1 if parts.any() else 0


def _known(value: torch.Tensor) -> float | None:
    return None if value.isnan() else float(value)


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float(part) / float(whole) if float(whole) else 0.0
