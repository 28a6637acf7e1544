"""Write the pages under docs/algorithms: python -m tools.algorithm_pages docs/algorithms."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from covey.objective.algorithms import ALGORITHMS
from covey.objective.describe import COLUMNS, OptionLine, describe, row, shared_options


def curves_of(name: str, folder: Path) -> str:
    """Return the link to the picture of an algorithm's curves, or "" if no picture exists."""
    link = f"../images/algorithms/{name}.svg"
    return link if (folder / link).is_file() else ""


def page(name: str, curves: str = "") -> str:
    """Return an algorithm's page as Markdown; `curves` is the link to training curves."""
    description = describe(name)
    pieces = "\n".join(f"| {kind} | `{piece}` |" for kind, piece in description.pieces.items())
    return "\n".join(
        [
            f"# {name}",
            "",
            description.title,
            "",
            _markdown(description.text),
            "",
            "| piece | |",
            "|---|---|",
            pieces,
            f"| KL to the reference | {description.kl} |",
            f"| needs | {', '.join(description.needs) or 'nothing more than rewards'} |",
            "",
            _options_table(description.own),
            "",
            f"`{name}` also accepts the "
            "[options that all algorithms share](README.md#options-of-every-algorithm).",
            "",
            *(_picture(name, curves) if curves else []),
        ]
    )


def _picture(name: str, curves: str) -> list[str]:
    """Return the section of an algorithm's page that shows its training curves."""
    return [
        "## Curves",
        "",
        f"The embedded model on `arithmetic`, trained with `{name}` and its defaults, one seed.",
        "One seed does not compare algorithms; `covey compare` does.",
        "",
        f"![Share of correct completions and entropy over training steps]({curves})",
        "",
    ]


def index() -> str:
    """Return the generated part of docs/algorithms/README.md."""
    rows = [row(describe(name)) for name in ALGORITHMS]
    lines = [f"| [{r[0]}]({r[0]}.md) | {' | '.join(r[1:])} |" for r in rows]
    header = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    options = ["", "## Options of every algorithm", "", _options_table(shared_options()), ""]
    return "\n".join([*header, *lines, *options])


def _options_table(options: list[OptionLine]) -> str:
    rows = [f"| `{o.name}` | {o.default} | {o.meaning} |" for o in options]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows])


def _markdown(text: str) -> str:
    """Put indented formulas into code fences, and labels such as `Departure:` in bold."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith("    "):
            blocks.append("```\n" + inspect.cleandoc(block) + "\n```")
        else:
            blocks.append(re.sub(r"^([A-Z][a-z ]{4,60}):", r"**\1:**", block))
    return "\n\n".join(blocks)


def write_pages(folder: Path) -> None:
    """Write every algorithm's page, and the tables of the index page below its introduction."""
    for name in ALGORITHMS:
        (folder / f"{name}.md").write_text(page(name, curves_of(name, folder)), encoding="utf-8")
    readme = folder / "README.md"
    introduction = readme.read_text(encoding="utf-8").partition("| name |")[0]
    readme.write_text(introduction + index(), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
