"""Computes a small optimizer step from given rewards, for the web page's step explorer.

The user chooses the rewards and the lengths of a group of completions. The module computes the step
with the same objective code as in training. If you run this module as a program, it reads one JSON
request per line and prints one JSON response per line.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from covey.errors import ConfigError, CoveyError
from covey.lab.explain.effect import CLIPPED, whole_effect
from covey.models.logp import LogProbs
from covey.objective import ALGORITHMS, build, find_algorithm, with_advantage
from covey.records.files import finite
from covey.types import Batch

MOST_COMPLETIONS, MOST_TOKENS = 16, 16
OPTIONS = ("clip_low", "clip_high", "beta")
"""The algorithm options that users can change with sliders in the step explorer."""
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
    """Return a batch with the given rewards and lengths, and with log-probs changed by `drift`."""
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
    """Return the defaults of the algorithm options that have a slider."""
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
