"""The [critic] section for PPO, and the [preferences] section for DPO and IPO."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from covey.config.section import Count, Section


class Critic(Section):
    """[critic]: the model that is trained to predict the reward, for objectives with a critic."""

    path: str = ""
    """The critic's initial model, as in model.path, with the policy's tokenizer; empty: the
    policy's initial weights."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Constant learning rate of the critic's AdamW. The other options of AdamW come from
    [optimizer]."""
    warmup_steps: Count = 0
    """Number of training steps at the start that train only the critic, not the policy."""
    initial_value: float = 0.0
    """The critic's initial prediction for every token, such as the initial mean reward."""


class Preferences(Section):
    """[preferences]: settings of objectives that compare pairs of completions."""

    file: str = ""
    """JSON Lines file with prompt, chosen and rejected, to train on instead of sampled groups."""
    max_tokens: Count = 0
    """Leave out pairs in which a completion has more tokens than this; 0: the limit is
    rollout.max_tokens."""
