from __future__ import annotations

import ast
import doctest
import importlib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import covey
from covey.records.metric_registry import METRICS, SOURCES, meaning

ROOT = Path(covey.__file__).parent


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(file): file for file in sorted(ROOT.rglob("*.py"))}
PACKAGES = [module for module, file in FILES.items() if file.name == "__init__.py"]
EXPORTING = [package for package in PACKAGES if "__all__" in FILES[package].read_text()]
TOOLS = {module_of(file): file for file in sorted((ROOT.parent / "tools").glob("*.py"))}
WITH_EXAMPLES = [m for m, file in (FILES | TOOLS).items() if ">>>" in file.read_text()]


def isort_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, each by name: the order that ruff enforces."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def imported_names(file: Path) -> set[str]:
    """Return the names that a package imports from the project, without its own modules."""
    return {
        alias.asname or alias.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("covey")
        for alias in node.names
        if not (file.parent / f"{alias.name}.py").exists()
    }


@pytest.mark.parametrize("package", EXPORTING)
def test_what_a_package_exports_exists_and_is_sorted_and_complete(package: str) -> None:
    module = importlib.import_module(package)
    names = list(module.__all__)
    assert [name for name in names if not hasattr(module, name)] == []
    assert names == sorted(set(names), key=isort_order)
    assert imported_names(FILES[package]) <= set(names)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_a_metric_has_its_own_meaning() -> None:
    for name, metric in METRICS.items():
        assert meaning(name) == metric.definition, name
        assert metric.definition.endswith("."), name
        assert metric.source in SOURCES, name


@pytest.mark.parametrize("part", ["correct", "format", "a/b", "[x]"])
def test_a_wildcard_stands_for_several_metrics(part: str) -> None:
    assert meaning(f"objective/parts/{part}") == METRICS["objective/parts/*"].definition


@pytest.mark.parametrize(
    "name", ["", "Step", "steps", "objective", "objective/parts", "val/ratio_", "parts/correct"]
)
def test_what_is_not_a_metric_means_nothing(name: str) -> None:
    assert meaning(name) is None


def test_a_metric_of_its_own_comes_before_a_wildcard() -> None:
    patterns = [name for name in METRICS if "*" in name]
    assert patterns != []
    for pattern in patterns:
        covered = [name for name in METRICS if fnmatchcase(name, pattern) and name != pattern]
        assert all(meaning(name) == METRICS[name].definition for name in covered)
