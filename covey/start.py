"""Starts or resumes a run: joins the ranks, builds the components, and locks the run folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from covey.config import Config, load_config, to_toml
from covey.config.resolve import resolve
from covey.config.schema import about
from covey.errors import ConfigError
from covey.notices import notice
from covey.parallel.join import joined_world
from covey.parallel.world import World
from covey.passed_objects import OBJECTS
from covey.records.files import append_line, write_text
from covey.records.folder import (
    CHANGES,
    RunFolder,
    changed_settings,
    next_run_path,
    reward_of_run,
    set_aside_failed,
)
from covey.records.provenance import describe_environment
from covey.records.resume import Start, resume_command, start_of
from covey.run import Run
from covey.stopping import StopSignal, stop_signal

REPEATS_SECONDS = 2.0
"""Number of seconds in which a second signal is ignored. A rank receives Ctrl-C twice: directly,
and from torchrun."""
Change = tuple[Any, Any]
"""The old and the new value of a setting."""


class Opened(NamedTuple):
    """A run that is ready to train: it is built, and its folder is locked."""

    run: Run
    start: Start
    stop: StopSignal


@contextmanager
def opened_run(
    config: Config,
    build: Callable[[Config, World], Run],
    target: RunFolder | Path | str,
    *,
    step: int | None = None,
    changed: Mapping[str, Change] | None = None,
    allow_changed_reward: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Opened]:
    """Join the other ranks, build the components of a run, and create or lock its folder.

    `target` is the run to resume, or the path of a new run's folder. If `target` is a string and
    not a `Path`, the new folder is `runs/TARGET-NUMBER`. A resumed run continues from the
    checkpoint of `step`, or from the newest checkpoint if `step` is None. `changed` are the
    settings that the user has changed for the resumed run. Without `allow_changed_reward`, a run
    whose reward has another identity than before is not resumed.
    """
    with ExitStack() as stack:
        world = stack.enter_context(joined_world(config, say))
        start = Start()
        if isinstance(target, RunFolder):
            folder = target
            stack.enter_context(locked_by_main(folder, world))
            start = world.from_main(lambda: start_of(folder, step, save_every=config.save.every))
            check_length(config, start.step, sft=folder.is_sft)
        run = stack.enter_context(closing(build(config, world)))
        if isinstance(target, RunFolder):
            rewards = changed_reward(folder, run, allowed=allow_changed_reward)
            if world.is_main:
                record_changes(folder, run, start.step, changed or {}, rewards)
        else:  # building may fail, so the folder is created only now
            path = next_run_path(Path("runs"), target) if isinstance(target, str) else target
            folder = created_run(run, path)
            stack.enter_context(locked_by_main(folder, world))
        stop = stack.enter_context(_signals(several=world.size > 1))
        run.folder = folder
        yield Opened(run, start, stop)


def _signals(*, several: bool) -> AbstractContextManager[StopSignal]:
    """Turn Ctrl-C and SIGTERM into a stop request; only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        return nullcontext(StopSignal())
    return stop_signal(repeats=REPEATS_SECONDS if several else 0.0)


def created_run(run: Run, path: Path) -> RunFolder:
    """Create the run folder on rank 0, and return it on every rank."""

    def create() -> RunFolder:
        device, threads = str(run.policy.model.device), torch.get_num_threads()
        environment = {
            **describe_environment(run.config.seed, device, threads),
            "ranks": run.world.size,
            "reward": run.scorer.identity,
            "evaluation_reward": run.eval_scorer.identity,
            "notes": list(run.notes),
            **run.facts,
        }
        if note := set_aside_failed(path):
            notice(note)
        return RunFolder.create(path, to_toml(run.config), environment)

    return run.world.from_main(create)


def resume_hint(run: RunFolder, config: Config) -> str:
    """Return the shell command or the Python call that resumes a run."""
    passed = (arg for where, arg, name in OBJECTS if getattr(config, where).name == name)
    again = "".join(f", {argument}=..." for argument in passed)
    return f"covey.train(resume={str(run.path)!r}{again})" if again else resume_command(run)


def locked_by_main(folder: RunFolder, world: World) -> AbstractContextManager[None]:
    """Return a context in which rank 0 locks the run folder for all ranks."""
    return folder.locked() if world.is_main else nullcontext()


# Check which settings change when a run is resumed, and refuse changes that are not allowed.
#
# Settings that determine the data, the model or the algorithm of a run may not change. Settings
# of run length, learning rate, limits, evaluations and saving may change.

FIXED = {key: facts.resume for key, facts in about() if facts.resume}
"""Settings and sections that may not change when a run is resumed, each with the reason."""


def resumed_config(
    run: RunFolder, overrides: Iterable[str] = (), **options: Any
) -> tuple[Config, dict[str, Change]]:
    """Return a run's settings with `overrides` applied, and the settings that changed.

    Raise ConfigError if a changed setting is in FIXED. `options` are passed to `resolve`.
    """
    file, overrides = str(run.config_file), list(overrides)
    then = resolve(load_config(file), **options)
    if not overrides:
        return then, {}
    now = resolve(load_config(file, overrides), **options)
    changed = changed_settings(then.model_dump(), now.model_dump())
    for key in changed:
        why = FIXED.get(key) or FIXED.get(key.partition(".")[0])
        if why is not None:
            raise ConfigError(f"the resumed run {run.path} cannot change {key}: {why}")
    if "train.steps" in changed and now.train.stop_after.epochs:
        raise ConfigError(
            f"the resumed run {run.path} cannot change train.steps, because "
            f"train.stop_after.epochs = {now.train.stop_after.epochs:g} determines train.steps; "
            "change train.stop_after"
        )
    return now, changed


def check_length(config: Config, step: int, *, sft: bool = False) -> None:
    """Raise ConfigError if the run has already taken more steps than its settings allow."""
    name, steps = "train.steps", config.train.steps if config.train.budget == "steps" else 0
    if sft:
        name, steps = "sft.steps", config.sft.steps
    if 0 < steps < step:
        raise ConfigError(
            f"{name} = {steps}, but the run is already at step {step}; raise {name}, or resume "
            "from an earlier checkpoint"
        )


def changed_reward(folder: RunFolder, run: Run, *, allowed: bool) -> Change | None:
    """Return the identities of a run's reward before and now if they differ.

    Raise ConfigError if the reward has changed and the change is not allowed.
    """
    before, now = reward_of_run(folder), run.scorer.identity
    if folder.is_sft or not before or before == now:
        return None
    if not allowed:
        raise ConfigError(
            f"the resumed run {folder.path} cannot change the code or the options of its reward, "
            f"which was {before} and is now {now}: {FIXED['reward']}, restore the reward, or add "
            "--allow-changed-reward (in Python, allow_changed_reward=True)"
        )
    return before, now


def record_changes(
    folder: RunFolder,
    run: Run,
    step: int,
    changed: Mapping[str, Change],
    rewards: Change | None = None,
) -> None:
    """Write the new settings to config.toml, and append the changes to changes.jsonl."""
    if changed or rewards:
        plain = json.loads(json.dumps(changed, default=str))
        reward = {} if rewards is None else {"reward": list(rewards)}
        line = {"step": step, "settings": plain, **reward, **run.facts}
        append_line(folder.path / CHANGES, line)
        write_text(folder.config_file, to_toml(run.config))


def changes_note(changed: Mapping[str, Change]) -> str:
    """Return a line that tells the user which settings changed."""
    return "resumed with " + ", ".join(
        f"{key} = {new} (was {old})" for key, (old, new) in changed.items()
    )
