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
    """[teacher]. An objective that needs a teacher gets it from `path`, `url` or `policy`."""

    path: str = ""
    """The teacher model, as in model.path, or an adapter folder, with the policy's tokenizer."""
    offload: bool = False
    """Keep the weights of a teacher with `path`, or with policy = "frozen", in main memory between
    training steps."""
    url: str = ""
    """Address of a server of `covey reference serve`, such as http://127.0.0.1:8500."""
    token_env: str = ""
    """Name of the environment variable with the bearer token of the teacher's server."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of a request to the teacher's server, in seconds."""
    patience: Annotated[float, Field(ge=0)] = 300.0
    """Seconds to retry while the teacher's server cannot be reached."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the distribution of a teacher with `path` or `url`, independent of the
    sampling temperature."""
    policy: Literal["", "current", "frozen", "moving"] = ""
    """For sdpo: the policy itself is the teacher, with privileged text in its prompt. The teacher's
    weights are the current policy's weights (current), the initial weights (frozen), or a moving
    average (moving)."""
    alpha: Share = 0.05
    """Weight of the policy in an update of a teacher with policy = "moving": teacher = alpha *
    policy + (1 - alpha) * teacher."""
    every: Positive = 1
    """Optimizer steps between updates of a teacher with policy = "moving"."""
    context: dict[str, str] = Field(default=CONTEXT)
    """With `policy`, a template with {text} for each source of privileged text. The source
    `success` is a correct completion of the same group, and `feedback` is the reward's feedback on
    the completion itself. Any other source is a column of the data, or `target`."""
    template: str = "{prompt}\n\n{context}\n\nNow answer the question yourself."
    """With `policy`, the template of the last message in the teacher's prompt, with {prompt} and
    {context}."""
