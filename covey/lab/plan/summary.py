"""Summarizes a run before it starts: rollouts, optimizer steps, tokens and evaluations."""

from __future__ import annotations

import inspect
import math
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from covey.cluster.actors import needs_text
from covey.config import Config, parse_config, to_toml
from covey.config.resolve import objective_of, reward_of
from covey.lab.plan.task_facts import TaskFacts
from covey.objective.penalty import PENALTIES
from covey.policy.schedule import PATIENCE
from covey.records.folder import RunFolder
from covey.records.resume import Start
from covey.stopping import StopSignal

REFERENCES = {
    "frozen": "the initial weights",
    "offloaded": "the initial weights, kept in main memory",
    "adapter_off": "the weights without the adapter",
    "moving": "a moving average of the policy",
    "renewed": "an earlier policy, updated at intervals",
    "server": "the weights of a reference server",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run: the numbers of its steps, completions, tokens and evaluations."""

    algorithm: str
    steps: int
    at_least: bool
    """Whether the run may take more than `steps` training steps. A run with a token budget takes
    more than `steps` training steps if its completions are short. A run with a limit on optimizer
    steps takes more than `steps` training steps if dynamic sampling leads to training steps without
    an optimizer step."""
    prompts_per_step: int
    group_size: int
    rounds: int
    """The largest number of generation rounds in a step; more than 1 only with dynamic sampling."""
    max_tokens: int
    mini_batches: int
    epochs: int
    total_updates: int
    total_tokens: int
    """The largest number of tokens generated for training."""
    reward: str
    reward_text: str
    reward_bounds: tuple[float, float]
    penalty: str
    """The KL penalty: its weight, its estimator, its reference, and whether it is part of the loss
    or of the reward."""
    held_out: int | None
    """The number of held-out prompts; None if the number is unknown."""
    evaluations: int
    """The number of evaluations; with a token budget, the largest possible number."""
    evaluation_samples: int
    prompt_lengths: str = ""
    """A sentence about the prompts' token counts; empty if the counts are unknown."""
    staleness: int = 0
    """The number of training steps by which generation may be ahead of training."""
    baselines: Mapping[str, Any] = field(default_factory=dict)
    """Scores of trivial completions: a constant answer, an empty text and a copy of the prompt."""
    baselines_text: str = ""
    learning_rate: str = ""
    cluster: str = ""
    """A sentence about actors, CPUs and GPUs on Ray; empty if the section [cluster] has no
    settings.
    """

    @property
    def completions(self) -> int:
        """The number of completions that a step trains on."""
        return self.prompts_per_step * self.group_size

    @property
    def updates(self) -> int:
        return self.mini_batches * self.epochs

    @property
    def age(self) -> int:
        """The largest age of a completion in training, in optimizer steps since its generation."""
        return (1 + self.staleness) * self.updates - 1

    @property
    def step_tokens(self) -> int:
        return self.completions * self.rounds * self.max_tokens

    @property
    def evaluation_tokens(self) -> int | None:
        if self.held_out is None:
            return None
        completions = self.evaluations * self.held_out * (1 + self.evaluation_samples)
        return completions * self.max_tokens

    def paragraph(self) -> str:
        again = f", in up to {self.rounds} rounds of dynamic sampling" * (self.rounds > 1)
        low, high = self.reward_bounds
        between = f"between {low:g} and {high:g}" if math.isfinite(high - low) else "any number"
        least, most = "at least " * self.at_least, "at most " * self.at_least
        step = "1 optimizer step" if self.age == 1 else f"{self.age} optimizer steps"
        epochs = f" in each of {self.epochs} epochs" * (self.epochs > 1)
        takes = (
            "one optimizer step" if self.updates == 1 else f"{self.mini_batches} optimizer steps"
        )
        updates = (
            f"{self.algorithm} takes {takes}{epochs}; at the last optimizer step the completions "
            f"are {'up to ' * (self.staleness > 0)}{step} old."
        )
        if not self.age:
            updates = (
                f"{self.algorithm} takes one optimizer step, from the weights that generated the "
                "completions, so every ratio is 1 and clips have no effect."
            )
        evaluations, tokens = "There are no evaluations.", self.evaluation_tokens
        if self.evaluations:
            prompts = "the" if self.held_out is None else f"{self.held_out:,}"
            evaluations = f"The policy is evaluated {most}{self.evaluations} times on {prompts} "
            evaluations += "held-out prompts"
            evaluations += "." if tokens is None else f", with at most {tokens:,} tokens."
        return " ".join(
            [
                f"{least.capitalize()}{self.steps:,} training steps. Each takes "
                f"{self.prompts_per_step} prompts and generates {self.group_size} completions per "
                f"prompt: {self.completions:,} completions of at most {self.max_tokens:,} "
                f"tokens{again}.",
                *([self.prompt_lengths] if self.prompt_lengths else []),
                updates,
                f"In total: {least}{self.total_updates:,} optimizer steps and at most "
                f"{self.total_tokens:,} generated tokens.",
                f"Learning rate: {self.learning_rate}.",
                f"The reward {self.reward} is {between}: {self.reward_text}",
                f"KL penalty: {self.penalty}."
                if self.penalty
                else "There is no KL penalty and no reference.",
                evaluations,
                *([f"Without any skill: {self.baselines_text}."] if self.baselines_text else []),
                *([self.cluster] if self.cluster else []),
            ]
        )

    def row(self) -> dict[str, Any]:
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        derived = ("completions", "updates", "age", "step_tokens", "evaluation_tokens")
        # JSON has no infinity: an unbounded reward has null.
        plain["reward_bounds"] = [b if math.isfinite(b) else None for b in self.reward_bounds]
        return {**plain, **{name: getattr(self, name) for name in derived}}


def summarize(config: Config, facts: TaskFacts | None = None) -> Plan:
    rollout, train = config.rollout, config.train
    steps = least_steps(config)
    reward, objective = reward_of(config), objective_of(config)
    known = facts.baselines if facts is not None else None
    lengths = facts.prompt_tokens if facts is not None else ()
    prompts = penalty = ""
    if facts is not None and lengths:
        tenth, median, tail = (lengths[int(q * (len(lengths) - 1))] for q in (0.1, 0.5, 0.95))
        prompts = (
            f"Prompts have {median:,} tokens in the median, 10 % at most {tenth:,}, 95 % at most "
            f"{tail:,}; the longest of {facts.measured} measured has {facts.longest_prompt:,}."
        )
    if objective.beta:
        names = {function: name for name, function in PENALTIES.items()}
        kl = names.get(objective.penalty, "its own estimate")
        against = REFERENCES[config.reference.kind]
        penalty = f"{objective.beta:g} times the KL to {against} ({kl}), in the {objective.kl_in}"
    optimizer = config.optimizer
    rate = f"{optimizer.learning_rate:g}, {optimizer.schedule}"
    if optimizer.warmup_ratio:
        rate += f", warm-up {optimizer.warmup_ratio:.0%} of the run"
    elif optimizer.warmup_steps:
        rate += f", warm-up {optimizer.warmup_steps} optimizer steps"
    text = inspect.getdoc(getattr(reward, "function", type(reward))) or "a function without text."
    first = " ".join(text.partition("\n\n")[0].split())
    return Plan(
        algorithm=config.objective.name,
        steps=steps,
        at_least=train.budget == "tokens" or most_steps(config) > steps,
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        rounds=config.filter.max_rounds if config.filter.dynamic_sampling else 1,
        max_tokens=rollout.max_tokens,
        mini_batches=train.mini_batches,
        epochs=train.epochs,
        # A training step is always completed, even if a budget of optimizer steps ends in it.
        total_updates=steps * train.optimizer_steps,
        total_tokens=most_tokens(config),
        reward=config.reward.name,
        reward_text=first if first.endswith(".") else f"{first}.",
        reward_bounds=reward.bounds,
        penalty=penalty,
        held_out=(facts and facts.held_out) or config.evaluate.prompts or None,
        evaluations=most_evaluations(config),
        evaluation_samples=config.evaluate.samples,
        prompt_lengths=prompts,
        staleness=config.overlap.staleness,
        learning_rate=rate,
        cluster=needs_text(config),
        baselines=known.row() if known is not None else {},
        baselines_text=known.text() if known is not None else "",
    )


# How many steps, tokens and evaluations a run can have.


def step_tokens(config: Config) -> int:
    rollout, filters = config.rollout, config.filter
    rounds = filters.max_rounds if filters.dynamic_sampling else 1
    return rollout.prompts_per_step * rollout.group_size * rounds * rollout.max_tokens


def least_steps(config: Config) -> int:
    """Return the smallest possible number of steps of a run.

    A run with a token budget takes the fewest steps if all completions have the maximum length.
    """
    train = config.train
    if train.budget == "tokens":
        return math.ceil(train.amount / step_tokens(config))
    return (
        math.ceil(train.amount / train.optimizer_steps)
        if train.budget == "updates"
        else train.steps
    )


def most_steps(config: Config) -> int:
    """Return the largest possible number of steps of a run.

    A run with a token budget takes the most steps if every completion has one token. With a limit
    on optimizer steps, dynamic sampling can add training steps, because a training step whose
    groups are all dropped takes no optimizer step.
    """
    train, least = config.train, least_steps(config)
    if train.budget == "tokens":
        completions = config.rollout.prompts_per_step * config.rollout.group_size
        return math.ceil(train.amount / completions)
    gives_up = train.budget == "updates" and config.filter.dynamic_sampling
    return PATIENCE * least + 1 if gives_up else least


def most_tokens(config: Config) -> int:
    """Return the largest number of tokens in all rollouts, which may exceed a token budget."""
    whole, train = step_tokens(config), config.train
    return train.amount + whole - 1 if train.budget == "tokens" else most_steps(config) * whole


def most_evaluations(config: Config) -> int:
    """Return the maximum number of evaluations: at the start, at every interval and at the end."""
    every, steps = config.evaluate.every, config.train.steps
    marks = math.ceil(steps / every) if every else 0
    return 1 + min(marks, most_steps(config)) if every else 0


# Forecasts the time of a run from a few of its training steps, measured on this machine.


WARM_UP, MEASURED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeForecast:
    """Forecast of a run's time in seconds, from a few measured training steps."""

    rollout: float
    score: float
    update: float
    step: float
    steps: int
    evaluation: float
    """The seconds of one evaluation, estimated from the speed of rollouts."""
    evaluations: int
    tokens_per_second: float

    @property
    def run(self) -> float:
        return self.steps * self.step + self.evaluations * self.evaluation

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "run": self.run}

    def text(self) -> str:
        parts = f"rollout {self.rollout:.2f}, scoring {self.score:.2f}, update {self.update:.2f}"
        return (
            f"time: {self.step:.2f} s a step ({parts}), {self.tokens_per_second:,.0f} sampled "
            f"tokens a second. {self.steps} steps and {self.evaluations} evaluations of about "
            f"{self.evaluation:.1f} s: {duration(self.run)}. Measured over {MEASURED} steps here."
        )


def duration(seconds: float) -> str:
    """Return a duration as text.

    >>> duration(95), duration(7300)
    ('1 min 35 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"


def measure_time(config: Config) -> TimeForecast:
    from covey.loop import train
    from covey.run import Run

    short = shortened(config)
    run = Run.build(short)
    with closing(run.scorer), tempfile.TemporaryDirectory(prefix="covey-plan-") as folder:
        target = RunFolder.create(Path(folder) / "run", to_toml(short), {})
        train(run, target, [], StopSignal(), Start())
        rows = target.steps()[WARM_UP:]
    return forecast_time(config, rows, len(run.held_out))


def shortened(config: Config) -> Config:
    data = config.model_dump()
    data["train"] |= {"steps": WARM_UP + MEASURED, "stop_after": {}}
    data["evaluate"]["every"] = 0
    data["save"] |= {"every": 0, "rollouts": False, "samples_every": 0}
    return parse_config(data)


def forecast_time(config: Config, rows: list[dict[str, Any]], held_out: int) -> TimeForecast:
    def typical(name: str) -> float:
        return statistics.median(float(row[name]) for row in rows)

    rollout = typical("time/rollout")
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    evaluated = held_out * (1 + config.evaluate.samples)
    return TimeForecast(
        rollout=rollout,
        score=typical("time/score"),
        update=typical("time/training"),
        step=typical("time/total"),
        steps=least_steps(config),
        evaluation=rollout * evaluated / completions,
        evaluations=most_evaluations(config),
        tokens_per_second=typical("time/tokens_per_second"),
    )
