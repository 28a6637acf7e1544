"""`covey ui`: start a web page that shows runs and comparisons."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from covey.errors import ConfigError, RunError, reason
from covey.screen import echo

USUAL = (Path("runs"), Path("comparisons"))
"""The default output folders of `covey train` and `covey compare`."""


def ui_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUNS]...",
            help="Run folders, comparison folders, or folders that contain runs or comparisons. "
            "By default, the page shows ./runs and ./comparisons.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen on; 0 chooses a free port.")
    ] = 8642,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on. If other machines can reach this address, requests "
            "need the access token that the command prints."
        ),
    ] = "127.0.0.1",
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show curves, groups, tokens, health and settings of runs in a web page.

    The page reads run folders, and needs neither torch nor an internet connection.
    """
    roots = paths or [path for path in USUAL if path.is_dir()] or [Path()]
    for path in roots:
        if not path.is_dir():
            raise RunError(f"the folder {path} does not exist")

    from covey.lab.ui.server import Server
    from covey.lab.ui.views import Site

    site = Site(roots)
    try:
        server = Server(host, port, site)
    except OSError as error:
        why = reason(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {why}; try --port 0") from None
    found = [place.kind for place in site.places().values()]
    runs, comparisons = found.count("run"), found.count("comparison")
    echo(f"{runs} runs and {comparisons} comparisons: {server.url}  (Ctrl-C stops the server)")
    if open_page:
        import webbrowser

        webbrowser.open(server.url)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
