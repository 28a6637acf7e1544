"""How long a run is, before it is one. What a budget of tokens buys depends on the answers."""

from __future__ import annotations

import math

from covey.config import Config
from covey.training.budget import PATIENCE


def step_tokens(config: Config) -> int:
    """Return how many tokens a step samples at most."""
    rollout, rounds = (
        config.rollout,
        config.filter.max_rounds if config.filter.dynamic_sampling else 1,
    )
    return rollout.prompts_per_step * rollout.group_size * rounds * rollout.max_tokens


def least_steps(config: Config) -> int:
    """Return how many steps a run takes at least: with a budget of tokens, if all are long."""
    train = config.train
    if train.budget == "tokens":
        return math.ceil(train.amount / step_tokens(config))
    return math.ceil(train.amount / train.updates) if train.budget == "updates" else train.steps


def most_steps(config: Config) -> int:
    """Return how many steps it takes at most: with a budget of tokens, if answers have one each.

    With one of updates, if dynamic sampling leaves nothing to learn from until a run gives up.
    """
    budget, least = config.train.budget, least_steps(config)
    if budget != "tokens":
        return (
            PATIENCE * least + 1
            if budget == "updates" and config.filter.dynamic_sampling
            else least
        )
    return math.ceil(
        config.train.amount / (config.rollout.prompts_per_step * config.rollout.group_size)
    )


def most_tokens(config: Config) -> int:
    """Return how many tokens are sampled for training at most; the last step may go over."""
    whole = step_tokens(config)
    train = config.train
    return train.amount + whole - 1 if train.budget == "tokens" else most_steps(config) * whole


def most_evaluations(config: Config) -> int:
    """Count the first, every so many steps' worth of the budget, and the last."""
    every, steps = config.evaluate.every, config.train.steps
    marks = math.ceil(steps / every) if every else 0
    return 1 + min(marks, most_steps(config)) if every else 0
