"""The sections [curriculum] and [replay], which control a step's prompts and replayed groups."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from covey.config.section import Count, Positive, Section, Share


class Curriculum(Section):
    """[curriculum]. A curriculum chooses the prompts of a step by the results of earlier steps."""

    sampling: Literal["uniform", "hard", "uncertain"] = "uniform"
    """Sampling weight of a prompt with the running pass rate p. uniform: equal weights; hard:
    1 - p; uncertain: p (1 - p). Prompts without results count as p = 0.5."""
    memory: Share = 0.2
    """Weight of the newest group in a running pass rate."""
    floor: Share = 0.01
    """Smallest sampling weight of a prompt, or of a part of a mixed task, so that every prompt and
    part is drawn sometimes."""
    drop_above: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Stop drawing a prompt once its pass rate over all its completions reaches this value, such as
    0.9; 0: never."""
    mixture: Literal["fixed", "progress"] = "fixed"
    """How a step's prompts are divided among the parts of a mixed task. fixed: by the parts'
    weights; progress: by the recent change of each part's pass rate."""

    @property
    def active(self) -> bool:
        """Whether the prompts of a step depend on earlier results."""
        return self.sampling != "uniform" or self.drop_above > 0 or self.mixture != "fixed"


class Replay(Section):
    """[replay]"""

    groups: Count = 0
    """Number of earlier groups that a step also trains on; 0: none."""
    size: Positive = 64
    """Number of groups to keep for replay: the newest groups with both correct and incorrect
    completions."""
    max_age: Positive = 16
    """Maximum age of a replayed group, in optimizer steps since the group was sampled."""
