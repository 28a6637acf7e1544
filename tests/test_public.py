from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
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


def test_a_package_that_imports_says_what_it_exports() -> None:
    importing = {package for package in PACKAGES if imported_names(FILES[package])}
    assert importing <= set(EXPORTING)
    assert {"covey.config", "covey.objective", "covey.rewards", "covey.tasks"} <= set(EXPORTING)


Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_definitions(node: Definition, name: str) -> Iterator[tuple[str, Definition]]:
    """Give a module or class with all that is public in it, but not what functions hold."""
    yield name, node
    if not isinstance(node, ast.Module | ast.ClassDef):
        return
    for child in node.body:
        if isinstance(
            child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and not child.name.startswith("_"):
            yield from public_definitions(child, f"{name}.{child.name}")


def test_everything_public_says_what_it_is() -> None:
    trees = {module: ast.parse(file.read_text(encoding="utf-8")) for module, file in FILES.items()}
    found = [each for module, tree in trees.items() for each in public_definitions(tree, module)]
    assert len(found) > len(FILES)
    assert [name for name, node in found if not ast.get_docstring(node)] == []


def test_private_parts_are_not_looked_at_and_public_ones_in_classes_are() -> None:
    tree = ast.parse("class A:\n def b(self):\n  def c(): ...\n def _d(self): ...\ndef _e(): ...")
    assert [name for name, _ in public_definitions(tree, "m")] == ["m", "m.A", "m.A.b"]


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


def test_no_wildcard_covers_another_metric() -> None:
    patterns = [name for name in METRICS if "*" in name]
    assert patterns != []
    for pattern in patterns:
        assert [name for name in METRICS if fnmatchcase(name, pattern)] == [pattern]
