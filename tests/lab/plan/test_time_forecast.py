"""The time of a run, from a few measured steps."""

from __future__ import annotations

from typing import Any

import pytest

from covey.config import load_config
from covey.config.resolve import resolve
from covey.lab.plan.summary import (
    MEASURED,
    WARM_UP,
    duration,
    forecast_time,
    measure_time,
    shortened,
)


def row(total: float, rollout: float, update: float) -> dict[str, Any]:
    return {
        "time/total": total,
        "time/rollout": rollout,
        "time/score": 0.5,
        "time/training": update,
        "time/tokens_per_second": 1000.0,
    }


def test_a_forecast_is_the_steps_and_the_evaluations() -> None:
    sets = ["train.steps=40", "evaluate.every=15", "evaluate.samples=3"]
    config = load_config(
        "arithmetic", [*sets, "rollout.prompts_per_step=4", "rollout.group_size=8"]
    )
    found = forecast_time(config, [row(10.0, 6.0, 3.0), row(12.0, 8.0, 3.0)], held_out=64)
    assert (found.step, found.rollout, found.update, found.score) == (11.0, 7.0, 3.0, 0.5)
    assert found.evaluations == 4  # after steps 0, 15, 30 and 40
    assert found.evaluation == pytest.approx(7.0 * 64 * 4 / 32)
    assert found.run == pytest.approx(40 * 11.0 + 4 * found.evaluation)
    assert found.text().startswith("time: 11.00 s a step (rollout 7.00, scoring 0.50, update 3.00)")
    none = load_config("arithmetic", ["evaluate.every=0", "train.steps=2"])
    assert forecast_time(none, [row(10.0, 6.0, 3.0)], held_out=64).run == 20.0


def test_a_budget_of_optimizer_steps_decides_the_number_of_steps() -> None:
    sets = ["train.stop_after={updates=12}", "train.mini_batches=4", "evaluate.every=20"]
    found = forecast_time(load_config("arithmetic", sets), [row(10.0, 6.0, 3.0)], held_out=64)
    assert (found.steps, found.evaluations) == (3, 4)  # not train.steps, which is 100


def test_words_for_times() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3599.4, 3600)] == [
        "0 min 0 s", "1 min 0 s", "59 min 59 s", "1 h 0 min",
    ]  # fmt: skip


def test_a_measurement_runs_the_steps_of_the_run() -> None:
    config = resolve(
        load_config("arithmetic", ["rollout.prompts_per_step=2", "evaluate.prompts=8"])
    )
    short = shortened(config)
    assert short.train.steps == WARM_UP + MEASURED
    assert short.rollout == config.rollout
    assert short.train.mini_batches == config.train.mini_batches
    found = measure_time(config)
    assert 0 < found.rollout + found.score + found.update <= found.step
    assert found.steps == config.train.steps
