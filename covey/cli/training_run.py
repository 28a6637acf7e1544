"""Start or resume a run: the code that `covey train` and `covey sft` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.cli.screen import Screen, echo
from covey.cli.startup import STARTING, tell_defaults, tell_notes, waiting
from covey.config import Config, to_toml
from covey.errors import ConfigError, RunError
from covey.run.folder import RunFolder, check_new_run, next_run_path
from covey.run.resume import Start, start_of
from covey.run.trackers import Tracker
from covey.stopping import StopSignal, stop_signal

if TYPE_CHECKING:
    from covey.training.build import Components
    from covey.training.parallel.world import World

REPEATS_SECONDS = 2.0
"""Seconds in which a second signal is ignored: Ctrl-C arrives directly and via torchrun."""

NewRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="The run folder to create. Default: runs/NAME-N with the next free number N.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help=(
            "Resume this run with its saved settings. Use --set to change some of the saved "
            "settings."
        ),
    ),
]
ResumeStep = Annotated[
    int | None,
    typer.Option(
        "--step",
        min=0,
        metavar="N",
        help=(
            "With --resume: resume from the checkpoint of step N, or restart the run if N is 0. "
            "The command moves the records of steps after N to RUN/superseded. Default: the "
            "newest checkpoint."
        ),
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A kind of training (RL or SFT): the functions that prepare a run and train the model."""

    command: str
    """`train` or `sft`."""
    build: Callable[[Config, World], Any]
    environment: Callable[[Any], dict[str, Any]]
    """A function that returns additional entries of environment.json."""
    loop: Callable[[Any, RunFolder, Tracker, StopSignal, Start], tuple[int, int]]
    """A function that trains, and returns the last step and the planned number of steps."""
    arguments: Sequence[str]
    """The command-line arguments, which Ray passes to each rank that it starts."""

    def start(self, config: Config, source: str | None, path: Path | None, name: str) -> None:
        """Create a run folder and train. Without `path`, the folder is runs/`name`-NUMBER.

        If no file or recipe (`source`) was given, print the most important defaults of the run.
        """
        from covey.training.run_start import created_run, locked_by_main

        self._start_ranks(config)
        with _joined(config) as world:
            parts = self._built(config, world)  # may fail, so the run folder is created later
            with closing(parts):
                chosen = path or next_run_path(Path("runs"), name)
                folder = created_run(parts, chosen, self.environment(parts))
                if world.is_main:
                    tell_defaults(source, config)
                with locked_by_main(folder, world):
                    code = self._run(parts, folder, Start())
        raise typer.Exit(code)

    def resume(
        self,
        path: Path,
        step: int | None,
        overrides: list[str] | None = None,
        *,
        verify: bool = False,
        print_config: bool = False,
    ) -> None:
        """Resume a run with its own settings plus overrides, or only print these settings.

        If `verify` is true, the steps before the newest checkpoint are repeated before the run
        resumes. The repeated steps must produce the same weights as in the newest checkpoint.
        """
        folder = RunFolder.open(path)
        kind, command = ("an SFT run", "sft") if folder.is_sft else ("not an SFT run", "train")
        if command != self.command:
            raise RunError(f"{path} is {kind}; resume it with: covey {command} --resume {path}")
        with waiting(STARTING):
            from covey.training.run_start import (
                changes_note,
                check_length,
                record_changes,
                resumed_config,
            )

            config, changed = resumed_config(folder, overrides or (), imports=not print_config)
        if print_config:
            return typer.echo(to_toml(config), nl=False)
        from covey.training.run_start import locked_by_main

        if verify:
            _verify(folder)
        self._start_ranks(config)
        with _joined(config) as world, locked_by_main(folder, world):
            start = world.from_main(lambda: start_of(folder, step, save_every=config.save.every))
            check_length(config, start.step, sft=folder.is_sft)
            parts = self._built(config, world)
            with closing(parts):
                if world.is_main and changed:
                    record_changes(folder, parts.config, start.step, changed)
                    echo(changes_note(changed))
                code = self._run(parts, folder, start)
        raise typer.Exit(code)

    def _start_ranks(self, config: Config) -> None:
        """If Ray must start the ranks, start them, wait for their end, and exit."""
        from covey.training.parallel.lifeline import Reported
        from covey.training.ray_actors import ray_starts_ranks, run_in_ranks

        if not ray_starts_ranks(config):
            return
        if code := run_in_ranks(config, self.arguments):
            reported = Reported("")  # a rank has printed the error
            reported.exit_code = code
            raise reported
        raise typer.Exit

    def _built(self, config: Config, world: World) -> Any:
        with waiting(f"loading {config.model.path}"):
            return self.build(config, world)

    def _run(self, parts: Components, folder: RunFolder, start: Start) -> int:
        """Train, and return the exit code."""
        from covey.run.trackers.console import console_tracker

        several = parts.world.size > 1
        reporter = console_tracker(folder, Screen(soft_wrap=True, quiet=not parts.world.is_main))
        tell_notes(reporter, folder, parts)
        with stop_signal(repeats=REPEATS_SECONDS if several else 0.0) as stop:
            done, steps = self.loop(parts, folder, reporter, stop, start)
        reporter.finished(done, steps, stop.received, command=self.command)
        return stop.exit_code if done < steps else 0


def _verify(run: RunFolder) -> None:
    """Repeat the steps before the newest checkpoint; raise RunError if the weights differ."""
    with waiting("computing the last saved step again"):
        from covey.analysis.verify.recompute import recomputed

        result = recomputed(run)
    if result.passed is False:
        raise RunError(f"--verify: {result.figure}; {result.remedy}")
    echo(f"{'verified' if result.passed else 'not verified'}: {result.figure}")


def _joined(config: Config) -> AbstractContextManager[World]:
    """Join the other ranks, if torchrun or another launcher has started several ranks."""
    from covey.training.parallel.join import joined_world

    return joined_world(config, lambda text: echo(text, err=True))


def check_new(run: Path | None, step: int | None, *, verify: bool = False) -> None:
    """Reject --step and --verify without --resume, and a run folder that already has files."""
    if verify:
        raise ConfigError(
            "--verify needs --resume RUN, because a new run has no checkpoint to verify"
        )
    if step is not None:
        raise ConfigError(
            f"--step {step} chooses the checkpoint to resume from, so it needs --resume RUN; to "
            "set the number of training steps, use train.steps"
        )
    if run is not None:
        check_new_run(run)


def check_alone(*given: object) -> None:
    """Reject options that cannot be used with --resume."""
    if any(given):
        raise ConfigError(
            "--resume uses the saved settings of the run; to change settings, use --set, and "
            "leave out CONFIG and options such as --model"
        )
