"""A recorded step, explained: what it learned from, answer by answer and token by token.

The step is learned once more from its recorded answers, in the same mini-batches, and every token
is looked at in the optimizer step that it was learned in; with several epochs, in the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from covey.analysis.explain.effect import CLIPPED
from covey.analysis.explain.recorded import Answer, Origin, Recorded, Trainee, check_learned
from covey.analysis.explain.relearn import Watched, relearn
from covey.objective.advantage import zero_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedToken:
    """One token of an answer. None: it was not trained, or there is no such thing."""

    id: int
    text: str
    sampler_logp: float | None = None
    """Log-probability under what it was drawn from, as recorded."""
    logp: float | None = None
    """Now: in the optimizer step that learned from it."""
    old_logp: float | None = None
    """When the step began."""
    ref_logp: float | None = None
    advantage: float | None = None
    ratio: float | None = None
    clipped: str | None = None
    """At which bound: low, high, dual, or none of them."""
    kl: float | None = None
    """Its estimate against the reference."""
    entropy: float | None = None
    weight: float | None = None
    """What its gain is multiplied by in the loss."""
    gradient: float | None = None
    """d loss / d logp. Negative: the step makes the token likelier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedAnswer:
    """An answer that the step learned from."""

    line: int
    """Its line in the file of rollouts, from 1."""
    group: int
    text: str
    reward: float | None
    success: bool | None
    finish: str
    advantage: float
    """Mean over its tokens."""
    recorded_advantage: float
    update: int
    """In which optimizer step of the step it was learned, from 1."""
    clipped: float
    """Share of its tokens."""
    gradient: float
    """Sum over tokens of |d loss / d logp|."""
    push: float
    """Minus the sum of d loss / d logp: above 0, the answer is made likelier."""
    tokens: tuple[ExplainedToken, ...]

    @property
    def length(self) -> int:
        """Its tokens, trained or not."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedGroup:
    """A prompt, and what its answers add to the step."""

    group: int
    question: str
    lines: tuple[int, ...]
    flat: bool
    """All rewards are equal: there is nothing to compare."""
    clipped: float
    """Share of its tokens."""
    share: float
    """Share of the step's sum of |d loss / d logp|."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a step learned, and with which weights that was computed."""

    step: int
    algorithm: str
    origin: Origin
    updates: int
    """Optimizer steps that it was learned in."""
    groups: tuple[ExplainedGroup, ...]
    answers: tuple[ExplainedAnswer, ...]
    left_out: int
    """Answers that the step did not learn from."""
    tokens: int
    """Trained tokens."""
    silent: int
    """Of these, without any gradient."""
    clipped: int
    raised: float
    """Share of the sum of |d loss / d logp| that makes tokens likelier."""
    half_from: int
    """The fewest answers that hold half of that sum."""
    metrics: dict[str, float]
    """Of learning the step again."""
    logged: dict[str, Any]
    """Of the run itself, where both have them."""


def explain_step(trainee: Trainee, recorded: Recorded) -> Explanation:
    """Learn a recorded step again, and say what each token did. The policy is changed by it."""
    check_learned(recorded)
    watched, metrics = relearn(trainee, recorded)
    answers = _answers(watched, recorded, trainee)
    groups = _groups(watched, recorded)
    size = watched.gradient.abs().sum(dim=1)
    mask, silent = watched.batch.mask, (watched.gradient == 0) & (watched.entropy_gradient == 0)
    return Explanation(
        step=recorded.step,
        algorithm=trainee.config.objective.name,
        origin=trainee.origin,
        updates=int(watched.number.max()) + 1,
        groups=groups,
        answers=answers,
        left_out=len(recorded.answers) - len(answers),
        tokens=int(mask.sum()),
        silent=int((silent & mask).sum()),
        clipped=int((watched.clipped != 0).sum()),
        raised=_share(-watched.gradient.clamp(max=0).sum(), size.sum()),
        half_from=_half_from(size),
        metrics=metrics,
        logged={
            name: recorded.metrics[name]
            for name in metrics
            if recorded.metrics.get(name) is not None
        },
    )


def _answers(watched: Watched, recorded: Recorded, trainee: Trainee) -> tuple[ExplainedAnswer, ...]:
    decode = trainee.policy.model.tokenizer.decode
    texts: dict[int, str] = {}
    for answer in recorded.learned:
        for token in answer.rollout.tokens:
            texts.setdefault(token, decode([token]))
    return tuple(
        _answer(watched, row, answer, texts) for row, answer in enumerate(recorded.learned)
    )


def _answer(watched: Watched, row: int, answer: Answer, texts: dict[int, str]) -> ExplainedAnswer:
    batch, rollout = watched.batch, answer.rollout
    assert batch.advantage is not None
    assert answer.advantage is not None
    mask, gradient = batch.mask[row], watched.gradient[row]
    count = max(1, int(mask.sum()))
    return ExplainedAnswer(
        line=answer.line,
        group=answer.group,
        text=rollout.text,
        reward=rollout.reward,
        success=rollout.success,
        finish=rollout.finish,
        advantage=float(batch.advantage[row].where(mask, 0.0).sum()) / count,
        recorded_advantage=answer.advantage,
        update=int(watched.number[row]) + 1,
        clipped=int((watched.clipped[row] != 0).sum()) / count,
        gradient=float(gradient.abs().sum()),
        push=-float(gradient.sum()),
        tokens=_tokens(watched, row, rollout.tokens, texts),
    )


def _tokens(
    watched: Watched, row: int, ids: Sequence[int], texts: dict[int, str]
) -> tuple[ExplainedToken, ...]:
    batch = watched.batch
    columns = {
        "sampler_logp": batch.sampler_logp,
        "logp": watched.logp,
        "old_logp": watched.old_logp,
        "ref_logp": batch.ref_logp,
        "advantage": batch.advantage,
        "ratio": watched.ratio,
        "kl": watched.kl,
        "entropy": watched.entropy,
        "weight": watched.weight,
        "gradient": watched.gradient,
    }
    lists = {name: values[row].tolist() for name, values in columns.items() if values is not None}
    clipped, mask = watched.clipped[row].tolist(), batch.mask[row].tolist()
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


def _groups(watched: Watched, recorded: Recorded) -> tuple[ExplainedGroup, ...]:
    batch, size = watched.batch, watched.gradient.abs()
    flat = zero_variance(batch.rewards, batch.group)
    found = []
    for number in range(len(recorded.groups)):
        rows = (batch.group == number).nonzero().squeeze(1).tolist()
        answers = [recorded.learned[row] for row in rows]
        tokens = max(1, int(batch.mask[rows].sum()))
        found.append(
            ExplainedGroup(
                group=answers[0].group,
                question=answers[0].question,
                lines=tuple(answer.line for answer in answers),
                flat=bool(flat[rows[0]]),
                clipped=int((watched.clipped[rows] != 0).sum()) / tokens,
                share=_share(size[rows].sum(), size.sum()),
            )
        )
    return tuple(found)


def _half_from(size: torch.Tensor) -> int:
    size = size.cpu()  # a GPU does not add it up in a fixed order
    reached = size.sort(descending=True).values.cumsum(0)
    return int((reached < size.sum() / 2).sum()) + 1 if size.any() else 0


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float(part) / float(whole) if float(whole) else 0.0
