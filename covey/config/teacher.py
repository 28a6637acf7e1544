"""The [teacher] section: the teacher model of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from covey.config.section import Section


class Teacher(Section):
    """[teacher]. An objective that needs a teacher gets the teacher from `path` or from `url`."""

    path: str = ""
    """The teacher model, as in model.path, or an adapter folder, with the policy's tokenizer."""
    offload: bool = False
    """Keep the weights of a teacher from teacher.path in main memory between training steps."""
    url: str = ""
    """Address of a server of `covey reference serve`, such as http://127.0.0.1:8500."""
    token_env: str = ""
    """Name of the environment variable with the bearer token of the teacher's server."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of a request to the teacher's server, in seconds."""
    patience: Annotated[float, Field(ge=0)] = 300.0
    """Seconds to retry while the teacher's server cannot be reached."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the teacher's distribution; it does not depend on the sampling temperature."""
