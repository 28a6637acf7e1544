"""The sections [curriculum] and [replay], which choose prompts and earlier groups of a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from covey.config.section import Count, Positive, Section, Share


class Curriculum(Section):
    """[curriculum]. Prompts of a step are chosen by the results of earlier steps."""

    sampling: Literal["uniform", "hard", "uncertain"] = "uniform"
    """How likely a prompt is drawn, by its running pass rate p; uniform: all alike; hard: 1 - p;
    uncertain: p (1 - p). Prompts without results count as p = 0.5."""
    memory: Share = 0.2
    """Weight of the newest group in a running pass rate."""
    floor: Share = 0.01
    """Smallest weight of a prompt or part, so that each is drawn sometimes."""
    drop_above: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Draw no prompt again whose pass rate over all its completions is at least this, such as 0.9;
    0: keep all."""
    mixture: Literal["fixed", "progress"] = "fixed"
    """Shares of the parts of a mixed task; fixed: their weights; progress: by how much the pass
    rate of a part has changed lately."""

    @property
    def active(self) -> bool:
        """Whether the prompts of a step depend on earlier results."""
        return self.sampling != "uniform" or self.drop_above > 0 or self.mixture != "fixed"


class Replay(Section):
    """[replay]"""

    groups: Count = 0
    """Number of earlier groups that a step also trains on; 0: none."""
    size: Positive = 64
    """Number of groups to keep: the newest ones with both correct and incorrect completions."""
    max_age: Positive = 16
    """Maximum age of a replayed group, in optimizer steps since its weights."""
