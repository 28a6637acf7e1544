"""`covey train`: train a model with reinforcement learning, or resume a run."""

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
    tell_findings,
    tell_notes,
    waiting,
)
from covey.config import Config, to_toml, toml_value
from covey.config.smoke import changed_by_smoke
from covey.errors import ConfigError, RunError
from covey.run.folder import RunFolder, check_new_run, next_run_path
from covey.run.resume import Start, start_of
from covey.stopping import stop_signal

if TYPE_CHECKING:
    from covey.training.build import Parts


def train_command(
    source: Source = None,
    overrides: Overrides = None,
    model: Model = None,
    run: Annotated[
        Path | None, typer.Option(help="The run folder to create. Default: the next runs/NAME-N.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Resume this run, with its own settings.")
    ] = None,
    step: ResumeStep = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Skip and count unusable rows of the data.")
    ] = False,
    smoke: Smoke = False,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Engines in Ray actors: 'local' starts Ray here, 'auto' finds a cluster, or its "
            "address; sets cluster.address.",
        ),
    ] = None,
    trust: Trust = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved configuration and exit.")
    ] = False,
) -> None:
    """Train a model: sample groups of completions, score them, reinforce the better ones.

    The run folder holds configuration, metrics, evaluations, every completion and checkpoints.
    Ctrl-C saves a checkpoint and prints how to resume; the exit code is 130, after SIGTERM 143.
    """
    if resume is not None:
        if source or overrides or model or run or skip_bad_rows or smoke or ray:
            raise ConfigError("--resume takes its settings from the run; give it alone")
        _resume(resume, step, print_config)
        return
    check_no_step(step)
    if run is not None and not print_config:
        check_new_run(run)
    label, settings = source or "arithmetic", settings_of(overrides, model)
    settings += ["task.skip_bad_rows=true"] if skip_bad_rows else []
    settings += [] if ray is None else [f"cluster.address={toml_value(ray)}"]
    with waiting(STARTING):
        config = resolved(label, settings, smoke=smoke, imports=not print_config)
    if print_config:
        typer.echo(to_toml(config), nl=False)
    else:
        _start(config, run, label, changed_by_smoke(label, settings) if smoke else frozenset())


def _start(config: Config, path: Path | None, label: str, not_own: frozenset[str]) -> None:
    import torch

    from covey.run.provenance import describe_environment

    parts = _assembled(config)
    name = config.objective.name.replace(":", ".")  # some systems allow no colon in a file name
    path = path or next_run_path(Path("runs"), f"{Path(label).stem}-{name}")
    environment = describe_environment(
        config.seed, str(parts.policy.model.device), torch.get_num_threads()
    )
    environment["reward"] = parts.scorer.identity
    environment["reference"] = parts.reference.identity if parts.reference else None
    with closing(parts.scorer):
        folder = RunFolder.create(path, to_toml(config), environment)
        with folder.locked():
            _run(parts, folder, Start(), not_own)


def _assembled(config: Config) -> Parts:
    """Load everything a run needs, so that errors come before the run folder is created."""
    from covey.training.build import assemble

    with waiting(f"loading {config.model.path}"):
        return assemble(config)


def _resume(path: Path, step: int | None, print_config: bool) -> None:
    folder = RunFolder.open(path)
    if folder.is_sft:
        raise RunError(f"{path} is an SFT run; resume it with: covey sft --resume {path}")
    with waiting(STARTING):
        config = resolved(str(folder.config_file), imports=not print_config)
    if print_config:
        typer.echo(to_toml(config), nl=False)
        return
    with folder.locked():
        start = start_of(folder, step, save_every=config.save.every)
        parts = _assembled(config)
        with closing(parts.scorer):
            _run(parts, folder, start)


def _run(
    parts: Parts, folder: RunFolder, start: Start, not_own: frozenset[str] = frozenset()
) -> None:
    from covey.cli.screen import Screen
    from covey.rollout.prompts import prompt_notes
    from covey.run.trackers.console import console_tracker
    from covey.training.loop import train

    reporter = console_tracker(folder, Screen(soft_wrap=True))
    tell_notes(reporter, folder, parts)
    for note in prompt_notes(parts.policy.model, parts.train_prompts):
        reporter.note(note)
    if start.checkpoint is None:
        tell_findings(reporter, parts, not_own)
    with stop_signal() as stop:
        done = train(parts, folder, [reporter], stop, start)
    # A budget of tokens or updates ends where it ends; only a signal leaves steps undone.
    steps = parts.config.train.steps if stop.received else done
    reporter.finished(done, steps, stop.received)
    if done < steps:
        raise typer.Exit(stop.exit_code)
