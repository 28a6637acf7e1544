"""Defines `Finding`, a warning about a configuration, and `Setup`, the input of the rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from covey.config import Config
from covey.config.resolve import objective_of, truncates_unseen
from covey.lab.exact_logp import expected_exact_logp
from covey.lab.plan.task_facts import TaskFacts
from covey.objective import Objective
from covey.objective.options import function_of

Kind = Literal["same", "idle", "risk"]
PAGE = "docs/plan.md"
UNKNOWN = TaskFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A warning or note about a configuration, with a remedy."""

    kind: Kind
    """The kind `same` means that algorithms with different names train in the same way, `idle`
    means that a setting has no effect, and `risk` means that a setting may harm the run."""
    title: str
    """The finding in one line, with settings and their values."""
    why: str
    remedy: str
    docs: str
    """The page and section of the docs that explain the finding."""
    settings: tuple[str, ...]
    """The full names of the settings that the finding depends on."""

    def row(self) -> dict[str, str]:
        """Return the finding as a dict of texts, without the names of its settings."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "settings"}

    def depends_on(self, settings: Collection[str]) -> bool:
        """Return whether the finding depends on one of the given settings."""
        return not set(settings).isdisjoint(self.settings)

    def line(self) -> str:
        """Return the finding and its remedy in one line."""
        return f"{self.title}: {self.remedy}"


class Said(NamedTuple):
    """A finding without its kind and its docs link, which the decorator `rule` adds."""

    settings: tuple[str, ...]
    title: str
    why: str
    remedy: str

    def finding(self, kind: Kind, section: str) -> Finding:
        """Return the finding, with a link to the section of docs/plan.md that explains it."""
        return Finding(kind=kind, docs=f"{PAGE}#{section}", **self._asdict())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A resolved configuration, its objective, and known properties of its data."""

    config: Config
    objective: Objective
    facts: TaskFacts = UNKNOWN

    @property
    def single_optimizer_step(self) -> bool:
        """Whether every ratio is 1 because a training step takes one optimizer step.

        If a training step may use rollouts from older weights, ratios can differ from 1.
        """
        return self.config.train.optimizer_steps == 1 and not self.config.stale

    @property
    def on_policy(self) -> bool:
        """Whether every ratio is 1, including ratios of trainer probabilities to engine
        probabilities."""
        return self.single_optimizer_step and (
            self.exact or "sampler_as_old" not in self.objective.needs
        )

    @property
    def truncates(self) -> bool:
        """Whether sampling is truncated (top-k, top-p, min-p), but training ignores truncation."""
        return truncates_unseen(self.config)

    @property
    def exact(self) -> bool:
        """Whether the log-probs of engine and trainer differ by at most 1e-5."""
        return expected_exact_logp(self.config) and not self.truncates

    @property
    def advantage(self) -> Callable[..., Any]:
        """The function that computes the objective's advantages."""
        return function_of(self.objective.advantage)

    @property
    def surrogate(self) -> Callable[..., Any]:
        """The function that computes the objective's surrogate."""
        return function_of(self.objective.surrogate)

    def option(self, name: str, otherwise: Any = None) -> Any:
        """Return the value of an option in [objective], or `otherwise` if the option is not set."""
        return self.config.objective.options.get(name, otherwise)


Rule = Callable[[Setup], Iterator[Said]]
RULES: list[Callable[[Setup], Iterator[Finding]]] = []
"""All rules that check one configuration, in the order in which their findings are listed."""


def rule(kind: Kind, section: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule, and sets the kind and docs link of its findings."""

    def register(function: Rule) -> Rule:
        RULES.append(lambda setup: (said.finding(kind, section) for said in function(setup)))
        return function

    return register


def setup_of(config: Config, facts: TaskFacts | None = None) -> Setup:
    """Build the `Setup` of a resolved configuration."""
    return Setup(config=config, objective=objective_of(config), facts=facts or UNKNOWN)
