"""`covey train` and `covey sft`: train a model, or resume a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

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
from covey.config import Config, to_toml, toml_value
from covey.config.smoke import changed_by_smoke
from covey.errors import ConfigError, RunError
from covey.records.folder import RunFolder, check_new_run
from covey.screen import echo

if TYPE_CHECKING:
    from covey.parallel.world import World
    from covey.run import Run
    from covey.start import Change


NewRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="Create this run folder instead of runs/NAME-N, where N is the next free number.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Resume this run with its saved settings. --set can change some of the settings.",
    ),
]
ResumeStep = Annotated[
    int | None,
    typer.Option(
        "--step",
        min=0,
        metavar="N",
        help="Resume from the checkpoint of step N instead of the newest checkpoint. Step 0 starts "
        "the run from the beginning. Records of later steps are moved to RUN/superseded. Needs "
        "--resume.",
    ),
]


def train_run(
    config: Config,
    target: RunFolder | Path | str,
    arguments: Sequence[str],
    *,
    sft: bool = False,
    source: str | None = None,
    not_own: Collection[str] = (),
    step: int | None = None,
    changed: Mapping[str, Change] | None = None,
    allow_changed_reward: bool = False,
) -> NoReturn:
    """Train with RL or SFT, print the results, and exit.

    `opened_run` describes `target`. If Ray starts the ranks, each rank gets the command-line
    `arguments`. `source` is the configuration file or recipe of a new run. If `source` is None,
    print the most important defaults. `not_own` contains the settings that --smoke changed.
    """
    _start_ranks(config, arguments, sft=sft)
    from covey.lab.start_notes import console_with_notes
    from covey.loop import train
    from covey.run import Run
    from covey.sft import build_sft
    from covey.start import changes_note, opened_run

    def build(config: Config, world: World) -> Run:
        with waiting(f"loading {config.model.path}"):
            return build_sft(config, world) if sft else Run.build(config, world=world)

    say = partial(echo, err=True)
    opened = opened_run(
        config,
        build,
        target,
        step=step,
        changed=changed,
        allow_changed_reward=allow_changed_reward,
        say=say,
    )
    with opened as ready:
        run, stop, main = ready.run, ready.stop, ready.run.world.is_main
        if main and changed:
            echo(changes_note(changed))
        if main and not isinstance(target, RunFolder):
            tell_defaults(source, config)
        reporter = console_with_notes(ready, quiet=not main, not_own=not_own)
        done = train(run, run.folder, [reporter], stop, ready.start)
        command, steps = "sft" if sft else "train", run.budget.settings.steps
        # A budget of tokens or optimizer steps may end before train.steps, so only a signal leaves
        # steps undone.
        steps = steps if stop.by_signal else done
        reporter.finished(done, steps, stop.received, command=command)
    raise typer.Exit(stop.exit_code if done < steps else 0)


def resume_run(
    path: Path,
    step: int | None,
    overrides: list[str] | None,
    arguments: Sequence[str],
    *,
    sft: bool = False,
    verify: bool = False,
    print_config: bool = False,
    allow_changed_reward: bool = False,
) -> None:
    """Resume a run with the run's own settings, changed by `overrides`.

    With `verify`, first repeat the steps before the newest checkpoint, and raise RunError if the
    resulting weights differ from the checkpoint. With `print_config`, only print the settings.
    """
    folder = RunFolder.open(path)
    folder.check_kind(sft=sft)
    with waiting(STARTING):
        from covey.start import resumed_config

        config, changed = resumed_config(folder, overrides or (), imports=not print_config)
    if print_config:
        return typer.echo(to_toml(config), nl=False)
    if verify:
        with waiting("computing the last saved step again"):
            from covey.lab.explain.recorded import recomputed

            result = recomputed(folder)
        if result.passed is False:
            raise RunError(f"--verify: {result.figure}; {result.remedy}")
        echo(f"{'verified' if result.passed else 'not verified'}: {result.figure}")
    train_run(
        config,
        folder,
        arguments,
        sft=sft,
        step=step,
        changed=changed,
        allow_changed_reward=allow_changed_reward,
    )


def _start_ranks(config: Config, arguments: Sequence[str], *, sft: bool) -> None:
    from covey.cluster.actors import ray_starts_ranks, run_in_ranks
    from covey.config.check import check_start
    from covey.parallel.lifeline import Reported

    if not ray_starts_ranks(config):
        return
    check_start(config, config.cluster.trainers, sft=sft)  # before Ray and the ranks start
    if code := run_in_ranks(config, arguments):
        reported = Reported("")  # a rank has printed the error
        reported.exit_code = code
        raise reported
    raise typer.Exit


def check_new(
    run: Path | None, step: int | None, *, verify: bool = False, changed_reward: bool = False
) -> None:
    """Raise an error if a new run is given an option of a resume or a run folder with files."""
    if changed_reward:
        raise ConfigError("--allow-changed-reward needs --resume RUN; leave it out for a new run")
    if verify:
        raise ConfigError(
            "--verify needs --resume RUN, because a new run has no checkpoint to verify"
        )
    if step is not None:
        raise ConfigError(
            f"--step {step} chooses the checkpoint to resume from, and needs --resume RUN; to set "
            "the number of training steps, use --set train.steps=N"
        )
    if run is not None:
        check_new_run(run)


def check_alone(*given: object) -> None:
    if any(given):
        raise ConfigError(
            "--resume uses the saved settings of the run; leave out CONFIG and options such as "
            "--model, and change settings with --set"
        )


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
