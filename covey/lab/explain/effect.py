"""Gradient of a loss with respect to each token's log-prob and entropy.

    gradient[i,t] = d loss / d logp[i,t]

An optimizer step makes a token with a negative gradient more likely. By the chain rule, the
gradient of the parameters is the sum of `d loss / d logp[i,t] * d logp[i,t] / d parameters` over
all tokens. An algorithm affects the parameters only through its token gradients.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from covey.errors import ConfigError, CoveyError
from covey.models.logp import LogProbs
from covey.objective import (
    ALGORITHMS,
    Objective,
    build,
    find_algorithm,
    policy_loss,
    with_advantage,
    with_marks,
    with_weight,
)
from covey.policy.policy import Policy
from covey.records.files import finite
from covey.types import Batch

CLIPPED = ("", "low", "high", "dual")
"""The names of clip bounds; the empty name means that a ratio is not clipped."""


class Effect(NamedTuple):
    """The loss of an optimizer step, and each token's gradient and ratio as tensors [B, T]."""

    loss: torch.Tensor
    gradient: torch.Tensor
    """The gradient of the loss with respect to each token's log-prob, d loss / d logp."""
    entropy_gradient: torch.Tensor
    """The gradient of the loss with respect to each token's entropy; 0 without an entropy bonus."""
    old_logp: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    """The clip bound of each ratio, as an int64 index into CLIPPED; 0 means that the ratio is not
    clipped."""
    kl: torch.Tensor | None
    """The objective's estimate of the KL divergence from the reference; None without a KL
    penalty."""


def effect(objective: Objective, batch: Batch, now: LogProbs) -> Effect:
    logp = now.logp.detach().requires_grad_()
    entropy = now.entropy.detach().requires_grad_()
    with torch.enable_grad():
        output = policy_loss(objective, batch, logp, entropy)
    slopes = torch.autograd.grad(
        output.loss, (logp, entropy), allow_unused=True, materialize_grads=True
    )
    gain = output.gain
    clipped = gain.clipped_low.long() + 2 * gain.clipped_high.long()
    if gain.clipped_dual is not None:
        clipped = clipped.masked_fill(gain.clipped_dual, 3)
    kl = output.penalty
    if kl is None and batch.token_penalty is not None:
        kl = batch.token_penalty / objective.beta
    return Effect(
        loss=output.loss.detach(),
        gradient=slopes[0],
        entropy_gradient=slopes[1],
        old_logp=logp.detach() - output.x,
        ratio=output.log_ratio.exp(),
        clipped=clipped.where(batch.mask, 0),
        kl=kl,
    )


def whole_effect(objective: Objective, batch: Batch, now: LogProbs) -> Effect:
    """Return token gradients and ratios for one optimizer step on the whole batch."""
    batch = with_marks(objective, with_weight(objective, batch), now.logp)
    return effect(objective, batch, now)


# The projection of each row's gradient on the gradient of its optimizer step.


def projections(
    policy: Policy,
    passes: Sequence[tuple[torch.Tensor, Batch, Effect]],
    until: float,
    say: Callable[[int], None],
) -> dict[int, float]:
    """Return g . G / |G|^2 for each row, where G is the accumulated gradient and g the row's part.

    `passes` has the batch indices, the micro-batch and the token gradients of each pass of the
    optimizer step. The projections of all rows add up to 1, or are all 0 if G is 0. Rows with the
    largest token gradients come first, and rows that are not reached until the time `until` (of
    `time.monotonic`) are missing. Each row takes a forward and a backward pass of its own; `say`
    is told the number of rows done. The accumulated gradient is left as it was.
    """
    optimizer = policy.optimizer
    whole = {n: None if g is None else g.clone() for n, g in optimizer.gradients().items()}
    square = _dot(whole, whole)
    found: dict[int, float] = {}
    todo: list[tuple[float, int, Batch, torch.Tensor, torch.Tensor]] = []
    for index, micro, effects in passes:
        sizes = (effects.gradient.abs() + effects.entropy_gradient.abs()).sum(dim=1)
        for place, (number, size) in enumerate(zip(index.tolist(), sizes.tolist(), strict=True)):
            if size and square:
                row = micro.rows(torch.tensor([place]))
                slopes = (effects.gradient[place], effects.entropy_gradient[place])
                todo.append((size, number, row, *slopes))
            else:
                found[number] = 0.0
    todo.sort(key=lambda one: -one[0])
    # Dropout of these passes must not change that of the next optimizer step.
    device = next(iter(optimizer.parameters.values())).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for done, (_, number, row, by_logp, by_entropy) in enumerate(todo):
            if time.monotonic() >= until:
                break
            optimizer.zero_grad()
            now, width = policy.plain_logp(row), row.tokens.shape[1]
            outputs, sent = [now.logp], [by_logp[None, :width].to(now.logp.dtype)]
            if by_entropy.any():
                outputs.append(now.entropy)
                sent.append(by_entropy[None, :width].to(now.entropy.dtype))
            torch.autograd.backward(outputs, sent)
            found[number] = _dot(optimizer.gradients(), whole) / square
            say(done + 1)
    optimizer.zero_grad()
    optimizer.set_gradients(whole)
    return found


def _dot(a: Mapping[str, torch.Tensor | None], b: Mapping[str, torch.Tensor | None]) -> float:
    pairs = [(x, y) for name, x in a.items() if x is not None and (y := b[name]) is not None]
    return math.fsum(float(torch.dot(x.flatten().float(), y.flatten().float())) for x, y in pairs)


# Computes a small optimizer step from given rewards, for the web page's step explorer.


MOST_COMPLETIONS, MOST_TOKENS = 16, 16
OPTIONS = ("clip_low", "clip_high", "beta")
LENGTH = 8
"""The constant completion length by which some algorithms divide the loss."""
PATTERN = (0.9, -0.4, 0.2, -1.0, 0.6, -0.1, 1.0, -0.7, 0.3, -0.6, 0.8, -0.2, 0.5, -0.9, 0.1, -0.3)
"""The log-prob of token t in completion i changes by `drift * PATTERN[(i + t) % 16]`."""


def small_step(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the advantage, ratio, clip bound and gradient of each token in an optimizer step.

    In `question`, `rewards` and `lengths` have one number for each completion. `drift` is the
    largest change of a token's log-prob since the token was sampled.
    """
    name = str(question.get("algorithm", "grpo"))
    rewards, lengths = _numbers(question, "rewards"), _numbers(question, "lengths")
    if len(rewards) != len(lengths) or not 1 < len(rewards) <= MOST_COMPLETIONS:
        raise ConfigError(
            f"give from 2 to {MOST_COMPLETIONS} rewards, and exactly one length for each reward"
        )
    defaults = option_defaults(name)
    options: dict[str, float] = {
        key: float(question[key]) for key in OPTIONS if key in question and key in defaults
    }
    if "length" in inspect.signature(find_algorithm(name)).parameters:
        options["length"] = LENGTH
    objective = build(name, **options)
    batch, now = small_batch(rewards, [int(n) for n in lengths], float(question.get("drift", 0)))
    batch = with_advantage(objective, batch)
    found = whole_effect(objective, batch, now)
    assert batch.advantage is not None
    rows = [
        {
            "reward": rewards[row],
            "advantage": _tokens(batch.advantage, batch, row),
            "ratio": _tokens(found.ratio, batch, row),
            "clipped": [CLIPPED[int(n)] for n in _tokens(found.clipped, batch, row)],
            "gradient": _tokens(found.gradient, batch, row),
        }
        for row in range(len(batch))
    ]
    return {"algorithm": name, "options": defaults, "loss": float(found.loss), "rows": rows}


def small_batch(
    rewards: Sequence[float], lengths: Sequence[int], drift: float
) -> tuple[Batch, LogProbs]:
    count, width = len(rewards), max(1, min(MOST_TOKENS, max(lengths)))
    size = torch.tensor([max(1, min(width, n)) for n in lengths])
    mask = torch.arange(width) < size[:, None]
    pattern = torch.tensor(
        [[PATTERN[(row + t) % len(PATTERN)] for t in range(width)] for row in range(count)]
    )
    old = -1.0 - 0.2 * pattern
    zeros = torch.zeros(count, width)
    good = torch.tensor([reward > 0.5 for reward in rewards])
    batch = Batch(
        prompt_tokens=torch.ones(count, 1, dtype=torch.int64),
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        tokens=torch.arange(count * width).reshape(count, width),
        lengths=size,
        mask=mask,
        sampler_logp=old.where(mask, zeros),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        success=good,
        group=torch.zeros(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
        parts=torch.tensor(list(zip(rewards, good.tolist(), strict=True))).double(),
        old_logp=old.where(mask, zeros),
        ref_logp=(old - 0.1).where(mask, zeros),
        values=(zeros + sum(rewards) / count).where(mask, zeros),  # the critic predicts the mean
        teacher_logp=(old + 0.1 * pattern).where(mask, zeros),
        entropy=(1.0 + 0.5 * pattern).where(mask, zeros),
    )
    logp = (old + drift * pattern).where(mask, zeros)
    assert batch.entropy is not None
    return batch, LogProbs(logp, batch.entropy)


def option_defaults(name: str) -> dict[str, float]:
    parameters = inspect.signature(find_algorithm(name)).parameters
    return {
        key: float(parameters[key].default)
        for key in OPTIONS
        if key in parameters and isinstance(parameters[key].default, int | float)
    }


def _tokens(values: torch.Tensor, batch: Batch, row: int) -> list[float]:
    return [float(v) for v in values[row][batch.mask[row]]]


def _numbers(question: Mapping[str, Any], name: str) -> list[float]:
    given = question.get(name, "")
    try:
        return [float(n) for n in (given.split(",") if isinstance(given, str) else given)]
    except ValueError:
        raise ConfigError(f"{name} must be a list of numbers, separated by commas") from None


def main() -> None:
    """Respond to requests from stdin until stdin is closed."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            answer = {**small_step(json.loads(line)), "algorithms": list(ALGORITHMS)}
        except (CoveyError, ValueError) as error:
            answer = {"error": str(error)}
        print(json.dumps(finite(answer)), flush=True)


if __name__ == "__main__":
    main()
