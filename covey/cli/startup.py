"""Command-line options, settings and status messages that several commands share."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from covey.config import Config, load_config, load_smoke, toml_value
from covey.errors import ConfigError
from covey.models.model_path import check_model_path
from covey.records.folder import edited_settings
from covey.screen import Screen, echo
from covey.trust import trust

if TYPE_CHECKING:
    from covey.records.folder import RunFolder


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="A TOML configuration file, or the name of a recipe (see `covey recipes`). "
        "Default: arithmetic.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, for example train.steps=20."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Override model.path. The model can be a folder, a Hugging Face name, a GGUF file, "
        "or one of the packaged models 'embedded' and 'smollm2'."
    ),
]
Smoke = Annotated[
    bool,
    typer.Option(
        "--smoke",
        help="Run a quick test of 1 or 2 minutes, with smaller batches, shorter completions and "
        "fewer steps.",
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE",
        callback=lambda modules: trust(modules or ()),
        expose_value=False,
        help="Allow settings such as reward.name=MODULE:NAME to import this Python module or "
        "package. Imported code runs with your permissions.",
    ),
]
"""The option --trust, which registers modules as trusted before the command runs."""
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

Say = Callable[[str], None]
DEFAULT_RECIPE = "arithmetic"
STARTING = "starting torch"
"""The text of the status line while torch is imported, which takes seconds."""


class _LateTorch(ModuleType):
    """A module that stands in for torch, and imports torch on first use.

    Python's own `LazyLoader` would import torch too early, namely as soon as any module runs
    `import torch`.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get("torch") is self:
            del sys.modules["torch"]
        return getattr(importlib.import_module("torch"), name)


def import_torch_when_used() -> None:
    """Delay the import of torch until torch is used, because the import takes seconds."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = module = _LateTorch("torch")
        module.__spec__ = importlib.machinery.PathFinder.find_spec("torch")


@contextmanager
def waiting(text: str) -> Iterator[Say]:
    """Show a status line on stderr, and yield a function that changes the text of the line.

    Print results after the `with` block, because output inside the block goes to stderr.
    """
    quiet = os.environ.get("RANK", "0") != "0"  # of several ranks, only rank 0 prints
    with Screen(stderr=True, quiet=quiet).status(escape(text)) as status:
        yield lambda then: status.update(escape(then))


def settings_of(overrides: list[str] | None, model: str | None) -> list[str]:
    """Return the overrides that --set and --model request, in the form `key=value`."""
    return [*(overrides or []), *([] if model is None else [f"model.path={toml_value(model)}"])]


def source_of(source: str | None, overrides: Iterable[str]) -> str | None:
    """Return `source`; if it is None, return the name of the default recipe if the recipe fits.

    The default recipe fits only its own model and task, because its learning rate and lengths do
    not suit other models and tasks.
    """
    if source is not None:
        return source
    config = load_config(None, overrides)
    if (config.model.path, config.task.name) == ("embedded", DEFAULT_RECIPE):
        return DEFAULT_RECIPE
    return None


def loaded(
    source: str | None,
    overrides: Iterable[str] = (),
    *,
    smoke: bool = False,
    say: Say | None = None,
) -> Config:
    """Load a configuration.

    With `smoke`, shrink the configuration to a quick test, and print the changed settings on
    stderr. `say` gets a line about settings that an override drops; by default, it is printed.
    """
    if not smoke:
        return load_config(source, overrides, say or partial(echo, err=True))
    config, notes = load_smoke(source, overrides)
    for note in notes:
        echo(note, err=True)
    return config


def resolved(
    source: str | None,
    overrides: Iterable[str] = (),
    *,
    smoke: bool = False,
    model: bool = True,
    imports: bool = True,
) -> Config:
    """Load a configuration, and fill in the default of every option.

    If `model` is true, check the model path before torch is imported. If `imports` is false, do not
    import the user's own modules, and do not check the options of the user's functions.
    """
    dropped: list[str] = []
    config = loaded(source, overrides, smoke=smoke, say=dropped.append)
    if model:
        check_model_path(config.model.path)

    from covey.config.resolve import resolve

    config = resolve(config, imports=imports)
    for line in dropped:  # a name that does not exist is the only thing to say
        echo(line, err=True)
    return config


def check_out(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise ConfigError(
            f"--out {path}: the folder {path.parent} does not exist; create the folder first"
        )


def tell_defaults(source: str | None, config: Config) -> None:
    """Print the most important defaults if no configuration file or recipe was given."""
    if source is None:
        echo(
            "no CONFIG was given, so other settings have their defaults, such as "
            f"optimizer.learning_rate = {config.optimizer.learning_rate:g} and rollout.max_tokens "
            f"= {config.rollout.max_tokens} (docs/settings.md)",
            err=True,
        )


def tell_edited(folder: RunFolder) -> None:
    """Print on stderr which settings of a run were edited since the run started."""
    changed = edited_settings(folder, folder.environment())
    if changed is not None:
        typer.echo(f"covey: {changed}", err=True)
