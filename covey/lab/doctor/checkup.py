"""Runs all checks of `covey doctor` on a small version of the user's own run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from covey.config import Config, parse_config
from covey.environments.registry import NONE
from covey.lab.doctor.engine_checks import ARRIVES, engine_checks, weights_check
from covey.lab.doctor.gradient import gradient_checks
from covey.lab.doctor.machine import PROMPTS, resume_checks, reward_checks, sandbox_check
from covey.lab.doctor.result import Clock, Result, results_of
from covey.lab.plan.fit import changed
from covey.lab.plan.forecast import Device
from covey.lab.plan.memory import forecast
from covey.lab.plan.model_shape import Shape, shape_of
from covey.lab.plan.run_time import RunTime, run_time
from covey.lab.plan.task_facts import TaskFacts, task_facts
from covey.models.gguf import find_gguf, import_gguf
from covey.records.provenance import describe_environment
from covey.records.trackers import Tracker
from covey.rollout.collect import collect_step
from covey.run import Run

SIZES = ((4, 8, 48), (2, 4, 16), (2, 2, 8))
"""The possible sizes of the small training step, from largest to smallest. A size consists of the
numbers of prompts, of completions per prompt, and of tokens per completion.

`covey doctor` uses the first size for which the estimated time of rollouts and optimizer steps is
at most the fraction `SHARE` of the time limit.
"""
SHARE, ROLLOUTS, UPDATES = 0.5, 6, 12
"""SHARE is the fraction of the time limit that rollouts and optimizer steps together may take.
ROLLOUTS is the number of rollout batches that all checks together generate, and UPDATES is the
number of gradients that all checks together compute.
"""
SHOWN = ("covey", "torch", "transformers", "peft", "vllm")


def small(config: Config, size: tuple[int, int, int] = SIZES[0]) -> Config:
    """Return the configuration of a short run with two small training steps and no dropout."""
    data = config.model_dump()
    most = dict(zip(("prompts_per_step", "group_size", "max_tokens"), size, strict=True))
    data["rollout"] |= {name: min(data["rollout"][name], limit) for name, limit in most.items()}
    rows = data["rollout"]["prompts_per_step"] * data["rollout"]["group_size"]
    data["train"] |= {"steps": 2, "stop_after": {}, "stop_on": [], "patience": 0}
    data["train"]["mini_batches"] = min(data["train"]["mini_batches"], 2, rows)
    data["evaluate"] |= {"every": 0, "prompts": PROMPTS}
    data["save"] |= {"every": 1, "keep": 2, "best": "", "samples_every": 0}
    data["adapter"]["dropout"] = 0.0
    data["trackers"] = []
    return parse_config(data)


def examine_run(config: Config, clock: Clock) -> Iterator[Result]:
    """Run all checks of `covey doctor`, and yield each result as soon as it is known."""
    clock.say("reading model and data")
    if (gguf := find_gguf(config.model.path)) is not None:
        import_gguf(gguf)  # convert the file here, so that the measured load time excludes it
    facts, shape = task_facts(small(config)), shape_of(config)
    short, estimate = _fitting(config, facts, shape, clock.limit)
    if estimate is not None:
        clock.pace.rollout, clock.pace.update = estimate.rollout, estimate.update
    memory = forecast(short, facts=facts, shape=shape)
    yield from results_of("training", lambda: _policy_checks(short, clock))
    clock.say("reward")
    yield from results_of("reward: lab", lambda: reward_checks(short))
    clock.say("sandbox")
    yield from results_of("sandbox", lambda: sandbox_check(short))
    with tempfile.TemporaryDirectory(prefix="covey-doctor-") as folder:
        checks = partial(resume_checks, short, Path(folder), memory, clock)
        yield from results_of("resume", checks)
    yield _versions(config)


def _fitting(
    config: Config, facts: TaskFacts, shape: Shape, limit: float
) -> tuple[Config, RunTime | None]:
    """Return the largest test configuration that fits the time limit, and its estimated time."""
    device, found = Device.here(config.model.device), None
    for size in SIZES:
        short = small(config, size)
        # Because the number of turns is unknown, the estimate is for one turn.
        time = run_time(changed(short, {"environment.name": NONE}), facts, shape, device)
        found = None if isinstance(time, str) else time
        if found is None or ROLLOUTS * found.rollout + UPDATES * found.update <= SHARE * limit:
            break
    return short, found


def _policy_checks(config: Config, clock: Clock) -> Iterator[Result]:
    """Check the engine and the gradient on the completions of one training step.

    The checks change the weights of the policy.
    """
    if skipped := clock.skips("engine, gradient", clock.pace.rollout + clock.pace.update):
        yield skipped
        return
    clock.say("loading the model")
    with clock.pace.measures("load"):
        run = Run.build(config)
    with closing(run):
        clock.say("generating completions")
        with clock.pace.measures("rollout"):
            collected = collect_step(run, 1, Tracker(), 0.0).collected
            groups = list(collected.groups)
        try:
            yield from results_of("engine", lambda: engine_checks(run, groups, clock))
            yield from results_of("gradient", lambda: gradient_checks(run, groups, clock))
            yield from results_of(ARRIVES, lambda: weights_check(run, groups, clock))
        finally:
            run.engine.close()


def _versions(config: Config) -> Result:
    found = describe_environment(config.seed, config.model.device, torch.get_num_threads())
    packages = {name: found["packages"].get(name) for name in SHOWN}
    listed = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return Result(name="versions", passed=True, figure=f"Python {found['python']}, {listed}")
