"""The resource limits, test cases and test outcomes of sandboxed programs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from covey.errors import ConfigError

Ended = Literal["exited", "timed out", "output limit", "killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of a sandbox.

    Limits on time and output apply to each test case. Limits on memory, processes and files apply
    at every moment.
    """

    cpu_seconds: int = 4
    """Limit on the CPU time of each process, in seconds."""
    wall_seconds: float = 4.0
    total_seconds: float = 30.0
    """Time limit in seconds for all test cases of a program together. A test case that does not
    start within `total_seconds` counts as timed out."""
    memory_bytes: int = 512 << 20
    """Memory limit of each process. With isolation, the same limit also applies to the total memory
    of all processes and sockets."""
    processes: int = 32
    """Maximum number of processes and threads, enforced only with isolation."""
    file_bytes: int = 16 << 20
    """The size limit of each file. With isolation, the same limit also applies to the total size of
    all files."""
    output_bytes: int = 1 << 20
    """The size limit of each output: standard output, standard error and the value of a call."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 2**50:
                raise ConfigError(f"sandbox: the limit {field.name} must be positive, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A test case: the standard input of the program, and an expression to evaluate afterwards.

    Without `call`, the program runs as `__main__`. With `call`, the program runs as an imported
    module.
    """

    stdin: str = ""
    call: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a test case."""

    ended: Ended
    exit_code: int = 0
    """The exit code, or minus the signal number if a signal ended the process."""
    stdout: bytes = b""
    stderr: bytes = b""
    value: bytes = b""
    """The value of `Case.call` as untrusted JSON, which `covey.sandbox.values` compares with the
    expected value."""
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        """Whether the program exited by itself without an error."""
        return self.ended == "exited" and self.exit_code == 0
