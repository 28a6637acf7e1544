"""The extras of pyproject.toml: what each contains, and where the package asks for it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import covey

ROOT = Path(covey.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEVELOPMENT = ("docs", "dev")
INDIRECT = {"accelerate"}  # transformers imports it to read a GGUF file
EXTRAS = {
    name: [re.match(r"[\w-]+", line).group() for line in lines]
    for name, lines in PROJECT["optional-dependencies"].items()
    if name not in DEVELOPMENT
}
SOURCES = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in ROOT.rglob("*.py")
}

# The part of the package that imports the packages of an extra, as the start of its files' paths.
PARTS = {
    "lora": ("models/adapter.py",),
    "gguf": ("models/gguf.py",),
    "tasks": ("tasks/", "rewards/gym_scorer.py", "rewards/math/"),
    "report": ("analysis/compare/report_files.py",),
    "tensorboard": ("run/trackers/tensorboard.py",),
    "wandb": ("run/trackers/wandb.py",),
    "trackio": ("run/trackers/trackio.py",),
    "vllm": ("engines/vllm/",),
    "ray": ("cluster/",),
    "server": ("reference/", "cli/reference.py"),
}


LOOK_UPS = ("import_module", "find_spec", "require_module")


def modules_of(source: str) -> set[str]:
    """Return the top-level packages that a file imports, or looks up by name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(LOOK_UPS):
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return {name.partition(".")[0] for name in found}


IMPORTED = {name: modules_of(source) for name, source in SOURCES.items()}


def importers(package: str) -> list[str]:
    return [name for name, found in IMPORTED.items() if package.replace("-", "_") in found]


@pytest.mark.parametrize("extra", EXTRAS)
def test_only_the_part_of_an_extra_imports_its_packages(extra: str) -> None:
    for package in set(EXTRAS[extra]) - INDIRECT:
        found = importers(package)
        assert found, package
        assert [name for name in found if not name.startswith(PARTS[extra])] == [], package


def test_a_package_is_in_one_extra_only() -> None:
    packages = [package for packages in EXTRAS.values() for package in packages]
    assert len(packages) == len(set(packages))


def test_messages_name_extras_that_exist() -> None:
    pages = [ROOT.parent / "README.md", *(ROOT.parent / "docs").rglob("*.md")]
    texts = [*SOURCES.values(), *(page.read_text(encoding="utf-8") for page in pages)]
    named = {
        name
        for text in texts
        for names in re.findall(r"covey\[([a-z,]+)\]", text)
        for name in names.split(",")
    }
    assert {"lora", "tasks", "report", "server"} <= named
    assert named <= set(EXTRAS)
