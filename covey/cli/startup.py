"""What every command that trains or judges does first: settings, and what its user should know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.markup import escape

from covey.cli.screen import Screen, echo
from covey.config import Config, load_config, load_smoke, toml_value
from covey.errors import ConfigError
from covey.models.model_path import check_model_path
from covey.run.edited_config import edited_settings
from covey.trust import trust

if TYPE_CHECKING:
    from covey.engines.protocol import Engine
    from covey.run.folder import RunFolder
    from covey.scoring import Scorer
    from covey.training.build import Parts
    from covey.training.report import Reporter


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG", help="A TOML file or the name of a packaged recipe. Default: arithmetic."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, as in train.steps=20."),
]
Model = Annotated[
    str | None,
    typer.Option(help="A folder, hub name, GGUF file, 'smollm2' or 'embedded': model.path."),
]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="Make it so small that it runs in a minute or two.")
]
ResumeStep = Annotated[
    int | None,
    typer.Option(
        "--step",
        min=0,
        metavar="N",
        help="With --resume: go on from the checkpoint of this step; 0: from the start. Later "
        "records are kept in RUN/superseded. Default: the newest.",
    ),
]

Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE",
        callback=lambda modules: trust(modules or ()),
        expose_value=False,
        help="Let the configuration run functions of this module or package, as in "
        "reward.name=MODULE:FUNCTION. Its code runs as you.",
    ),
]
"""Taken before the command begins, which has no use for it itself."""

Say = Callable[[str], None]
STARTING = "starting torch"
"""What takes the first seconds of every command that computes."""


@contextmanager
def waiting(text: str) -> Iterator[Say]:
    """Show on a terminal's stderr what is being waited for; give a function that says what next.

    Results must be printed after it: while it shows, all that is printed goes to stderr.
    """
    with Screen(stderr=True).status(escape(text)) as status:
        yield lambda then: status.update(escape(then))


def check_no_step(step: int | None) -> None:
    """Refuse a step to go on from where there is no run to go on with."""
    if step is not None:
        raise ConfigError(f"--step {step} goes with --resume RUN; train.steps says how many steps")


def settings_of(overrides: list[str] | None, model: str | None) -> list[str]:
    """Return the overrides that a command was given, the model's among them."""
    return [*(overrides or []), *([] if model is None else [f"model.path={toml_value(model)}"])]


def loaded(source: str, overrides: Iterable[str] = (), *, smoke: bool = False) -> Config:
    """Read a configuration; with `smoke` make it small, and say on stderr what that means."""
    if not smoke:
        return load_config(source, overrides)
    config, notes = load_smoke(source, overrides)
    for note in notes:
        echo(note, err=True)
    return config


def resolved(
    source: str,
    overrides: Iterable[str] = (),
    *,
    smoke: bool = False,
    model: bool = True,
    imports: bool = True,
    rendering: bool = False,
) -> Config:
    """Read a configuration and write out every option that was left to default.

    With `model` it has to name one: what can be seen to be none is refused before torch is loaded.
    Without `imports` code of the user's own is not loaded, and its options stay as given. With
    `rendering`, the process that renders chat templates starts while torch is imported.
    """
    config = loaded(source, overrides, smoke=smoke)
    if rendering and config.model.template in ("auto", "chat"):
        from covey.models.render_template import start_rendering

        start_rendering()
    if model:
        check_model_path(config.model.path)

    from covey.training.resolve import resolve

    return resolve(config, imports=imports)


class Begun(Protocol):
    """The parts of a run that its opening notes are about."""

    @property
    def bad_rows(self) -> tuple[str, ...]:
        """One line for every row of the data that was skipped."""

    @property
    def scorer(self) -> Scorer:
        """Who judges."""

    @property
    def sampler(self) -> Engine:
        """Who writes answers."""


def tell_notes(reporter: Reporter, folder: RunFolder, parts: Begun) -> None:
    """Say how answers are written, what differs from when the run was started, what was skipped."""
    import torch

    reporter.note(f"sampling: {parts.sampler.way}")
    environment = folder.environment()
    changed = edited_settings(folder, environment)
    if changed is not None:
        reporter.note(changed)
    threads, now = environment.get("threads"), torch.get_num_threads()
    if threads is not None and threads != now:
        reporter.note(
            f"this run was started with {threads} threads and goes on with {now}: results may "
            "differ in the last bits"
        )
    if parts.bad_rows:
        reporter.note(f"{len(parts.bad_rows)} bad rows skipped; the first: {parts.bad_rows[0]}")
    judged_by = environment.get("reward") or parts.scorer.identity
    if judged_by != parts.scorer.identity:
        reporter.note(
            f"the reward has changed since this run was started: it was {judged_by} and is now "
            f"{parts.scorer.identity}"
        )


def tell_edited(folder: RunFolder) -> None:
    """Say on stderr if a run's configuration is not the one that it was started with."""
    changed = edited_settings(folder, folder.environment())
    if changed is not None:
        typer.echo(f"covey: {changed}", err=True)


def tell_findings(reporter: Reporter, parts: Parts, not_own: Collection[str] = ()) -> None:
    """Say which settings do nothing or may harm; what is merely the same is for `covey plan`.

    `not_own` are settings that the user did not make, and is not told about.
    """
    from covey.analysis.plan.findings import findings
    from covey.analysis.plan.task_facts import facts_of

    facts = facts_of(
        parts.config,
        parts.train_prompts,
        len(parts.held_out_prompts),
        parts.policy.model.tokenizer.encode,
    )
    for finding in findings(parts.config, facts):
        if finding.kind != "same" and not finding.depends_on(not_own):
            reporter.note(finding.line())
