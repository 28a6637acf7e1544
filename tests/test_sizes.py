from __future__ import annotations

import ast
from pathlib import Path

import covey

ROOT = Path(covey.__file__).parent
FILES = {str(file.relative_to(ROOT)): file for file in sorted(ROOT.rglob("*.py"))}
FILES |= {f"tools/{file.name}": file for file in sorted((ROOT.parent / "tools").glob("*.py"))}

# An outer limit only: a file is one idea, so it is split when it has two, not at a length.
MAX_FILE_LINES = 850
MAX_FUNCTION_LINES = 50
MAX_COLUMNS = 100
LOOP_LINES = 200

# Functions that may be longer, as "file:function", each with a reason. Keep it short.
LONG_FUNCTIONS = {
    # A kernel is one piece, since what it holds in registers cannot be handed on for nothing; and
    # its parameters alone, which its launcher names again, take half a screen.
    "accel/kernels/decode_attention.py:_decode_attention",
    "accel/kernels/sample.py:_sample",
}


def lines_of(name: str) -> list[str]:
    return FILES[name].read_text(encoding="utf-8").split("\n")[:-1]


def function_lines(name: str) -> dict[str, int]:
    """Return the lines of each function, or of the longest of that name: docstring and all."""
    sizes: dict[str, int] = {}
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            key, size = f"{name}:{node.name}", node.end_lineno - node.lineno + 1
            sizes[key] = max(size, sizes.get(key, 0))
    return sizes


def test_files_are_short_and_narrow() -> None:
    lines = {name: lines_of(name) for name in FILES}
    assert {name: len(found) for name, found in lines.items() if len(found) >= MAX_FILE_LINES} == {}
    places = [(name, n, line) for name in FILES for n, line in enumerate(lines[name], start=1)]
    assert [(name, n) for name, n, line in places if len(line) > MAX_COLUMNS] == []


def test_every_function_fits_on_a_screen() -> None:
    sizes = {f: size for name in FILES for f, size in function_lines(name).items()}
    long = {f for f, size in sizes.items() if size >= MAX_FUNCTION_LINES}
    assert long == LONG_FUNCTIONS  # every exception is still needed


def test_the_loop_is_read_in_one_sitting() -> None:
    assert len(lines_of("training/loop.py")) <= LOOP_LINES
