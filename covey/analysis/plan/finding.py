"""What can be said about a configuration before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from covey.config import Config
from covey.objective import Objective
from covey.objective.compose import function_of
from covey.training.build import objective_of, sampling_of

Kind = Literal["same", "idle", "risk"]
PAGE = "docs/plan.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a configuration does not do, or does without being asked."""

    kind: Kind
    """same: what has several names is one. idle: a setting does nothing. risk: it may harm."""
    title: str
    """What is the matter, with the settings by name and value."""
    why: str
    remedy: str
    docs: str
    """The page and the section that explain it."""

    def row(self) -> dict[str, str]:
        """Return plain data."""
        return {name: getattr(self, name) for name in self.__slots__}

    def names(self, key: str) -> bool:
        """Tell whether a setting, by its full name, has to do with it."""
        return any(key in text for text in (self.title, self.why, self.remedy))

    def line(self) -> str:
        """Return it in one line: what, and what to do."""
        return f"{self.title}: {self.remedy}"


def told(kind: Kind, section: str, *, title: str, why: str, remedy: str) -> Finding:
    """Make a finding that a section of the page explains."""
    return Finding(kind=kind, title=title, why=why, remedy=remedy, docs=f"{PAGE}#{section}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of the data. Findings that need what is not known are not made."""

    held_out: int | None = None
    """Held-out prompts that an evaluation asks."""
    solutions: tuple[int, ...] = ()
    """Tokens, end token included, of right answers to some training prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A resolved configuration with what it builds, as rules look at it."""

    config: Config
    objective: Objective
    seen: Seen = Seen()

    @property
    def one_update(self) -> bool:
        """Whether a batch is learned from once, so that every ratio is 1."""
        return self.config.train.updates == 1

    @property
    def truncates(self) -> bool:
        """Whether answers are sampled from less than the whole distribution."""
        return sampling_of(self.config).distribution.truncates

    @property
    def exact(self) -> bool:
        """Whether the sampler's log-probabilities are the trainer's, to 1e-5."""
        return in_float32(self.config) and not self.truncates

    @property
    def advantage(self) -> Callable[..., Any]:
        """The function of the advantage, without its options."""
        return function_of(self.objective.advantage)

    @property
    def surrogate(self) -> Callable[..., Any]:
        """The function of the surrogate, without its options."""
        return function_of(self.objective.surrogate)

    def option(self, name: str, otherwise: Any = None) -> Any:
        """Return an option of the objective."""
        return self.config.objective.options.get(name, otherwise)


Rule = Callable[[Setup], Iterator[Finding]]


def setup_of(config: Config, seen: Seen | None = None) -> Setup:
    """Build what rules look at."""
    return Setup(config=config, objective=objective_of(config), seen=seen or Seen())


def in_float32(config: Config) -> bool:
    """Whether the model computes in float32, on this machine if the choice is left to it."""
    if config.model.dtype != "auto":
        return config.model.dtype == "float32"
    gpu = config.model.device.startswith("cuda")
    return not gpu and not (config.model.device == "auto" and torch.cuda.is_available())
