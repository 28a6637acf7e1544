"""The `python` environment: a tool that runs Python programs in the sandbox."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from covey.environments.tool_environment import ToolEnvironment
from covey.errors import ConfigError
from covey.rewards.text import shortened
from covey.sandbox import Case, Limits, Outcome, require_isolation, run_program

# Runs the policy's programs in the sandbox, and returns their output as text.


CONCURRENT = 2
"""The number of sandboxes that one environment process runs at once."""
WAITING = 3
"""The limit on wall time, as a multiple of the limit on CPU time. The limit on wall time is larger
than the limit on CPU time, because a program takes more wall time than CPU time on a busy
machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Runs programs in the sandbox, with the limits in an environment's options."""

    seconds: float
    """The limit on CPU time of one program, in seconds."""
    memory_mb: int
    output_chars: int
    """Maximum number of characters of output; the middle of a longer output is omitted."""
    unsafe: bool
    """Whether programs run without the sandbox, as ordinary processes of the user."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 600:
            raise ConfigError(
                f"environment: seconds = {self.seconds} must be above 0 and at most 600"
            )
        bounds = {"memory_mb": (64, 1 << 20), "output_chars": (100, 20_000)}
        for name, (least, most) in bounds.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"environment: {name} = {value} must be from {least} to {most}")
        if not self.unsafe:
            require_isolation()

    async def run(self, program: str, cases: Sequence[Case]) -> list[Outcome]:
        """Run a program once for each test case, in another thread."""
        wall = WAITING * self.seconds
        limits = Limits(
            cpu_seconds=math.ceil(self.seconds),
            wall_seconds=wall,
            total_seconds=wall * len(cases),
            memory_bytes=self.memory_mb << 20,
            output_bytes=1 << 18,
        )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            _threads(), lambda: run_program(program, cases, limits=limits, unsafe=self.unsafe)
        )

    def shown(self, outcome: Outcome) -> str:
        """Return a program's output as text, with the reason if the sandbox stopped the program."""
        text = (outcome.stdout + outcome.stderr).decode(errors="replace").rstrip()
        return "\n".join(filter(None, (shortened(text, self.output_chars), _ending(outcome))))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONCURRENT, thread_name_prefix="sandbox")


def _ending(outcome: Outcome) -> str:
    endings = {
        "timed out": "error: the program took too long and was stopped",
        "output limit": "error: the program printed too much and was stopped",
        "killed": "error: the program was stopped: it used too much memory, or crashed",
    }
    if outcome.ended != "exited":
        return endings[outcome.ended]
    silent = outcome.exit_code != 0 and not outcome.stderr
    return f"error: the program exited with code {outcome.exit_code}" if silent else ""


_CELL = """\
import sys

def run(source):
    import ast
    tree = ast.parse(source, "<program>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<program>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
        if value is not None:
            print(repr(value))

names = {"__name__": "__main__", "__builtins__": __builtins__}
try:
    run(SOURCE)
except SystemExit:
    raise
except BaseException as error:
    import traceback
    sys.stdout.flush()
    report = traceback.TracebackException.from_exception(error, lookup_lines=False)
    report.stack[:] = [frame for frame in report.stack if frame.filename == "<program>"]
    sys.stderr.write("".join(report.format()))
    sys.exit(1)
"""
"""Code that runs a program like a notebook cell, and prints the value of the last expression. The
program is also parsed in the sandbox, because untrusted text could crash Python's parser."""


class Python(ToolEnvironment):
    """An environment with one tool, which runs a Python program and returns its output.

    Variables do not persist between tool calls. The reward function scores the policy's last turn,
    which has no tool call.
    """

    def __init__(
        self,
        *,
        seconds: float = 3.0,
        memory_mb: int = 512,
        output_chars: int = 2000,
        unsafe: bool = False,
    ) -> None:
        self._programs = Programs(
            seconds=seconds, memory_mb=memory_mb, output_chars=output_chars, unsafe=unsafe
        )

    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between calls.

        Args:
            code: The whole program.
        """
        [outcome] = await self._programs.run(f"SOURCE = {code!r}\n{_CELL}", [Case()])
        return self._programs.shown(outcome) or "(the program printed nothing)"
