"""An engine or a cluster whose package is missing: one line, before a model is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from covey.cli.main import run as covey


@pytest.mark.parametrize(
    ("setting", "package", "line"),
    [
        ("engine.kind=vllm", "vllm", "config: engine.kind = 'vllm' needs vLLM: pip install"),
        (
            "cluster.address=auto",
            "ray",
            "config: [cluster] needs Ray; install it with pip install 'covey[ray]'",
        ),
    ],
)
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_missing_package_is_one_line(
    setting: str,
    package: str,
    line: str,
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == package else found(name, *rest),
    )
    settings = [setting, f"cluster.trainers={ranks}", f"model.path={tmp_path / 'model'}"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")  # loading it would be another error
    words = [word for each in settings for word in ("--set", each)]
    assert covey(["train", *words, "--run", str(tmp_path / "run")]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"covey: {line}")
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
