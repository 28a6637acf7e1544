"""The [teacher] section: another model as teacher, or the policy itself with privileged text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from covey.config.section import Positive, Section, Share

CONTEXT = {
    "success": "A correct answer to this question:\n\n{text}",
    "feedback": "Feedback on an earlier, wrong answer to this question:\n\n{text}",
}


class Teacher(Section):
    """[teacher]. An objective that needs a teacher takes it from `path`, `url` or `policy`."""

    path: str = ""
    """A model, as in model.path, or an adapter folder. It must have the policy's tokenizer."""
    offload: bool = False
    """path, or policy = "frozen": keep the weights in main memory between training steps."""
    url: str = ""
    """A server of `covey reference serve`, such as http://127.0.0.1:8500."""
    token_env: str = ""
    """url: NAME of the environment variable that holds the bearer token."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """url: timeout of a request in seconds."""
    patience: Annotated[float, Field(ge=0)] = 300.0
    """url: seconds to retry while the server cannot be reached."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """path or url: temperature of the teacher's distribution, whatever the sampling temperature
    is."""
    policy: Literal["", "current", "frozen", "moving"] = ""
    """For sdpo: the policy itself, which reads prompts with privileged text. Its weights are the
    current ones, those at the start of the run, or a moving average."""
    alpha: Share = 0.05
    """moving: teacher = alpha * policy + (1 - alpha) * teacher."""
    every: Positive = 1
    """moving: optimizer steps between moves."""
    context: dict[str, str] = Field(default=CONTEXT)
    """policy: the privileged text, with {text}. `success` is a correct completion of the same
    group, `feedback` is what the reward says about the completion itself, and any other key is a
    column of the data, or `target`."""
    template: str = "{prompt}\n\n{context}\n\nNow answer the question yourself."
    """policy: the last message that the teacher reads, with {prompt} and {context}."""
