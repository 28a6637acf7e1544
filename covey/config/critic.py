"""The [critic] and [preferences] sections: what PPO and DPO need beside groups."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from covey.config.section import Count, Section


class Critic(Section):
    """[critic]. For an objective with a critic: a model that is trained to expect the reward."""

    path: str = ""
    """The model it begins from, as in model.path, with the policy's tokenizer; empty: the policy's
    own first weights."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Of its own AdamW, constant; the rest is as in [optimizer]."""
    warmup_steps: Count = 0
    """Training steps at the beginning that train the critic alone and leave the policy as it is."""
    initial_value: float = 0.0
    """What it expects at first, everywhere: best the mean reward before training."""


class Preferences(Section):
    """[preferences]. For an objective that compares pairs."""

    file: str = ""
    """JSON Lines of prompt, chosen and rejected: train on these pairs instead of sampled groups."""
    max_tokens: Count = 0
    """Leave out pairs with a longer completion; 0: longer than rollout.max_tokens."""
