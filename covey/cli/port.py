"""`covey port`: convert another library's training script to a Covey configuration."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from covey.errors import ConfigError, reason
from covey.screen import echo

app = typer.Typer(
    rich_markup_mode=None,
    help="Convert the options of another library's training script to a Covey configuration.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _port() -> None:
    """Convert the options of another library's training script to a Covey configuration."""


@app.command("trl")
def trl_command(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", help="A Python script that creates a GRPOConfig of TRL."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the configuration to this file.")
    ] = None,
    ported: Annotated[
        Path | None,
        typer.Option(
            "--script",
            metavar="FILE",
            help="Also convert the script, and write it to this file. The new script calls "
            "covey.train with the same data and reward functions. Needs --out.",
        ),
    ] = None,
) -> None:
    """Convert the GRPOConfig of a TRL script to a Covey configuration in TOML.

    The command reads the script without running it. The TOML file has a comment for each
    option without an equivalent in Covey, and for each option whose value the script computes.
    """
    from covey.compat.trl import from_script
    from covey.compat.trl_script import covey_script
    from covey.config import parse_config
    from covey.records.files import write_text

    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"port: cannot read {script}: {reason(error)}") from None
    found = from_script(text, str(script))
    parse_config(tomllib.loads(found.toml()))
    if out is None:
        if ported is not None:
            raise ConfigError(
                "port: --script needs --out too, because the new script loads the configuration "
                "file that --out writes"
            )
        return echo(found.toml())
    if ported is not None and (ported.exists() or ported == script):
        raise ConfigError(f"port: {ported} already exists; give --script another file name")
    written = None if ported is None else covey_script(text, str(out), str(script))
    write_text(out, found.toml())
    echo(f"{out}: {len(found.settings)} settings, {len(found.notes)} notes; please read them")
    if ported is not None and written is not None:
        write_text(ported, written)
        echo(f"{ported}: run it with python {ported}")
