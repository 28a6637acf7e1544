"""Forecasts the time of a run from a few of its training steps, measured on this machine."""

from __future__ import annotations

import statistics
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from covey.config import Config, parse_config, to_toml
from covey.lab.plan.summary import least_steps, most_evaluations
from covey.records.folder import RunFolder
from covey.records.resume import Start
from covey.stopping import StopSignal

WARM_UP, MEASURED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeForecast:
    """Forecast of a run's time in seconds, from a few measured training steps."""

    rollout: float
    score: float
    update: float
    step: float
    """The seconds of a whole training step."""
    steps: int
    evaluation: float
    """The seconds of one evaluation, estimated from the speed of rollouts."""
    evaluations: int
    tokens_per_second: float

    @property
    def run(self) -> float:
        """The seconds of all steps and evaluations of the run."""
        return self.steps * self.step + self.evaluations * self.evaluation

    def row(self) -> dict[str, Any]:
        """Return the forecast as plain data."""
        return {**asdict(self), "run": self.run}

    def text(self) -> str:
        """Return the forecast in a paragraph."""
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
    """Measure a few training steps in a temporary folder, and forecast the time of the run."""
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
    """Return the run's settings with only a few steps, and no evaluations or checkpoints."""
    data = config.model_dump()
    data["train"] |= {"steps": WARM_UP + MEASURED, "stop_after": {}}
    data["evaluate"]["every"] = 0
    data["save"] |= {"every": 0, "rollouts": False, "samples_every": 0}
    return parse_config(data)


def forecast_time(config: Config, rows: list[dict[str, Any]], held_out: int) -> TimeForecast:
    """Compute the forecast from the metrics of the measured steps."""

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
