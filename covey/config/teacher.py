"""The [teacher] section: the teacher model of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from covey.config.section import Section


class Teacher(Section):
    """[teacher]. An objective that needs a teacher gets the teacher from `path` or from `url`."""

    path: str = ""
    """A model, as in model.path, or an adapter folder. It must have the policy's tokenizer."""
    offload: bool = False
    """path: keep the teacher's weights in main memory between training steps."""
    url: str = ""
    """A server of `covey reference serve`, such as http://127.0.0.1:8500."""
    token_env: str = ""
    """url: NAME of the environment variable that holds the bearer token."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """url: timeout of a request in seconds."""
    patience: Annotated[float, Field(ge=0)] = 300.0
    """url: seconds to retry while the server cannot be reached."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the teacher's distribution, whatever the sampling temperature is."""
