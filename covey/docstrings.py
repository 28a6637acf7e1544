"""Reads what docstrings say about the parameters of functions."""

from __future__ import annotations

import re


def described_arguments(doc: str) -> dict[str, str]:
    """Return the description of each parameter in a docstring.

    The description stands in the section `Args:`, or after `:param NAME:`.
    """
    section = re.search(r"^Args:\n(.*?)(?:\n\S|\Z)", doc, re.DOTALL | re.MULTILINE)
    if section is None:
        fields = re.findall(r"^:param (?:[^:]* )?(\w+):(.*?)(?=^:|\n\n|\Z)", doc, re.DOTALL | re.M)
        return {name: " ".join(text.split()) for name, text in fields}
    entry = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*?)(?=\n\s+\w+\s*(?:\([^)]*\))?:|\Z)",
                       re.DOTALL | re.MULTILINE)  # fmt: skip
    return {name: " ".join(text.split()) for name, text in entry.findall(section[1])}
