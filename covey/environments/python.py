"""The `python` environment: a tool that runs Python programs in the sandbox."""

from __future__ import annotations

from covey.environments.programs import Programs
from covey.environments.tool_environment import ToolEnvironment
from covey.sandbox import Case

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
