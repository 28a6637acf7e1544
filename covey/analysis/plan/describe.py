"""A run in one paragraph: what a step asks, samples and learns, and what all of it adds up to."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, fields
from typing import Any

from covey.analysis.plan.finding import Seen
from covey.analysis.plan.length import least_steps, most_evaluations, most_steps, most_tokens
from covey.config import Config
from covey.objective import Objective
from covey.objective.penalty import PENALTIES
from covey.training.build import objective_of, reward_of

REFERENCES = {
    "frozen": "the starting weights",
    "offloaded": "the starting weights, kept in main memory",
    "adapter_off": "the weights under the adapter",
    "moving": "weights that follow the policy",
    "renewed": "the policy of some updates ago",
    "server": "the weights of a server",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of a run before it is one."""

    algorithm: str
    steps: int
    at_least: bool
    """Whether steps and updates may be more: short answers make a budget of tokens last longer, and
    one of updates lasts while dynamic sampling finds nothing to learn from."""
    prompts: int
    samples: int
    rounds: int
    """How often a step samples at most: more than once with dynamic sampling."""
    max_tokens: int
    mini_batches: int
    epochs: int
    total_updates: int
    total_tokens: int
    """Sampled for training, at most."""
    reward: str
    reward_counts: str
    """What the reward says of itself."""
    reward_bounds: tuple[float, float]
    reference: str
    """What a penalty is taken against, and how it is weighed. Empty: there is none."""
    held_out: int | None
    """None: they are not counted."""
    evaluations: int
    """At most, with a budget of tokens."""
    evaluation_samples: int

    @property
    def answers(self) -> int:
        """Answers that a step learns from."""
        return self.prompts * self.samples

    @property
    def updates(self) -> int:
        """Optimizer steps on one rollout batch."""
        return self.mini_batches * self.epochs

    @property
    def age(self) -> int:
        """How many updates old the answers are when they are learned from for the last time."""
        return self.updates - 1

    @property
    def step_tokens(self) -> int:
        """Tokens that a step samples at most."""
        return self.answers * self.rounds * self.max_tokens

    @property
    def evaluation_tokens(self) -> int | None:
        """Tokens that all evaluations sample at most."""
        if self.held_out is None:
            return None
        asked = self.evaluations * self.held_out * (1 + self.evaluation_samples)
        return asked * self.max_tokens

    def paragraph(self) -> str:
        """Say it in plain words."""
        again = f", and up to {self.rounds} times as many to replace groups" * (self.rounds > 1)
        low, high = self.reward_bounds
        between = f"between {low:g} and {high:g}" if math.isfinite(high - low) else "any number"
        least = "at least " * self.at_least
        return " ".join(
            [
                f"Each of {least}{self.steps:,} steps asks {self.prompts} prompts and samples "
                f"{self.samples} answers to each: {self.answers:,} answers of at most "
                f"{self.max_tokens:,} tokens{again}.",
                self._learning(),
                f"In all that is {least}{self.total_updates:,} updates and at most "
                f"{self.total_tokens:,} sampled tokens.",
                f"The reward {self.reward} is {between}. It counts: {self.reward_counts}",
                f"A penalty of {self.reference}."
                if self.reference
                else "There is no penalty, and so no reference.",
                self._measuring(),
            ]
        )

    def _learning(self) -> str:
        if self.updates == 1:
            return (
                f"{self.algorithm} learns from them in one update, with the weights that sampled "
                "them: every ratio is 1, and no clip acts."
            )
        passes = f" in each of {self.epochs} passes" * (self.epochs > 1)
        return (
            f"{self.algorithm} learns from them in {self.mini_batches} updates{passes}; at the "
            f"last one the answers are {_updates(self.age)} old."
        )

    def _measuring(self) -> str:
        if not self.evaluations:
            return "Nothing is measured on the way."
        prompts = "the" if self.held_out is None else f"{self.held_out:,}"
        most = "at most " * self.at_least
        return f"It is measured {most}{self.evaluations} times on {prompts} held-out prompts."

    def table(self) -> list[tuple[str, str]]:
        """Return the numbers, each with its name."""
        size = self.answers / self.mini_batches
        rows = [
            ("answers a step", f"{self.prompts} x {self.samples} = {self.answers:,}"),
            ("updates a step", f"{self.updates}, {size:.3g} answers each"),
            ("age of the answers at the last", _updates(self.age)),
            ("sampled tokens a step, at most", f"{self.step_tokens:,}"),
            ("updates in all" + ", at least" * self.at_least, f"{self.total_updates:,}"),
            ("sampled tokens in all, at most", f"{self.total_tokens:,}"),
        ]
        if self.evaluation_tokens is not None:
            rows.append(("tokens of evaluations, at most", f"{self.evaluation_tokens:,}"))
        return rows

    def row(self) -> dict[str, Any]:
        """Return plain data, what follows from it included."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        more = ("answers", "updates", "age", "step_tokens", "evaluation_tokens")
        # JSON has no infinity: a reward without bounds has none there.
        plain["reward_bounds"] = [b if math.isfinite(b) else None for b in self.reward_bounds]
        return {**plain, **{name: getattr(self, name) for name in more}}


def describe(config: Config, seen: Seen | None = None) -> Plan:
    """Say what a resolved configuration will do."""
    rollout, train = config.rollout, config.train
    steps, by_tokens = least_steps(config), train.budget == "tokens"
    reward = reward_of(config)
    held_out = (seen and seen.held_out) or config.evaluate.prompts or None
    return Plan(
        algorithm=config.objective.name,
        steps=steps,
        at_least=by_tokens or most_steps(config) > steps,
        prompts=rollout.prompts_per_step,
        samples=rollout.group_size,
        rounds=config.filter.max_rounds if config.filter.dynamic_sampling else 1,
        max_tokens=rollout.max_tokens,
        mini_batches=train.mini_batches,
        epochs=train.epochs,
        # A step that is begun is taken whole, also where a budget of updates ends in it.
        total_updates=steps * train.updates,
        total_tokens=most_tokens(config),
        reward=config.reward.name,
        reward_counts=_first_sentence(reward),
        reward_bounds=reward.bounds,
        reference=_reference(config, objective_of(config)),
        held_out=held_out,
        evaluations=most_evaluations(config),
        evaluation_samples=config.evaluate.samples,
    )


def _updates(count: int) -> str:
    return "1 update" if count == 1 else f"{count} updates"


def _reference(config: Config, objective: Objective) -> str:
    if not objective.beta:
        return ""
    names = {function: name for name, function in PENALTIES.items()}
    kl = names.get(objective.penalty, "its own estimate")
    against = REFERENCES[config.reference.kind]
    return f"{objective.beta:g} times the KL to {against} ({kl}) is in the {objective.kl_in}"


def _first_sentence(reward: object) -> str:
    """Return how a reward describes itself."""
    said = inspect.getdoc(getattr(reward, "function", type(reward))) or "what its function gives."
    first = " ".join(said.partition("\n\n")[0].split())
    return first if first.endswith(".") else f"{first}."
