"""Print the oldest versions that pyproject.toml allows, as constraints for pip.

    python -m tools.lowest_versions > lowest.txt
    pip install -c lowest.txt -e ".[dev]"

Names after the command are left out, for packages whose oldest version is not available.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

REQUIREMENT = re.compile(r"^([\w.-]+)(?:\[[^\]]*\])?>=([\d.]+)")


def lowest_versions(project: dict[str, Any], without: Collection[str] = ()) -> list[str]:
    """Return `name==version` for each requirement of a project and of its extras."""
    extras = project["optional-dependencies"].values()
    found = {}
    for requirement in [*project["dependencies"], *(one for extra in extras for one in extra)]:
        match = REQUIREMENT.match(requirement)
        if match and match[1] not in without:
            found[match[1]] = match[2]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


if __name__ == "__main__":
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    print("\n".join(lowest_versions(tomllib.loads(text)["project"], sys.argv[1:])))
