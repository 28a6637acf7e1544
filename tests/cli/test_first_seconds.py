"""The first seconds of a command: errors before torch is imported, and the status line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli.startup import waiting

# Reads lists of arguments from stdin; prints the exit code and what went to stderr for each.
WITHOUT_TORCH = """
import contextlib, io, json, sys
from covey.cli.main import run
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    imported = bool({"torch", "transformers"} & set(sys.modules))
    print(json.dumps([code, err.getvalue(), imported]))
"""
MISTAKES = {
    "train --run full": "full already contains files; choose another --run",
    "sft --run full": "full already contains files; choose another --run",
    "export embedded full": "full already contains files; choose another folder",
    "train --model train": "train is a run, not a model; give its newest checkpoint: train/checkpoints/",
    "train --model unknown/model": "is not in the local Hugging Face cache",
    "sft --model ./nothing-like-it": "there is no file or folder of that name",
    "eval embedded --against ./nothing-like-it": "there is no file or folder of that name",
    "export ./trian out": "did you mean 'train'?",
    "numerics --model full": "full is not a model: it has no config.json",
    "train --resume train/checkpoints/000002": "give the run folder: train",
    "train --set train=3": "config: train is a table: write [train]",
    "runs train --step 100": "no completions of step 100; it has completions of steps 1 to 2",
    "explain train --step 100": "no completions of step 100; it has completions of steps 1 to 2",
    "explain sft --step 1": "sft is an SFT run, which samples no completions",
    "rewards score nothere.jsonl": "cannot read nothere.jsonl: No such file or directory; check the path\n",
    "algorithms gsop": "objective.name = 'gsop' is not a known algorithm; did you mean 'gspo'?",
    "train --set objective.name=gsop": "did you mean 'gspo'?",
    "train --set task.name=arithmetics": "did you mean 'arithmetic'?",
    "train --set reward.name=maths": "did you mean 'math'?",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("data")
    for kind in ("train", "sft"):
        (tmp_path / kind / "checkpoints/000002").mkdir(parents=True)
        (tmp_path / kind / "rollouts").mkdir()
        (tmp_path / kind / "config.toml").touch()
        (tmp_path / kind / "environment.json").write_text(json.dumps({"kind": kind}))
    for step in (1, 2):
        (tmp_path / f"train/rollouts/{step:06d}.jsonl").write_text("{}\n")
    return tmp_path


def test_mistakes_are_reported_before_torch_is_imported(here: Path) -> None:
    """One process makes all mistakes, because each would take half a second to start."""
    before = sorted(here.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps([arguments.split() for arguments in MISTAKES]),
        cwd=here, capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, words), (code, error, imported) in zip(MISTAKES.items(), results, strict=True):
        assert not imported, arguments
        assert code in (1, 2), (arguments, error)
        assert words in error, arguments
        assert error.count("\n") == 1, arguments
    assert sorted(here.rglob("*")) == before


def test_a_terminal_shows_the_status_and_stdout_only_the_result() -> None:
    shows, stderr = pty.openpty()
    # Another process measures the prompts with transformers; nothing of torch is used.
    code = "import sys; from covey.cli.main import run; code = run(sys.argv[1:]); "
    code += "assert not {'transformers', 'torch._C'} & set(sys.modules); sys.exit(code)"
    with subprocess.Popen(
        [sys.executable, "-c", code, "plan", "--json"],
        env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=stderr,
    ) as process:  # fmt: skip
        os.close(stderr)
        seen = b""
        while part := _read(shows):
            seen += part
        out, _ = process.communicate(timeout=120)
    os.close(shows)
    assert process.returncode == 0
    assert json.loads(out)["findings"] == []
    # A status that ends before the terminal is drawn again is not seen; the last one takes longest.
    assert b"reading the" in seen
    assert b"measuring embedded" in seen


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


def test_without_a_terminal_no_status_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with waiting("loading [bold]") as say:
        say("loading [more]")
    assert capfd.readouterr() == ("", "")
