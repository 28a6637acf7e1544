"""Measurements in a fresh process, and the flags of covey's commands."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class WorkerFailed(Exception):
    """A worker ended without a result; the message is the end of its output."""


def flags(settings: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Return the flags for settings by key, or for texts such as `train.steps=3`."""
    if isinstance(settings, Mapping):
        settings = [f"{key}={value}" for key, value in settings.items()]
    return [word for setting in settings for word in ("--set", setting)]


def in_own_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> Any:
    """Run a worker with `--output FILE` and return the JSON that it wrote there."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        try:
            done = subprocess.run(
                [*command, "--output", str(output)],
                env=os.environ | (environment or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise WorkerFailed(f"took more than {seconds} seconds") from None
        if done.returncode != 0 or not output.exists():
            raise WorkerFailed(f"{done.stdout}\nended with {done.returncode}")
        return json.loads(output.read_text())
