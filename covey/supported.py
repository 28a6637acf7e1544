"""Says whether Covey runs on this system."""

from __future__ import annotations

import importlib.util
import sys


def problem() -> str:
    """Return why Covey cannot run on this system; empty if it can.

    Covey locks run folders with `fcntl`, which Windows does not have.
    """
    if importlib.util.find_spec("fcntl") is not None:
        return ""
    return (
        f"Covey runs on Linux and macOS, and this system is {sys.platform}, which has no file "
        "locks of the kind that Covey needs; on Windows, use WSL (Windows Subsystem for Linux)"
    )
