"""Start or resume a run: what `covey train` and `covey sft` share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.cli.screen import Screen
from covey.cli.startup import STARTING, resolved, tell_notes, waiting
from covey.config import Config, to_toml
from covey.errors import ConfigError, RunError
from covey.run.folder import RunFolder, check_new_run, next_run_path
from covey.run.resume import Start, start_of
from covey.run.trackers import Tracker
from covey.stopping import StopSignal, stop_signal

if TYPE_CHECKING:
    from covey.training.build import Components

NewRun = Annotated[
    Path | None,
    typer.Option("--run", help="The run folder to create. Default: the next runs/NAME-N."),
]
Resume = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Resume this run, with its own settings.")
]
ResumeStep = Annotated[
    int | None,
    typer.Option(
        "--step",
        min=0,
        metavar="N",
        help="With --resume: resume from the checkpoint of this step; 0: from the start. Later "
        "records move to RUN/superseded. Default: the newest checkpoint.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A kind of training: how its parts are built, and its loop."""

    command: str
    """`train` or `sft`."""
    build: Callable[[Config], Any]
    environment: Callable[[Any], dict[str, Any]]
    """What environment.json says about the parts, beside the machine and the reward."""
    loop: Callable[[Any, RunFolder, Tracker, StopSignal, Start], tuple[int, int]]
    """Train, and return the last step and the planned number of steps."""

    def start(self, config: Config, path: Path | None, name: str) -> None:
        """Create a run folder and train; `name` is that of a new folder in runs."""
        import torch

        from covey.run.provenance import describe_environment

        parts = self._built(config)  # errors come before the run folder is created
        device, threads = str(parts.policy.model.device), torch.get_num_threads()
        environment = describe_environment(config.seed, device, threads)
        environment |= {"reward": parts.scorer.identity, **self.environment(parts)}
        with closing(parts.scorer):
            path = path or next_run_path(Path("runs"), name)
            folder = RunFolder.create(path, to_toml(config), environment)
            with folder.locked():
                self._run(parts, folder, Start())

    def resume(self, path: Path, step: int | None, print_config: bool = False) -> None:
        """Resume a run with its own settings, or only print them."""
        folder = RunFolder.open(path)
        kind, command = ("an SFT run", "sft") if folder.is_sft else ("not an SFT run", "train")
        if command != self.command:
            raise RunError(f"{path} is {kind}; resume it with: covey {command} --resume {path}")
        with waiting(STARTING):
            config = resolved(str(folder.config_file), imports=not print_config)
        if print_config:
            return typer.echo(to_toml(config), nl=False)
        with folder.locked():
            start = start_of(folder, step, save_every=config.save.every)
            parts = self._built(config)
            with closing(parts.scorer):
                self._run(parts, folder, start)

    def _built(self, config: Config) -> Any:
        with waiting(f"loading {config.model.path}"):
            return self.build(config)

    def _run(self, parts: Components, folder: RunFolder, start: Start) -> None:
        from covey.run.trackers.console import console_tracker

        reporter = console_tracker(folder, Screen(soft_wrap=True))
        tell_notes(reporter, folder, parts)
        with stop_signal() as stop:
            done, steps = self.loop(parts, folder, reporter, stop, start)
        reporter.finished(done, steps, stop.received, command=self.command)
        if done < steps:
            raise typer.Exit(stop.exit_code)


def check_new(run: Path | None, step: int | None) -> None:
    """Refuse --step without --resume, and a run folder that holds files already."""
    if step is not None:
        raise ConfigError(f"--step {step} needs --resume RUN; train.steps sets the number of steps")
    if run is not None:
        check_new_run(run)


def check_alone(*given: object) -> None:
    """Refuse other options beside --resume."""
    if any(given):
        raise ConfigError("--resume takes its settings from the run; give it alone")
