"""A system without file locks is refused in one line, and not by an import in the middle."""

from __future__ import annotations

import subprocess
import sys

import pytest

from covey.supported import problem

WITHOUT = "import sys; sys.modules['fcntl'] = None; "


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False
    )


def test_this_system_is_supported() -> None:
    assert problem() == ""


@pytest.mark.parametrize("words", [["train"], ["--version"]])
def test_the_command_says_in_one_line_what_is_supported(words: list[str]) -> None:
    done = python(f"sys.argv = ['covey', *{words!r}]; from covey.__main__ import main; main()")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("covey: ")
    assert "Linux" in line
    assert "macOS" in line


def test_python_says_what_is_supported_when_a_public_name_is_used() -> None:
    done = python("import covey; print(covey.__version__); covey.train")
    assert done.stdout.strip()
    assert "Linux and macOS" in done.stderr.splitlines()[-1]
