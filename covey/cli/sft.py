"""`covey sft`: supervised fine-tuning on worked solutions, before reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from covey.cli.startup import (
    STARTING,
    Model,
    Overrides,
    Smoke,
    Source,
    Trust,
    resolved,
    settings_of,
    source_of,
    waiting,
)
from covey.cli.training_run import NewRun, Resume, ResumeStep, Training, check_alone, check_new

if TYPE_CHECKING:
    from covey.config import Config
    from covey.training.parallel.world import World
    from covey.training.sft import SftParts


def sft_command(
    context: typer.Context,
    source: Source = None,
    overrides: Overrides = None,
    model: Model = None,
    run: NewRun = None,
    resume: Resume = None,
    step: ResumeStep = None,
    smoke: Smoke = False,
    trust: Trust = None,
) -> None:
    """Fine-tune a model (SFT) on worked solutions, which come from the task or from a file.

    Reinforcement learning needs a model that already solves some prompts. SFT teaches the model
    the format and the steps of a solution. To continue with reinforcement learning after SFT, run
    `covey train --model RUN/checkpoints/STEP`.
    """
    sft = Training(
        command="sft",
        build=_build,
        environment=lambda _: {"kind": "sft"},
        loop=_loop,
        arguments=context.obj,
    )
    if resume is not None:
        check_alone(source, model, run, smoke)
        return sft.resume(resume, step, overrides)
    check_new(run, step)
    settings = settings_of(overrides, model)
    label = source_of(source, settings)
    with waiting(STARTING):
        config = resolved(label, settings, smoke=smoke)
    name = f"{Path(label or config.task.name.replace(':', '.')).stem}-sft"
    sft.start(config, label, run, name)


def _build(config: Config, world: World) -> SftParts:
    from covey.training.sft import build_sft

    return build_sft(config, world)


def _loop(parts: SftParts, folder: Any, reporter: Any, stop: Any, start: Any) -> tuple[int, int]:
    from covey.training.sft import run_sft

    done = run_sft(parts, folder, [reporter], stop, start)
    return done, parts.steps if stop.by_signal else done
