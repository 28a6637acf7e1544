"""Help texts flow in paragraphs and cut no word; lines on a terminal are wrapped at spaces."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from covey.cli.compare import compare_command
from covey.cli.main import app, run
from covey.cli.train import train_command
from covey.screen import Screen, wrapped


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(
    ("words", "command"), [(["train"], train_command), (["compare"], compare_command)]
)
def test_help_flows_and_is_whole(
    words: list[str],
    command: object,
    width: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    flat = " ".join(out.split())
    for paragraph in (inspect.getdoc(command) or "").split("\n\n"):
        assert " ".join(paragraph.split()) in flat
        first, *_ = [line for line in out.splitlines() if paragraph.split()[0] in line]
        assert len(first) > width / 2  # a line is as long as the terminal allows
    assert "reward.name=MODULE:NAME" in flat


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with its words."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize("width", [60, 80])
def test_no_help_cuts_a_word(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for path, command in commands(typer.main.get_command(app)):
        assert run([*path, "--help"]) == 0
        shown = set(capsys.readouterr().out.split())
        texts = [command.help, *(getattr(each, "help", None) for each in command.params)]
        words = {word for text in texts for word in (text or "").split()}
        # The formatter puts a full stop after the help of an argument.
        assert {
            word for word in words if word.rstrip(".") not in {w.rstrip(".") for w in shown}
        } == set(), path


LINE = (
    "step 0: greedy 14.5% [10.7, 19.3] on 256 held-out prompts, 60 distinct answers, best constant "
    "answer ('90') 6.2%"
)


def test_a_terminal_breaks_lines_at_spaces() -> None:
    screen = Screen(file=io.StringIO(), width=60, force_terminal=True, soft_wrap=True)
    screen.print(LINE)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    assert " ".join(lines) == LINE


def test_a_pipe_gets_whole_lines() -> None:
    screen = Screen(file=io.StringIO(), width=60, soft_wrap=True)
    screen.print(LINE)
    assert screen.file.getvalue() == f"{LINE}\n"  # type: ignore[attr-defined]


def test_a_command_to_copy_and_a_long_word_stay_whole() -> None:
    command = "resume with: covey train --resume runs/arithmetic-grpo-1"
    assert wrapped(command, 20) == command
    assert wrapped(f"run          runs/{'x' * 40}", 20).split() == ["run", f"runs/{'x' * 40}"]
    assert wrapped("a b\n\nc", 20) == "a b\n\nc"
