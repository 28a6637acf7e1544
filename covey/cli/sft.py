"""`covey sft`: supervised fine-tuning on worked solutions, before reinforcement learning."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli.startup import (
    STARTING,
    Model,
    Overrides,
    ResumeStep,
    Smoke,
    Source,
    Trust,
    check_no_step,
    resolved,
    settings_of,
    tell_notes,
    waiting,
)
from covey.config import Config, to_toml
from covey.errors import ConfigError, RunError
from covey.run.folder import RunFolder, check_new_run, next_run_path
from covey.run.resume import Start, start_of
from covey.stopping import stop_signal

if TYPE_CHECKING:
    from covey.training.sft import SftParts

KIND = "sft"


def sft_command(
    source: Source = None,
    overrides: Overrides = None,
    model: Model = None,
    run: Annotated[
        Path | None, typer.Option(help="The run folder to create. Default: the next runs/NAME-N.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Resume this SFT run, with its own settings."),
    ] = None,
    step: ResumeStep = None,
    smoke: Smoke = False,
    trust: Trust = None,
) -> None:
    """Fine-tune a model on worked solutions: the task's own, or a file of prompts and completions.

    Reinforcement learning only reinforces what a model already does now and then; SFT teaches it
    the format and the steps of a solution. Continue with `covey train --model RUN/checkpoints/...`.
    """
    if resume is not None:
        if source or overrides or model or run or smoke:
            raise ConfigError("--resume takes its settings from the run; give it alone")
        _resume(resume, step)
        return
    check_no_step(step)
    if run is not None:
        check_new_run(run)
    settings = settings_of(overrides, model)
    with waiting(STARTING):
        config = resolved(source or "arithmetic", settings, smoke=smoke)
    _start(config, run, source or "arithmetic")


def _start(config: Config, path: Path | None, label: str) -> None:
    import torch

    from covey.run.provenance import describe_environment

    parts = _assembled(config)
    path = path or next_run_path(Path("runs"), f"{Path(label).stem}-{KIND}")
    environment = describe_environment(
        config.seed, str(parts.policy.model.device), torch.get_num_threads()
    )
    environment |= {"kind": KIND, "reward": parts.scorer.identity}
    with closing(parts.scorer):
        folder = RunFolder.create(path, to_toml(config), environment)
        with folder.locked():
            _run(parts, folder, Start())


def _assembled(config: Config) -> SftParts:
    from covey.training.sft import build_sft

    with waiting(f"loading {config.model.path}"):
        return build_sft(config)


def _resume(path: Path, step: int | None) -> None:
    folder = RunFolder.open(path)
    if not folder.is_sft:
        raise RunError(f"{path} is not an SFT run; resume it with: covey train --resume {path}")
    with waiting(STARTING):
        config = resolved(str(folder.config_file))
    with folder.locked():
        start = start_of(folder, step, save_every=config.save.every)
        parts = _assembled(config)
        with closing(parts.scorer):
            _run(parts, folder, start)


def _run(parts: SftParts, folder: RunFolder, start: Start) -> None:
    from covey.cli.screen import Screen
    from covey.run.trackers.console import console_tracker
    from covey.training.sft import run_sft

    reporter = console_tracker(folder, Screen(soft_wrap=True))
    tell_notes(reporter, folder, parts)
    with stop_signal() as stop:
        done = run_sft(parts, folder, [reporter], stop, start)
    reporter.finished(done, parts.steps, stop.received, command=KIND)
    if done < parts.steps:
        raise typer.Exit(stop.exit_code)
