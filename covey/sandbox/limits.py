"""What a program in the sandbox may use, and how one run of it ended."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from covey.errors import ConfigError

Ended = Literal["exited", "timed out", "output limit", "killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use. Times and outputs are for each case, the rest at any moment."""

    cpu_seconds: int = 4
    """Of each process."""
    wall_seconds: float = 4.0
    total_seconds: float = 30.0
    """For all cases together; those that are not reached count as timed out."""
    memory_bytes: int = 512 << 20
    """Of each process, and in isolation of all together, what is in their sockets included."""
    processes: int = 32
    """Threads count too. Holds in isolation only."""
    file_bytes: int = 16 << 20
    """Of each file, and in isolation of all together."""
    output_bytes: int = 1 << 20
    """Of each output: standard output, standard error, and the value of a call."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 2**50:
                raise ConfigError(f"sandbox: {field.name} must be positive, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of a program: what it reads, and the expression to evaluate after it, if any.

    Without a call the program is the main module; with one it is imported, as it were.
    """

    stdin: str = ""
    call: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a case ended."""

    ended: Ended
    exit_code: int = 0
    """Minus the number of the signal, if one ended it."""
    stdout: bytes = b""
    stderr: bytes = b""
    value: bytes = b""
    """The value of the call as its process wrote it, to be read by `covey.sandbox.values`."""
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        """Whether it came to its own end, and nothing went wrong."""
        return self.ended == "exited" and self.exit_code == 0
