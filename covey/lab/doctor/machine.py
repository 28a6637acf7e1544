"""Checks the reward, the sandbox, exact resume, memory and step time on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from covey.config import Config, to_toml
from covey.config.resolve import reward_of, task_of
from covey.lab.compare.run_process import peak_memory
from covey.lab.doctor.result import Clock, Result
from covey.lab.plan.forecast import Forecast, size_text
from covey.lab.rewards.checks import Lab, examine
from covey.loop import train
from covey.records.files import DIGESTS_FILE
from covey.records.folder import RunFolder
from covey.rewards.identity import identity
from covey.run import Run
from covey.sandbox import program as sandbox
from covey.sandbox.limits import Case
from covey.sandbox.program import run_program
from covey.scoring import Pool
from covey.stopping import StopSignal

PROMPTS = 8
"""The number of held-out prompts with which the reward is tested."""
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
    """Check that programs in the sandbox cannot reach files, environment variables or the
    network."""
    name, remedy = "sandbox", "apt install bubblewrap; in a container, allow user namespaces"
    if _asks_unsafe(config.reward.options):
        figure = "reward: unsafe = true runs programs of the model without protection"
        yield Result(name=name, passed=False, figure=figure, remedy="remove unsafe = true")
        return
    if problem := sandbox.isolation_problem():
        needed = _needs_sandbox(config)
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


def _needs_sandbox(config: Config) -> bool:
    if config.environment.name in CODE_ENVIRONMENTS:
        return True
    try:
        reward_of(config)
    except Exception as error:
        return "sandbox" in str(error)
    return False


def resume_checks(
    config: Config, folder: Path, expected: Forecast, clock: Clock
) -> Iterator[Result]:
    """Check that a resumed run writes the same checkpoint, and check memory and step time."""
    if skipped := clock.skips("resume, memory, time", clock.pace.resume):
        yield skipped
        return
    _reset_peak()
    whole = RunFolder.create(folder / "whole", to_toml(config), {})
    _trained(config, whole)
    used = peak_memory(torch.device(expected.device.kind))
    resumed = RunFolder(folder / "resumed")
    last = f"{2:06d}"  # the checkpoint that the resumed run must write again
    shutil.copytree(whole.path, resumed.path, ignore=shutil.ignore_patterns(last))
    lines = (resumed.path / "checkpoints.jsonl").read_text(encoding="utf-8").splitlines()
    (resumed.path / "checkpoints.jsonl").write_text(f"{lines[0]}\n", encoding="utf-8")
    _trained(config, resumed)
    yield _same_end(config, whole, resumed)
    yield _memory(expected, used)
    yield _time(whole)


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # ask Linux to reset the peak memory
        Path("/proc/self/clear_refs").write_text("5")


def _trained(config: Config, folder: RunFolder) -> None:
    with closing(Run.build(config)) as run:
        train(run, folder, [], StopSignal())


def _same_end(config: Config, whole: RunFolder, resumed: RunFolder) -> Result:
    ends = [run.path / "checkpoints/000002" / DIGESTS_FILE for run in (whole, resumed)]
    digests = [set(end.read_text(encoding="utf-8").splitlines()) for end in ends]
    other = sorted(line.split()[1] for line in digests[0] ^ digests[1])
    exact = config.model.deterministic or not torch.cuda.is_available()
    figure = "bit for bit" if not other else f"other bits in {', '.join(sorted(set(other)))}"
    return Result(
        name="resume",
        passed=True if not other else False if exact else None,
        figure=f"two steps, stopped after the first: {figure}",
        remedy="the run depends on state that checkpoints do not save; look for state in your own "
        "reward, task or algorithm",
    )


def _memory(expected: Forecast, used: int) -> Result:
    on_gpu = expected.device.kind == "cuda"
    bytes_expected = expected.tensors if on_gpu else expected.peak
    return Result(
        name="memory",
        passed=used <= OVER * bytes_expected + (WORKSPACES if on_gpu else 0),
        figure=f"{size_text(used)}, forecast {size_text(bytes_expected)}",
        remedy="`covey plan` forecasts too little memory for this model; leave more memory free",
    )


def _time(run: RunFolder) -> Result:
    first, second = run.steps()
    expected = first["time/total"] * max(1, second["tokens"] - first["tokens"]) / first["tokens"]
    taken = second["time/total"]
    return Result(
        name="time",
        passed=taken <= 5 * expected,
        figure=f"step 2 took {taken:.1f} s, forecast {expected:.1f} s from step 1",
        remedy="steps do not take the same time: another process may use this machine",
    )
