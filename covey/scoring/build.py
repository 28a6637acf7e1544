"""The scorers for training and for evaluations, and the scores of simple baselines."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TypedDict

from covey.cluster.actors import ray_scorer
from covey.config import Config
from covey.config.resolve import evaluation_config, reward_of
from covey.environments.registry import NONE
from covey.rewards import Reward
from covey.rewards.identity import identity
from covey.rewards.user import FUNCTIONS, own_name, with_none
from covey.scoring import Scorer, check_timeout, make_scorer
from covey.scoring.baselines import Baselines, baselines, constant_by_targets, may_probe
from covey.types import Prompt

MOST_PROBED, FEW_PROBED = 512, 16
"""Baselines are scored on at most MOST_PROBED held-out prompts if the reward is quick to compute,
and otherwise on at most FEW_PROBED prompts."""


class Scorers(TypedDict):
    """The scorers of a run and the scores of simple baselines, as fields of `Run`."""

    scorer: Scorer
    eval_scorer: Scorer
    baselines: Baselines


def scorers_of(
    config: Config, held_out: Sequence[Prompt], ranks: int, reward: Reward | None = None
) -> Scorers:
    """Build one scorer for training and one for evaluations; `evaluate.reward` makes them
    different."""
    scorer, apart = scorer_of(config, reward, ranks), evaluation_config(config)
    eval_scorer = scorer if apart is config else scorer_of(apart, ranks=ranks)
    known = baselines_of(config, eval_scorer, held_out, reward)
    return {"scorer": scorer, "eval_scorer": eval_scorer, "baselines": known}


def scorer_of(config: Config, reward: Reward | None = None, ranks: int = 1) -> Scorer:
    """Build the scorer, and start this rank's worker processes."""
    reward = reward_of(config) if reward is None else reward
    reward = with_none(reward, config.scoring.none_rewards)
    name = own_name(reward) if config.reward.name == FUNCTIONS else config.reward.name
    if config.cluster.address and config.cluster.scoring_actors and not reward.quick:
        check_timeout(name, reward, config.scoring.timeout)
        return ray_scorer(config, reward, identity(name, reward))
    return make_scorer(
        name,
        reward,
        workers=config.scoring.workers or max(1, (os.cpu_count() or 1) // ranks),
        timeout=config.scoring.timeout,
        gigabytes=config.scoring.gigabytes,
    )


def baselines_of(
    config: Config, scorer: Scorer, held_out: Sequence[Prompt], passed: Reward | None = None
) -> Baselines:
    """Return the scores of simple baselines on the held-out prompts.

    If the run has an environment, or if the reward calls an LLM or user code, the only baseline is
    a constant answer, the most frequent target. The success rate of a constant answer follows from
    the targets, without scoring. `scorer` scores the completions of evaluations, and `passed` is
    the reward object that was passed from Python, if any.
    """
    if not held_out:
        return Baselines()
    own = passed if not config.evaluate.reward.name else None
    reward = reward_of(evaluation_config(config)) if own is None else own
    if config.environment.name != NONE or not may_probe(reward):
        return Baselines(constant=constant_by_targets(held_out))
    stride = math.ceil(len(held_out) / MOST_PROBED)
    return baselines(held_out[::stride], scorer, None if reward.quick else FEW_PROBED)
