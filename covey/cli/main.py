"""The `covey` command, which reports a user's mistake in one line, without a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from functools import cache
from types import TracebackType
from typing import Any

import typer

from covey._version import __version__
from covey.cli.compare import compare_command
from covey.cli.doctor import doctor_command
from covey.cli.eval import eval_command
from covey.cli.explain import explain_command
from covey.cli.export import export_command
from covey.cli.lists import algorithms_command, recipes_command, tasks_command
from covey.cli.numerics import numerics_command
from covey.cli.plan import plan_command
from covey.cli.port import app as port_app
from covey.cli.reference import app as reference_app
from covey.cli.rewards import app as rewards_app
from covey.cli.runs import app as runs_app
from covey.cli.train import sft_command, train_command
from covey.cli.ui import ui_command
from covey.errors import CoveyError, reason
from covey.escape import printable
from covey.parallel.lifeline import RankError, Reported
from covey.screen import Screen
from covey.trust import scoped_trust

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has interrupted."""

app = typer.Typer(
    rich_markup_mode=None,
    name="covey",
    help="Group-relative reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan_command)
app.command("train")(train_command)
app.command("sft")(sft_command)
app.command("eval")(eval_command)
app.command("compare")(compare_command)
app.command("export")(export_command)
app.command("explain")(explain_command)
app.command("numerics")(numerics_command)
app.command("doctor")(doctor_command)
app.command("algorithms")(algorithms_command)
app.command("tasks")(tasks_command)
app.command("recipes")(recipes_command)
app.add_typer(runs_app, name="runs")
app.command("ui")(ui_command)
app.add_typer(rewards_app, name="rewards")
app.add_typer(reference_app, name="reference")
app.add_typer(port_app, name="port")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"covey {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Group-relative reinforcement learning for language models."""


def main(arguments: list[str] | None = None) -> None:
    """Run the `covey` command, and end the process with the exit code of the command."""
    sys.excepthook = _show_traceback
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


@cache
def _command() -> Any:
    """Return the command-line parser, and build it only once because building it is slow."""
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    try:
        with scoped_trust():
            result = _command().main(
                args=arguments, prog_name="covey", standalone_mode=False, obj=arguments
            )
    except CoveyError as error:
        return error.exit_code if _told(error) else _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of the pipe has ended, as in `covey runs | head`. Write nothing more to the
        # pipe, even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Any access to a path may fail: the name may be too long, or permission may be missing.
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {reason(error)}", CoveyError.exit_code)
    except Exception as error:
        # Typer ships its own click or uses the installed one, depending on its version, so usage
        # errors are recognised by their method rather than by their class.
        if not hasattr(error, "format_message"):
            raise
        return _fail(error.format_message(), getattr(error, "exit_code", 2))
    # Some versions of typer silently return this code after Ctrl-C. Only rank 0 prints a message.
    if result == INTERRUPTED and os.environ.get("RANK", "0") == "0":
        return _fail("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _told(error: CoveyError) -> bool:
    if isinstance(error, RankError | Reported) or "RANK" not in os.environ:
        return not str(error)
    from covey.parallel.join import told_by_main

    return told_by_main(str(error), error.exit_code)


def _show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback of an unexpected error, and escape its control characters."""
    lines = traceback.format_exception(kind, error, trace)
    print(printable("".join(lines)), end="", file=sys.stderr)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    console = Screen(stderr=True, soft_wrap=True)
    console.print(f"covey: {line}")
    return code
