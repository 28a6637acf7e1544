"""The episode of a multi-turn rollout, which rewards may read in addition to its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Finish = Literal["stop", "length", "turn_limit", "tool_limit", "token_limit", "error"]
"""Why a rollout ended. "stop" means that the policy ended the completion. "length" means that a
completion reached its token limit. "turn_limit", "tool_limit" and "token_limit" are limits of the
whole episode. "error" means that the environment failed."""
TRUNCATED: frozenset[Finish] = frozenset({"length", "token_limit"})
"""Values of `Finish` for rollouts that were truncated at a token limit."""
Message = Mapping[str, Any]
"""A message with `role` and `content`; an assistant's message may have `tool_calls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A conversation between the policy and an environment.

    The rollout package creates the episode.
    """

    messages: tuple[Message, ...]
    """The whole conversation, from the prompt on."""
    turn_rewards: tuple[float | None, ...]
    """The reward of each turn of the policy."""
    outcome: Mapping[str, float] | None
    """The parts that the environment's `reward` method returned. The value is None if the
    environment has no `reward` method."""
    finish: Finish
    error: str = ""
    """The error in the environment, if there was one."""

    @property
    def tool_calls(self) -> list[Mapping[str, object]]:
        """The tool calls, in order."""
        return [call for message in self.messages for call in message.get("tool_calls", ())]

    @property
    def reply(self) -> tuple[Message, ...]:
        """All messages from the first turn of the policy to the end."""
        roles = [message["role"] for message in self.messages]
        return self.messages[roles.index("assistant") :] if "assistant" in roles else ()


class EpisodeText(str):
    """The text of the last turn of a multi-turn rollout, with its episode attached.

    A reward that reads text works unchanged, and `episode_of(text)` gives the whole episode.
    """

    episode: Episode

    @staticmethod
    def of(text: str, episode: Episode) -> EpisodeText:
        """Return a text with its episode attached."""
        whole = EpisodeText(text)
        whole.episode = episode
        return whole


def episode_of(text: str) -> Episode | None:
    """Return the episode of a rollout's text, or None if the rollout had no environment."""
    return getattr(text, "episode", None)
