from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import run
from covey.records.folder import RunFolder

TEXT = "[b] :x: a:smile:b"


def test_prompts_and_completions_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "run", "seed = 1\n", {})
    row = {
        "prompt_id": "1", "prompt": f"ask {TEXT}", "target": f"right {TEXT}", "text": f"say {TEXT}",
        "reward": 1.0, "advantage": None, "success": True,
    }  # fmt: skip
    (folder.path / "rollouts/000001.jsonl").write_text(json.dumps(row) + "\n")
    assert run(["runs", str(folder.path), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    for text in (f"ask {TEXT}   (target: right {TEXT})", f"reward 1.00  say {TEXT}"):
        assert text in shown


def test_an_error_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--set", f"train.steps={TEXT}"]) != 0
    assert repr(TEXT) in capsys.readouterr().err
