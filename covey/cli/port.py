"""`covey port`: convert another library's training script to a Covey configuration."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from covey.cli.startup import Trust
from covey.errors import ConfigError
from covey.screen import echo
from covey.subprocesses import module_command
from covey.trust import is_trusted

app = typer.Typer(
    rich_markup_mode=None,
    help="Convert another library's training script to a Covey configuration.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _port() -> None:
    """Convert another library's training script to a Covey configuration."""


@app.command("trl")
def trl_command(
    script: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT",
            help="A Python script that trains a GRPOTrainer of TRL, or a YAML file for `trl grpo "
            "--config`.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT...]", help="The arguments of the script, after --."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the configuration to this file. Default: SCRIPT with the ending .toml, in "
            "the current folder.",
        ),
    ] = None,
    trust: Trust = None,
) -> None:
    """Convert a TRL script to a Covey configuration in TOML.

    The command runs the script with its arguments, with recorders in the place of TRL's trainer and
    configuration, so nothing is trained. Because this runs the code of the script, --trust must
    name the script's module. Data that the script prepared is written beside the configuration. An
    option that changes what is trained, and that Covey lacks, ends the command with its name.
    """
    from covey.config import parse_config

    if not script.is_file():
        raise ConfigError(f"port: there is no file {script}")
    is_yaml = script.suffix in (".yaml", ".yml")
    if not is_trusted(script.stem):
        what = "runs the reward functions that it names" if is_yaml else "runs it"
        raise ConfigError(
            f"port: to convert {script}, Covey {what}; if you trust this code, add --trust "
            f"{script.stem}"
        )
    out = out or Path(f"{script.stem}.toml")
    if out.suffix != ".toml" or not out.parent.is_dir():
        raise ConfigError(f"port: --out {out} must name a .toml file in a folder that exists")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        given = [str(result), str(script), str(out), *(arguments or ())]
        code = subprocess.run(module_command("covey.compat.trl_script", *given)).returncode
        if not result.exists():
            raise ConfigError(f"port: the process that ran {script} ended with code {code}")
        found = json.loads(result.read_text(encoding="utf-8"))
    if "error" in found:
        raise ConfigError(found["error"])
    for each in found["files"]:
        file = Path(each["file"])
        parse_config(tomllib.loads(file.read_text(encoding="utf-8")))
        echo(f"{file}: {len(each['notes'])} notes")
        for note in each["notes"]:
            echo(f"  {note}")
        words = ["covey", "train", file.name]
        for module in each["trust"]:
            words += ["--trust", module]
        here = f"cd {shlex.quote(str(file.parent))} && " if file.parent.name else ""
        echo(f"train with: {here}{shlex.join(words)}")
