"""All checks of `covey doctor`, on a small version of the user's own run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from covey.analysis.doctor.engine import engine_checks, weights_check
from covey.analysis.doctor.gradient import gradient_checks
from covey.analysis.doctor.machine import PROMPTS, resume_checks, reward_checks, sandbox_check
from covey.analysis.doctor.result import Result, results_of
from covey.config import Config, parse_config
from covey.rollout.source import SynchronousSource
from covey.run.provenance import describe_environment
from covey.run.trackers import Tracker
from covey.training.build import Parts, assemble
from covey.types import Group

MOST = {"prompts_per_step": 4, "group_size": 8, "max_tokens": 48}
"""Upper limits for the size of the training steps in `covey doctor`."""
SHOWN = ("covey", "torch", "transformers", "peft", "vllm")


def small(config: Config) -> Config:
    """Return the same run with two small steps and without dropout."""
    data = config.model_dump()
    data["rollout"] |= {name: min(data["rollout"][name], most) for name, most in MOST.items()}
    rows = data["rollout"]["prompts_per_step"] * data["rollout"]["group_size"]
    data["train"] |= {"steps": 2, "stop_after": {}, "stop_on": [], "patience": 0}
    data["train"]["mini_batches"] = min(data["train"]["mini_batches"], 2, rows)
    data["evaluate"] |= {"every": 0, "prompts": PROMPTS}
    data["save"] |= {"every": 1, "keep": 2, "best": "", "samples_every": 0}
    data["adapter"]["dropout"] = 0.0
    data["trackers"] = []
    return parse_config(data)


def examine_run(config: Config) -> Iterator[Result]:
    """Check a resolved configuration; yield the result of each check as soon as it is done."""
    short = small(config)
    yield from results_of("training", lambda: _policy_checks(short))
    yield from results_of("reward: lab", lambda: reward_checks(short))
    yield from results_of("sandbox", lambda: sandbox_check(short))
    with tempfile.TemporaryDirectory(prefix="covey-doctor-") as folder:
        yield from results_of("resume", lambda: resume_checks(short, Path(folder)))
    yield _versions(config)


def _policy_checks(config: Config) -> Iterator[Result]:
    """Check engine and gradient on the completions of one step; this changes the weights."""
    with closing(assemble(config)) as parts:
        groups = _groups(parts)
        try:
            yield from results_of("engine", lambda: engine_checks(parts, groups))
            yield from results_of("gradient", lambda: gradient_checks(parts, groups))
            yield from results_of("engine: new weights", lambda: weights_check(parts, groups))
        finally:
            parts.engine.close()


def _groups(parts: Parts) -> list[Group]:
    return list(SynchronousSource(parts, Tracker()).groups(1, share=0.0).collected.groups)


def _versions(config: Config) -> Result:
    found = describe_environment(config.seed, config.model.device, torch.get_num_threads())
    packages = {name: found["packages"].get(name) for name in SHOWN}
    listed = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return Result(name="versions", passed=True, figure=f"Python {found['python']}, {listed}")
