"""The versions that are tested together, and the oldest ones that are allowed."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.lowest_versions import lowest_versions

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN_VERSIONS = {"vllm", "triton", "covey"}
"""Left out of the constraints: chosen by the device."""


def pins(file: str) -> dict[str, str]:
    lines = (line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#"))
    pairs = (line.split("==") for line in lines)
    return {canonicalize_name(name): version for name, version in pairs}


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [
        Requirement(text) for text in (*PROJECT["dependencies"], *(t for e in extras for t in e))
    ]


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-heavy.txt"])
def test_every_requirement_is_pinned_within_its_bounds(file: str) -> None:
    found = pins(file)
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name in OWN_VERSIONS or (name == "ray" and file == "constraints.txt"):
            continue
        if name == "mkdocs-material" and "heavy" in file:
            continue
        assert Version(found[name]) in requirement.specifier, name


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-heavy.txt"])
def test_all_that_decides_rewards_is_pinned(file: str) -> None:
    found, waiting = pins(file), ["math-verify", "reasoning-gym", "sympy"]
    assert {"latex2sympy2-extended", "antlr4-python3-runtime", "mpmath"} <= found.keys()
    seen: set[str] = set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        assert name in found, name
        try:
            below = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        waiting += [
            one.name for one in below if one.marker is None or one.marker.evaluate({"extra": ""})
        ]


def test_the_oldest_versions_are_those_that_are_safe() -> None:
    lowest = dict(line.split("==") for line in lowest_versions(PROJECT))
    assert Version(lowest["jinja2"]) >= Version("3.1.6"), "a template leaves the sandbox before it"
    assert Version(lowest["peft"]) >= Version("0.20"), (
        "an adapter names a module to import before it"
    )
    assert lowest.keys() >= {"torch", "transformers", "math-verify", "reasoning-gym"}
    assert "covey" not in lowest
