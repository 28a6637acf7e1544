"""Computes how many steps, tokens and evaluations a run can have."""

from __future__ import annotations

import math

from covey.config import Config
from covey.training.schedule import PATIENCE


def step_tokens(config: Config) -> int:
    """Return the largest number of tokens that a step can generate."""
    rollout, filters = config.rollout, config.filter
    rounds = filters.max_rounds if filters.dynamic_sampling else 1
    return rollout.prompts_per_step * rollout.group_size * rounds * rollout.max_tokens


def least_steps(config: Config) -> int:
    """Return the smallest possible number of steps of a run.

    With a token budget, a run has the fewest steps if all completions have the maximum length.
    """
    train = config.train
    if train.budget == "tokens":
        return math.ceil(train.amount / step_tokens(config))
    return math.ceil(train.amount / train.updates) if train.budget == "updates" else train.steps


def most_steps(config: Config) -> int:
    """Return the largest possible number of steps of a run.

    With a token budget, a run has the most steps if all completions have one token. If a number of
    optimizer steps ends the run, dynamic sampling can add training steps, because a training step
    whose groups are all dropped takes no optimizer step.
    """
    train, least = config.train, least_steps(config)
    if train.budget == "tokens":
        completions = config.rollout.prompts_per_step * config.rollout.group_size
        return math.ceil(train.amount / completions)
    gives_up = train.budget == "updates" and config.filter.dynamic_sampling
    return PATIENCE * least + 1 if gives_up else least


def most_tokens(config: Config) -> int:
    """Return the largest number of tokens in all rollouts; it may exceed a token budget."""
    whole, train = step_tokens(config), config.train
    return train.amount + whole - 1 if train.budget == "tokens" else most_steps(config) * whole


def most_evaluations(config: Config) -> int:
    """Return the largest number of evaluations: at the start, at every interval and at the end."""
    every, steps = config.evaluate.every, config.train.steps
    marks = math.ceil(steps / every) if every else 0
    return 1 + min(marks, most_steps(config)) if every else 0
