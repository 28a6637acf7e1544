from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from covey.records import provenance
from covey.records.provenance import code_digest


def package(folder: Path) -> Path:
    for name in ("objective/loss.py", "cli/main.py", "lab/compare/launch.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("one = 1\n")
    return folder


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("objective/loss.py", True),
        ("objective/new.py", True),
        ("lab/compare/launch.py", True),
        ("lab/compare/conclusion.py", False),
        ("cli/main.py", False),
    ],
)
def test_the_digest_is_of_code_that_can_change_numbers(
    file: str, counts: bool, tmp_path: Path
) -> None:
    before = code_digest(package(tmp_path))
    assert code_digest(tmp_path) == before
    (tmp_path / file).write_text("one = 2\n")
    assert (code_digest(tmp_path) != before) == counts


def test_named_files_and_folders_exist() -> None:
    """A file that was moved would silently count no longer, or start to count."""
    for name in (*provenance.WITHOUT_EFFECT, *provenance.WITH_EFFECT):
        assert (provenance.PACKAGE / name).exists(), name


def test_the_digest_is_of_the_versions_that_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_digest(package(tmp_path))
    version = importlib.metadata.version

    def newer(name: str) -> str:
        return "99" if name == "transformers" else version(name)

    monkeypatch.setattr(provenance.importlib.metadata, "version", newer)
    provenance._version.cache_clear()
    assert code_digest(tmp_path) != before
    provenance._version.cache_clear()
