"""Runs all checks of `covey doctor` on a small version of the user's own run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from covey.config import Config, parse_config
from covey.lab.doctor.engine_checks import ARRIVES, engine_checks, weights_check
from covey.lab.doctor.gradient import gradient_checks
from covey.lab.doctor.machine import PROMPTS, resume_checks, reward_checks, sandbox_check
from covey.lab.doctor.result import Clock, Result, results_of
from covey.lab.plan.memory import forecast
from covey.lab.plan.model_shape import shape_of
from covey.lab.plan.task_facts import task_facts
from covey.models.gguf import find_gguf, import_gguf
from covey.records.provenance import describe_environment
from covey.records.trackers import Tracker
from covey.rollout.collect import collect_step
from covey.run import Run

SIZES = ((2e8, (4, 8, 48)), (1e9, (2, 4, 16)), (math.inf, (2, 2, 8)))
"""The size of the small training step by the largest number of parameters that a CPU trains in
time: numbers of prompts, of completions per prompt, and of tokens per completion. A GPU takes the
first."""
SLOW_FLOPS = 2e10
"""Operations per second of a slow CPU."""
SHOWN = ("covey", "torch", "transformers", "peft", "vllm")


def small(config: Config, size: tuple[int, int, int] = SIZES[0][1]) -> Config:
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
    on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    short = small(config, next(size for most, size in SIZES if on_gpu or shape.parameters <= most))
    rollout = short.rollout
    tokens = rollout.prompts_per_step * rollout.group_size * rollout.max_tokens
    # A first guess, which measurements replace.
    clock.pace.rollout = clock.pace.update = 6 * shape.parameters * tokens / SLOW_FLOPS
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
