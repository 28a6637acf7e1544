"""Descriptions of algorithms, for `covey algorithms` and for the pages under docs/algorithms.

A description is generated from the code: from the docstring, the signature, the table of options,
and the objective's component functions.

    python -m covey.objective.describe docs/algorithms      writes the pages
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from covey.objective.algorithms import ALGORITHMS
from covey.objective.build import algorithm, build, extended
from covey.objective.compose import PIECES, function_of, options_of
from covey.objective.loss import Need, Objective
from covey.objective.options import OPTIONS
from covey.objective.penalty import PENALTIES


class OptionLine(NamedTuple):
    """One option of an algorithm."""

    name: str
    default: str
    meaning: str


class Description(NamedTuple):
    """The description of an algorithm."""

    name: str
    title: str
    text: str
    """The docstring of the algorithm without its first line; formulas are indented."""
    own: list[OptionLine]
    pieces: dict[str, str]
    """The names of the objective's advantage, ratio, surrogate and weights functions."""
    clip: str
    kl: str
    needs: list[str]


def describe(name: str) -> Description:
    """Describe an algorithm."""
    function = algorithm(name)
    shared = {} if name in ALGORITHMS else options_of(extended)
    own = {k: p for k, p in options_of(ALGORITHMS.get(name, function)).items() if k not in shared}
    required = {k: 1 for k, p in own.items() if p.default is p.empty}
    objective = build(name, **required)
    title, _, text = (inspect.getdoc(function) or name).partition("\n")
    return Description(
        name=name,
        title=title,
        text=text.strip("\n"),
        own=[_option(k, p) for k, p in own.items()],
        pieces={kind: _piece_name(kind, getattr(objective, kind)) for kind in PIECES},
        clip=_clip(own),
        kl=_kl(objective),
        needs=[shown for need, shown in SHOWN_NEEDS.items() if need in objective.needs],
    )


def shared_options() -> list[OptionLine]:
    """Return the options that every algorithm has."""
    return [_option(k, p) for k, p in options_of(extended).items()]


def _option(name: str, parameter: inspect.Parameter) -> OptionLine:
    given = parameter.default is parameter.empty
    meaning = OPTIONS[name].meaning if name in OPTIONS else ""  # a user's function has no preset
    return OptionLine(name, "given" if given else _text(parameter.default), meaning)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | int):
        return re.sub(r"e([+-])0*(\d)", r"e\1\2", f"{value:g}").replace("e+", "e")
    return str(value)


def _piece_name(kind: str, piece: Callable[..., Any]) -> str:
    function = function_of(piece)
    names = {f: n for n, f in PIECES[kind].items()}
    return names.get(function, getattr(function, "__name__", "own"))


def _clip(own: dict[str, inspect.Parameter]) -> str:
    if {"clip_low", "clip_high"} <= own.keys():
        return f"{_text(own['clip_low'].default)} / {_text(own['clip_high'].default)}"
    if "max_weight" in own:
        return f"weight up to {_text(own['max_weight'].default)}"
    return "none"


def _kl(objective: Objective) -> str:
    if not objective.beta:
        return "off"
    if objective.pairs:
        return f"{_text(objective.beta)} in the pair"
    names = {f: n for n, f in PENALTIES.items()}
    penalty = names.get(objective.penalty, getattr(objective.penalty, "__name__", "own"))
    return f"{_text(objective.beta)} {penalty} in {objective.kl_in}"


SHOWN_NEEDS: Mapping[Need, str] = MappingProxyType(
    {
        "reference": "reference",
        "old_entropy": "entropy",
        "success": "success",
        "tokens": "tokens",
        "parts": "reward parts",
        "teacher": "teacher",
        "privileged": "privileged text",
        "values": "critic",
        "sampler_as_old": "sampler_logp",
        "marks": "extra forward",
    }
)
"""Maps the inputs that descriptions show to their labels; other inputs are not shown."""


COLUMNS = ("name", "advantage", "ratio", "surrogate", "clip", "weights", "KL", "needs")


def row(description: Description) -> tuple[str, ...]:
    """Return the table row of an algorithm, with a cell for each of `COLUMNS`."""
    pieces = description.pieces
    return (
        description.name,
        pieces["advantage"],
        pieces["ratio"],
        pieces["surrogate"],
        description.clip,
        pieces["weights"],
        description.kl,
        ", ".join(description.needs) or "-",
    )


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
