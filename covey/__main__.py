"""The `covey` command and `python -m covey`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from covey.supported import problem

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has interrupted."""
SHOW_CURSOR = "\x1b[?25h"
IMPORTER = "<frozen importlib._bootstrap>"


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or end the process quietly if it is importing a module.

    An exception in the middle of an import is a traceback at best. In the initialization of a
    library in C++, such as torch, it aborts the process.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORTER:
            if sys.__stderr__ is not None and sys.__stderr__.isatty():
                os.write(sys.__stderr__.fileno(), SHOW_CURSOR.encode())  # a status line hides it
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """Run the `covey` command, and end the process with the exit code of the command."""
    if why := problem():
        print(f"covey: {why}", file=sys.stderr)
        sys.exit(1)
    # A shell makes its background processes ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    from covey.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
