from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import covey

ROOT = Path(covey.__file__).parent
PLAIN = {"errors", "escape", "notices", "types"}

# What each part may import beside itself, also if only type checkers read the import. A part is the
# longest of these names that a module's name begins with.
LAYERS: dict[str, set[str]] = {
    "": {"_version"},
    "_version": set(),
    "errors": PLAIN,
    "http_client": {"errors", "escape"},
    "kept_sets": set(),
    "escape": set(),
    "types": {"kept_sets", *PLAIN},
    "notices": {"escape"},
    "hub_access": set(),
    "rng": set(),
    "stopping": set(),
    "trust": {"errors"},
    "subprocesses": {"errors"},
    "objective": {"trust", *PLAIN},
    "functional": {"objective", *PLAIN},
    "config": {"errors", "escape"},
    "compat": {"config", "errors", "rewards", "tasks"},
    "sandbox": {"errors"},
    "tasks": {"config", "hub_access", "trust", *PLAIN},
    "rewards": {"config", "http_client", "trust", "sandbox", "tasks.reasoning_gym", *PLAIN},
    "scoring": {"subprocesses", "rewards", *PLAIN},
    "run": PLAIN,
    "run.trackers": {"run", "evaluation", *PLAIN},  # they report evaluations
    "embedded": set(),
    "accel": {"kept_sets", *PLAIN},
    "models": {"hub_access", "accel", "embedded", "subprocesses", "run.files", *PLAIN},
    "engines": {
        "http_client",
        "accel",
        "config",
        "embedded",
        "kept_sets",
        "models",
        "rng",
        "subprocesses",
        *PLAIN,
    },
    "environments": {
        "rewards",
        "sandbox",
        "scoring",
        "subprocesses",
        "tasks.library",
        "trust",
        *PLAIN,
    },
    "reference": {"http_client", "_version", "config", "models", "stopping", *PLAIN},
    "world": {"objective", "stopping"},
    "rollout": {
        "config",
        "engines",
        "environments",
        "models",
        "objective",
        "rewards",
        "rng",
        "scoring",
        "stopping",
        "world",
        *PLAIN,
    },
    "cluster": {
        "engines",
        "models",
        "reference",
        "rewards",
        "scoring",
        "stopping",
        "subprocesses",
        *PLAIN,
    },
    "evaluation": {"engines", "rng", "rollout", "scoring", *PLAIN},
}
LAYERS["training"] = {*LAYERS, "training"} - {"", "cli"}
LAYERS["screen"] = {"escape"}
LAYERS["analysis"] = {*LAYERS, "analysis"} - {"", "cli"}
# The web page reads run folders; it makes reports of comparisons when they are opened.
LAYERS["ui"] = {"run", "embedded", "analysis.page", "analysis.compare", *PLAIN}
LAYERS["cli"] = {*LAYERS, "cli"} - {""}
LAYERS["api"] = {*LAYERS} - {"", "cli"}
LAYERS["__main__"] = {"cli"}

# Modules whose imports for type checkers may come from any part.
TYPES_ONLY = {
    "covey",  # The public names: `covey.__getattr__` imports them when they are first used.
    "covey.rollout.source",
    "covey.rollout.overlap",
}

NO_TORCH = [
    "covey.analysis.compare.comparison_folder",
    "covey.analysis.compare.report_files",
    "covey.analysis.compare.conclusion",
    "covey.config",
    "covey.environments",
    "covey.errors",
    "covey.evaluation",
    "covey.analysis.lab",
    "covey.analysis.lab.checks",
    "covey.rewards",
    "covey.rewards.registry",
    "covey.run.model_card",
    "covey.run.provenance",
    "covey.run.folder",
    "covey.run.health",
    "covey.run.metric_registry",
    "covey.run.trackers.registry",
    "covey.run.samples",
    "covey.rng",
    "covey.sandbox",
    "covey.scoring",
    "covey.escape",
    "covey.tasks",
    "covey.training.resolve",
    "covey.types",
    "covey.ui.server",
]


class Imports(ast.NodeVisitor):
    """Collect the modules of covey that a file imports, without `covey.`."""

    def __init__(self, package: str, modules: set[str], *, for_types: bool) -> None:
        self.package = package.split(".")
        self.modules = modules
        self.for_types = for_types
        """Whether imports count that only type checkers read."""
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        guarded = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        if guarded and not self.for_types:
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self.add(name.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self.package[: len(self.package) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        for name in node.names:
            full = f"{source}.{name.name}"
            self.add(full if full in self.modules else source)

    def add(self, module: str) -> None:
        if module == "covey" or module.startswith("covey."):
            self.found.add(module.removeprefix("covey").removeprefix("."))


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(file): file for file in sorted(ROOT.rglob("*.py"))}


def imports_of(source: str, package: str, *, for_types: bool = True) -> set[str]:
    visitor = Imports(package, set(FILES), for_types=for_types)
    visitor.visit(ast.parse(source))
    return visitor.found


def part_of(module: str) -> str:
    name = module.removeprefix("covey").removeprefix(".")
    return max((part for part in LAYERS if within(name, part)), key=len, default=name)


def within(name: str, part: str) -> bool:
    return name == part or (part != "" and name.startswith(f"{part}."))


def allowed(part: str, imported: str) -> bool:
    own = part_of(imported)
    may = {part, *LAYERS[part]} - {""}
    return any(within(imported, name) for name in may if within(name, own))


def test_every_part_has_a_place_in_the_layers() -> None:
    assert {part_of(module) for module in FILES} == set(LAYERS)


def imports_from_above(module: str) -> list[str]:
    """Return what a module imports from layers that are not below it."""
    file = FILES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    source, for_types = file.read_text(encoding="utf-8"), module not in TYPES_ONLY
    imported = imports_of(source, package, for_types=for_types)
    return [name for name in sorted(imported) if not allowed(part_of(module), name)]


def test_a_module_imports_only_from_the_layers_below_it() -> None:
    found = {module: imports_from_above(module) for module in FILES}
    assert len(found) > 400
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import covey.run.folder", {"run.folder"}),
        ("from covey.run.folder import RunFolder", {"run.folder"}),
        ("from covey.run import folder", {"run.folder"}),
        ("from covey import types", {"types"}),
        ("from . import adapter, nothing", {"models.adapter", "models"}),
        ("from ..types import Batch", {"types"}),
        ("from .adapter import x", {"models.adapter"}),
        ("def f():\n    if True:\n        from covey.training import loop", {"training.loop"}),
        ("if TYPE_CHECKING:\n    import covey.cli\nelse:\n    import covey.run", {"cli", "run"}),
        ("import torch, covered\nfrom torch import covey", set()),
        ("import covey", {""}),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, found: set[str]) -> None:
    assert imports_of(source, "covey.models") == found


@pytest.mark.parametrize("guard", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_imports_for_type_checkers_can_be_left_out(guard: str) -> None:
    source = f"if {guard}:\n    import covey.cli\nelse:\n    import covey.run"
    assert imports_of(source, "covey.models", for_types=False) == {"run"}


@pytest.mark.parametrize(
    ("part", "imported", "verdict"),
    [
        ("tasks", "tasks.jsonl", True),
        ("tasks", "types", True),
        ("tasks", "rewards", False),
        ("embedded", "types", False),
        ("config", "types", False),
        ("training", "cli.main", False),
        ("api", "cli.startup", False),
        ("api", "screen", True),
        ("cli", "training.loop", True),
        ("cli", "_version", True),
        ("errors", "", False),
        ("models", "run.files", True),
        ("models", "run.folder", False),
        ("run", "run.trackers.console", False),
        ("run.trackers", "run.folder", True),
        ("run.trackers", "evaluation.items", True),
        ("ui", "run.folder", True),
        ("cli", "run.trackers.console", True),
    ],
)
def test_the_layers_say_what_they_mean(part: str, imported: str, verdict: bool) -> None:
    assert allowed(part, imported) == verdict


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
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == NO_TORCH
