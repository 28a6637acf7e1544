"""Runs all checks of `covey doctor` on a small version of the user's own run."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from covey.config import Config, parse_config, to_toml
from covey.config.resolve import reward_of, task_of
from covey.lab.checks.policy import ARRIVES, engine_checks, gradient_checks, weights_check
from covey.lab.checks.result import Clock, Result, results_of
from covey.lab.compare.launch import peak_memory
from covey.lab.plan.forecast import Forecast, size_text
from covey.lab.plan.memory import forecast
from covey.lab.plan.model_shape import shape_of
from covey.lab.plan.task_facts import task_facts
from covey.lab.rewards.checks import Lab, examine
from covey.loop import train
from covey.models.gguf import find_gguf, import_gguf
from covey.records.files import DIGESTS_FILE
from covey.records.folder import RunFolder
from covey.records.provenance import describe_environment
from covey.records.trackers import Tracker
from covey.rewards.identity import identity
from covey.rollout.collect import collect_step
from covey.run import Run
from covey.sandbox import program as sandbox
from covey.sandbox.limits import Case
from covey.sandbox.program import run_program
from covey.scoring import Pool
from covey.stopping import StopSignal

SIZES = ((2e8, (4, 8, 48)), (1e9, (2, 4, 16)), (math.inf, (2, 2, 8)))
"""The size of the small training step by the largest number of parameters that a CPU trains in
time: numbers of prompts, of completions per prompt, and of tokens per completion. A GPU takes the
first."""
SLOW_FLOPS = 2e10
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
    found = describe_environment(config.seed, config.model.device, torch.get_num_threads())
    packages = {name: found["packages"].get(name) for name in SHOWN}
    listed = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    yield Result(name="versions", passed=True, figure=f"Python {found['python']}, {listed}")


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


# Checks the reward, the sandbox, exact resume, memory and step time on this machine.


PROMPTS = 8
OVER = 1.5
"""The largest allowed ratio of measured to forecast memory. Measured memory above the forecast is
normal, because earlier checks leave some memory in use.
"""
WORKSPACES = 256 * 2**20
"""The bytes that GPU libraries allocate through torch, which the memory forecast does not include.
With a tiny model, GPU libraries need more memory than the model's own tensors.
"""
CODE_ENVIRONMENTS = ("python", "code_repair")
PROBE = """
import os, socket

def reach(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return "network"
    except OSError:
        return ""

def write():
    try:
        open("/usr/covey-doctor", "w").close()
        return "the system's files"
    except OSError:
        return ""

def look(file, port):
    found = ["files"] if os.path.exists(file) else []
    found += ["environment"] if "PATH_OF_DOCTOR" in os.environ else []
    return ", ".join([*found, *filter(None, [reach(port), write()])])
"""
"""A program that lists the forbidden resources it can reach; in the sandbox, it must reach none."""


def reward_checks(config: Config) -> Iterator[Result]:
    """Check the reward; yield one result for determinism, and one result for all other checks."""
    reward = reward_of(config)
    prompts = list(task_of(config).held_out()[:PROMPTS])
    limits = config.scoring
    pool = Pool(
        reward,
        identity(config.reward.name, reward),
        workers=2,
        timeout=limits.timeout,
        gigabytes=limits.gigabytes,
    )
    with closing(pool):
        pool.start()
        checks = examine(Lab(reward=reward, scorer=pool), prompts)
    (same,) = (check for check in checks if check.name == "determinism")
    yield Result(
        name="reward: determinism",
        passed=same.passed,
        figure=same.figure,
        remedy="the reward depends on more than the completion (time, order, a random number, a "
        "server), so a run cannot be repeated or resumed exactly",
    )
    others = [check for check in checks if check is not same]
    failed = [check for check in others if not check.passed]
    yield Result(
        name="reward: lab",
        passed=not failed,
        figure=f"{len(others) - len(failed)} of {len(others)} checks pass"
        + "".join(f"; {check.name}: {check.figure}" for check in failed[:3]),
        remedy="`covey rewards lab` shows which completions are scored wrongly",
    )


def sandbox_check(config: Config) -> Iterator[Result]:
    name, remedy = "sandbox", "apt install bubblewrap; in a container, allow user namespaces"
    if _asks_unsafe(config.reward.options):
        figure = "reward: unsafe = true runs programs of the model without protection"
        yield Result(name=name, passed=False, figure=figure, remedy="remove unsafe = true")
        return
    if problem := sandbox.isolation_problem():
        needed = config.environment.name in CODE_ENVIRONMENTS
        try:
            reward_of(config)
        except Exception as error:
            needed |= "sandbox" in str(error)
        figure = problem if needed else f"{problem}; this configuration does not need it"
        yield Result(name=name, passed=False if needed else None, figure=figure, remedy=remedy)
        return
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
        os.environ["PATH_OF_DOCTOR"] = file.name
        call = f"look({file.name!r}, {server.getsockname()[1]})"
        (outcome,) = run_program(PROBE, [Case(call=call)])
        del os.environ["PATH_OF_DOCTOR"]
    reached = (outcome.value or b"nothing was returned").decode().strip("'\"")
    figure = f"a program reached {reached or 'no files, environment or network'}"
    yield Result(name=name, passed=not reached, figure=figure, remedy=remedy)


def _asks_unsafe(options: Any) -> bool:
    if isinstance(options, dict):
        return options.get("unsafe") is True or any(map(_asks_unsafe, options.values()))
    return False


def resume_checks(
    config: Config, folder: Path, expected: Forecast, clock: Clock
) -> Iterator[Result]:
    """Check that a resumed run writes the same checkpoint, and check memory and step time."""
    if skipped := clock.skips("resume, memory, time", clock.pace.resume):
        yield skipped
        return
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # ask Linux to reset the peak memory
        Path("/proc/self/clear_refs").write_text("5")
    whole = RunFolder.create(folder / "whole", to_toml(config), {})
    _trained(config, whole)
    used = peak_memory(torch.device(expected.device.kind))
    resumed = RunFolder(folder / "resumed")
    last = f"{2:06d}"  # the checkpoint that the resumed run must write again
    shutil.copytree(whole.path, resumed.path, ignore=shutil.ignore_patterns(last))
    lines = (resumed.path / "checkpoints.jsonl").read_text(encoding="utf-8").splitlines()
    (resumed.path / "checkpoints.jsonl").write_text(f"{lines[0]}\n", encoding="utf-8")
    _trained(config, resumed)
    ends = [run.path / "checkpoints/000002" / DIGESTS_FILE for run in (whole, resumed)]
    digests = [set(end.read_text(encoding="utf-8").splitlines()) for end in ends]
    other = sorted(line.split()[1] for line in digests[0] ^ digests[1])
    exact = config.model.deterministic or not torch.cuda.is_available()
    figure = "bit for bit" if not other else f"other bits in {', '.join(sorted(set(other)))}"
    yield Result(
        name="resume",
        passed=True if not other else False if exact else None,
        figure=f"two steps, stopped after the first: {figure}",
        remedy="the run depends on state that checkpoints do not save; look for state in your own "
        "reward, task or algorithm",
    )
    yield _memory(expected, used)
    first, second = whole.steps()
    guess = first["time/total"] * max(1, second["tokens"] - first["tokens"]) / first["tokens"]
    taken = second["time/total"]
    yield Result(
        name="time",
        passed=taken <= 5 * guess,
        figure=f"step 2 took {taken:.1f} s, forecast {guess:.1f} s from step 1",
        remedy="steps do not take the same time: another process may use this machine",
    )


def _trained(config: Config, folder: RunFolder) -> None:
    with closing(Run.build(config)) as run:
        train(run, folder, [], StopSignal())


def _memory(expected: Forecast, used: int) -> Result:
    on_gpu = expected.device.kind == "cuda"
    bytes_expected = expected.tensors if on_gpu else expected.peak
    return Result(
        name="memory",
        passed=used <= OVER * bytes_expected + (WORKSPACES if on_gpu else 0),
        figure=f"{size_text(used)}, forecast {size_text(bytes_expected)}",
        remedy="`covey plan` forecasts too little memory for this model; leave more memory free",
    )
