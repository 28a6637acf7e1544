"""The section [environment]: what rollouts interact with over turns, and its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from covey.config.section import Count, Named, Positive


class Environment(Named):
    """[environment]. Keys that are not listed here are options of the environment itself."""

    name: str = "none"
    """What rollouts interact with over turns: an environment, MODULE:CLASS, or none."""
    max_turns: Positive = 8
    """Turns of the policy in an episode."""
    max_calls: Count = 16
    """Calls of tools in an episode."""
    max_tokens: Positive = 2048
    """Tokens of a whole conversation, prompt and turns; at most the model's context."""
    call_format: Literal["auto", "hermes", "llama3", "tags"] = "auto"
    """How calls are written: <tool_call>JSON</tool_call>, a message that is JSON, or
    <tool>text</tool>; auto: as the chat template says, else hermes."""
    parallel_calls: bool = True
    """Whether a turn may have several calls; otherwise it stops at the end of the first."""
    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Processes of environments that are not quick; 0: one per core."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for one step of an environment. After that its rollout ends with an error."""
    gigabytes: Annotated[float, Field(ge=0.25, le=1e6)] = 8.0
    """Memory limit of such a process."""
