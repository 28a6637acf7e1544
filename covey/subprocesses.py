"""Command lines that run a module of covey in a subprocess."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parent.parent)
START = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of covey from any working directory.

    `python -m` would search the working directory first. In a downloaded folder, a file named
    json.py would then run.
    """
    return [sys.executable, "-P", "-c", START, ROOT, module, *arguments]
