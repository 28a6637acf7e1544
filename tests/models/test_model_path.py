"""What should be a model and is none is told by what it is, and the hub is not asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.errors import ModelError
from covey.models.load_model import load_language_model
from covey.models.model_path import check_model_path, not_here


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs, models and other things in it."""
    monkeypatch.chdir(tmp_path)
    for step in (9, 10, 2):
        (tmp_path / f"runs/sums-grpo-1/checkpoints/{step:06d}").mkdir(parents=True)
        (tmp_path / f"runs/sums-grpo-1/checkpoints/{step:06d}/config.json").touch()
    (tmp_path / "runs/sums-grpo-1/checkpoints/.000011.partial").mkdir()
    (tmp_path / "runs/sums-grpo-1/config.toml").touch()
    (tmp_path / "runs/young/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/young/config.toml").touch()
    (tmp_path / "maker/small").mkdir(parents=True)
    (tmp_path / "maker/small/config.json").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").touch()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").touch()
    (tmp_path / "my.toml").touch()
    (tmp_path / "tiny.gguf").touch()
    (tmp_path / "smollm2").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("runs/sums-gpro-1", "of that name; did you mean 'runs/sums-grpo-1'?"),
        ("./nothing-like-it", "there is no file or folder of that name"),
        ("~/nothing-like-it", "there is no file or folder of that name"),
        ("run/sums-grpo-1/checkpoints/000010", "no folder 'run'; did you mean 'runs'?"),
        ("/no/such/model", "there is no folder '/no'"),
        ("my.toml/x/y", "there is no folder 'my.toml/x'"),
        ("runs/sums-grpo-1", "is a run; give its newest checkpoint: runs/sums-grpo-1/checkpoints/000010"),
        ("runs/young", "is a run; it has no checkpoint yet"),
        ("runs", "runs is a folder without config.json or adapter_config.json"),
        ("my.toml", "my.toml is a file, and no GGUF"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_told_by_what_it_is(path: str, words: str, here: Path) -> None:
    with pytest.raises(ModelError) as caught:
        check_model_path(path)
    assert words in str(caught.value)
    with pytest.raises(ModelError) as again:
        load_language_model(path)
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["embedded", "smollm2", "maker/small", "adapter", "tiny.gguf", "runs/sums-grpo-1/checkpoints/000010",
     "gpt2", "someone/model", "maker/large",
     "other/model"],
)  # fmt: skip
def test_models_and_names_of_the_hub_are_left_alone(path: str, here: Path) -> None:
    check_model_path(path)


def test_a_name_that_the_hub_does_not_know_is_not_here_either(here: Path) -> None:
    assert not_here("maker/small") == ""
    assert not_here("gpt2") == "; and there is no folder of that name"
    assert not_here("maker/smal") == (
        "; and there is no folder of that name; did you mean 'maker/small'?"
    )
