from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from covey.cli import main
from covey.cli.main import run
from covey.run.folder import RunFolder

TEXT = "[b] :x: a:smile:b"
SOURCES = sorted(Path(main.__file__).parent.glob("*.py"))


def test_answers_and_questions_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1\n", {})
    row = {
        "prompt_id": "1", "prompt": f"ask {TEXT}", "answer": f"right {TEXT}", "text": f"say {TEXT}",
        "reward": 1.0, "advantage": None, "success": True,
    }  # fmt: skip
    (folder.path / "rollouts/000001.jsonl").write_text(json.dumps(row) + "\n")
    assert run(["runs", str(folder.path), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    for text in (f"ask {TEXT}   (answer: right {TEXT})", f"reward 1.00  say {TEXT}"):
        assert text in shown


def test_an_error_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--set", f"train.steps={TEXT}"]) != 0
    assert repr(TEXT) in capsys.readouterr().err


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_no_console_takes_a_users_text_for_codes_of_emoji(file: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    made = [ast.unparse(c) for c in calls if ast.unparse(c.func) == "Console"]
    # What is made for a moment's progress, or to measure, shows no user's text by `print`.
    shows = [call for call in made if call != "Console(stderr=True)" and "width=" not in call]
    assert [call for call in shows if "emoji=False" not in call] == []
