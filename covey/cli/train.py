"""`covey train`: train a model with reinforcement learning, or resume a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    tell_defaults,
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
from covey.config import to_toml, toml_value
from covey.config.smoke import changed_by_smoke

SkipBadRows = Annotated[
    bool,
    typer.Option(
        "--skip-bad-rows", help="Skip invalid rows of the dataset, and print how many were skipped."
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="First repeat the training steps between the two newest checkpoints, and stop if the "
        "resulting weights differ from the newest checkpoint. Needs --resume.",
    ),
]
AllowChangedReward = Annotated[
    bool,
    typer.Option(
        "--allow-changed-reward",
        help="Resume although the code of the reward has changed since the last step. The change "
        "is recorded in the run folder. Needs --resume.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run trainer ranks, engines and scoring on Ray, with the settings of the section "
        "'cluster'. ADDRESS overrides cluster.address: 'local' starts Ray on this machine, and "
        "'auto' finds a running Ray cluster.",
    ),
]


def train_command(
    context: typer.Context,
    source: Source = None,
    overrides: Overrides = None,
    model: Model = None,
    run: NewRun = None,
    resume: Resume = None,
    step: ResumeStep = None,
    verify: Verify = False,
    allow_changed_reward: AllowChangedReward = False,
    skip_bad_rows: SkipBadRows = False,
    smoke: Smoke = False,
    ray: Ray = None,
    trust: Trust = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print all settings, including defaults, and exit."),
    ] = False,
) -> None:
    """Train a model with group-relative reinforcement learning, or resume a run.

    The run folder contains the configuration, metrics, evaluations, completions and checkpoints.
    Ctrl-C saves a checkpoint and prints how to resume. The exit code is 130 after Ctrl-C, 143
    after SIGTERM, 129 after SIGHUP and 138 after SIGUSR1.
    """
    if resume is not None:
        check_alone(source, model, run, skip_bad_rows, smoke, ray)
        return resume_run(
            resume,
            step,
            overrides,
            context.obj,
            verify=verify,
            print_config=print_config,
            allow_changed_reward=allow_changed_reward,
        )
    new = None if print_config else run
    check_new(new, step, verify=verify, changed_reward=allow_changed_reward)
    settings = settings_of(overrides, model) + ["task.skip_bad_rows=true"] * skip_bad_rows
    settings += [] if ray is None else [f"cluster.address={toml_value(ray)}"]
    label = source_of(source, settings)
    with waiting(STARTING):
        runs = not print_config
        config = resolved(label, settings, smoke=smoke, model=runs, imports=runs)
    if print_config:
        tell_defaults(label, config)
        return typer.echo(to_toml(config), nl=False)
    not_own = changed_by_smoke(label, settings) if smoke else frozenset()
    name = f"{Path(label).stem if label else config.task.name}-{config.objective.name}"
    # Some systems allow no colon in a file name.
    train_run(config, run or name.replace(":", "."), context.obj, source=label, not_own=not_own)
