"""The section [environment]: the environment of multi-turn rollouts, and its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from covey.config.section import Count, Named, Positive


class Environment(Named):
    """[environment]. Keys that are not fields of this class are options of the environment."""

    name: str = "none"
    """The environment that rollouts interact with: a name, MODULE:CLASS, or none."""
    max_turns: Positive = 8
    """Maximum number of the policy's turns in an episode."""
    max_calls: Count = 16
    """Maximum number of tool calls in an episode."""
    max_tokens: Positive = 2048
    """Maximum number of tokens in a conversation, including the prompt; at most the model's
    context."""
    call_format: Literal["auto", "hermes", "llama3", "tags"] = "auto"
    """Format of tool calls: <tool_call>JSON</tool_call> (hermes), a message that is JSON (llama3),
    or <tool>text</tool> (tags); auto: the chat template's format, else hermes."""
    parallel_calls: bool = True
    """Whether a turn may have several tool calls; if not, a turn ends after its first call."""
    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Number of worker processes for environments that are not quick; 0: one per core."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Time limit of one environment step, in seconds. A step that takes longer ends the rollout
    with an error."""
    gigabytes: Annotated[float, Field(ge=0.25, le=1e6)] = 8.0
    """Memory limit of a worker process."""
