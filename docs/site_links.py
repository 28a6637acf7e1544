"""A hook of mkdocs: links that leave docs/ become plain text."""

import re

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:benchmarks|covey|examples|tests)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page without links to files of the repository."""
    return OUTSIDE.sub(r"\1", markdown)
