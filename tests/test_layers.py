"""The two walls of the house: the trainer never sees the lab, and light commands start without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import covey

ROOT = Path(covey.__file__).parent
SEES_THE_LAB = ("lab", "cli", "api.py", "__init__.py", "__main__.py")
NO_TORCH = [
    "covey.config",
    "covey.environments",
    "covey.evaluation",
    "covey.lab.compare.conclusion",
    "covey.lab.compare.report",
    "covey.lab.rewards.checks",
    "covey.lab.ui.server",
    "covey.records.folder",
    "covey.records.health",
    "covey.records.metric_registry",
    "covey.records.model_card",
    "covey.records.trackers.registry",
    "covey.rewards.registry",
    "covey.sandbox",
    "covey.scoring",
    "covey.tasks",
    "covey.config.resolve",
    "covey.types",
]


def imports(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def test_only_the_lab_and_the_doors_import_the_lab() -> None:
    for file in ROOT.rglob("*.py"):
        if file.relative_to(ROOT).parts[0] not in SEES_THE_LAB:
            seen = imports(file.read_text(encoding="utf-8"))
            assert not {name for name in seen if name.startswith(("covey.lab", "covey.cli"))}, file


def test_imports_are_found_wherever_they_stand() -> None:
    nested = "def f():\n    if x:\n        from covey.lab import ui"
    assert imports(nested) == {"covey.lab", "covey.lab.ui"}
    assert imports("import covey.cli.main") == {"covey.cli.main"}


WITHOUT_TORCH = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, *sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_plain_parts_do_not_import_torch() -> None:
    """One process imports them in turn, because each would take half a second to start."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *NO_TORCH],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:-1] == NO_TORCH
