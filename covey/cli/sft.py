"""`covey sft`: supervised fine-tuning on worked solutions, before reinforcement learning."""

from __future__ import annotations

from pathlib import Path

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
from covey.cli.training_run import (
    NewRun,
    Resume,
    ResumeStep,
    check_alone,
    check_new,
    resume_run,
    train_run,
)


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
    """Fine-tune a model (SFT) on worked solutions from the task or from a file.

    Reinforcement learning needs a model that already solves some prompts. SFT teaches a model the
    format and the steps of a solution. After SFT, continue with `covey train --model
    RUN/checkpoints/STEP`.
    """
    if resume is not None:
        check_alone(source, model, run, smoke)
        return resume_run(resume, step, overrides, context.obj, sft=True)
    check_new(run, step)
    settings = settings_of(overrides, model)
    label = source_of(source, settings)
    with waiting(STARTING):
        config = resolved(label, settings, smoke=smoke)
    name = f"{Path(label or config.task.name.replace(':', '.')).stem}-sft"
    train_run(config, run or name, context.obj, sft=True, source=label)
