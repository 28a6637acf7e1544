"""Draw random sentences of the project's prose, for a reader who has not seen the project.

    python tests/prose/draw.py --count 60 --seed 0

The sentences come in equal shares from the docs (README.md and docs/), docstrings of covey/,
`--help` texts and error messages, and are numbered, each with its place. Give the list to a reader
and ask which sentences need a second reading: at most 2 of 60 should.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from covey import errors
from covey.cli.main import app

ROOT = Path(__file__).parents[2]
FEWEST_WORDS = 4
ERRORS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.CoveyError)
}


class Sentence(NamedTuple):
    """A sentence and its place."""

    text: str
    place: str


def sentences(text: str, place: str) -> Iterator[Sentence]:
    """Split a paragraph into sentences; leave out those of fewer than four words."""
    for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\"(])", " ".join(text.split())):
        if len(sentence.split()) >= FEWEST_WORDS:
            yield Sentence(sentence, place)


def prose(text: str, path: Path, first: int = 1) -> Iterator[Sentence]:
    """Yield the sentences of Markdown, without its headings, tables, code and doctests."""
    code = r"```.*?```|^>>> .*?(?=\n\s*\n|\Z)"
    blank = lambda found: "\n" * found[0].count("\n")  # noqa: E731
    text = re.sub(code, blank, text, flags=re.DOTALL | re.MULTILINE)
    block: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], first):
        item = re.match(r"\s*([-*]|\d+\.)\s+", line)
        if block and (item or not line.strip() or re.match(r"[#|<]|!\[| {4}", line)):
            yield from sentences(" ".join(block), f"{path}:{number - len(block)}")
            block = []
        if not re.match(r"[#|<]|!\[| {4}|\s*$", line):
            block.append(line[item.end() :] if item else line)


def docs() -> Iterator[Sentence]:
    """Yield the sentences of README.md and docs/."""
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield from prose(file.read_text(encoding="utf-8"), file.relative_to(ROOT))


@functools.cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Return all statements and expressions of covey/ with their files."""
    files = sorted((ROOT / "covey").rglob("*.py"))
    trees = ((file, ast.parse(file.read_text(encoding="utf-8"))) for file in files)
    return [(file.relative_to(ROOT), node) for file, tree in trees for node in ast.walk(tree)]


def docstrings() -> Iterator[Sentence]:
    """Yield the sentences of docstrings, also of those below a constant or a field."""
    for path, node in nodes():
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from prose(inspect.cleandoc(text), path, node.lineno)


def help_texts() -> Iterator[Sentence]:
    """Yield the sentences of `covey --help` and of every command's."""
    yield from _help_of(typer.main.get_command(app), "covey")


def _help_of(command: Any, name: str) -> Iterator[Sentence]:
    options = ((option, getattr(option, "help", None)) for option in command.params)
    texts = [(name, command.help), *((f"{name} {o.opts[-1]}", text) for o, text in options)]
    for place, text in texts:
        yield from sentences(text or "", f"{place} (--help)")
    for word, inner in getattr(command, "commands", {}).items():
        yield from _help_of(inner, f"{name} {word}")


def error_messages() -> Iterator[Sentence]:
    """Yield the sentences of errors that a user may see, with the source of what they fill in."""
    for path, node in nodes():
        match node:
            case ast.Call(func=ast.Name(id=name), args=[message, *_]) if name in ERRORS:
                yield from sentences(_filled(message), f"{path}:{node.lineno}")


def _filled(message: ast.expr) -> str:
    match message:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_filled, parts))
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
    return ""


@functools.cache
def sources() -> dict[str, list[Sentence]]:
    """Return all sentences by source."""
    kinds = {
        "docs": docs,
        "docstrings": docstrings,
        "help": help_texts,
        "errors": error_messages,
    }
    return {name: sorted(set(kind())) for name, kind in kinds.items()}


def draw(count: int, seed: int) -> list[Sentence]:
    """Draw sentences in equal shares from all sources, in random order."""
    chance = random.Random(seed)
    pools = [chance.sample(found, len(found)) for found in sources().values()]
    turns = [sentence for turn in zip(*pools, strict=False) for sentence in turn][:count]
    return chance.sample(turns, len(turns))


def main() -> None:
    """Print the numbered list."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for number, (text, place) in enumerate(draw(arguments.count, arguments.seed), 1):
        print(f"{number:3}. {text}\n     [{place}]")


if __name__ == "__main__":
    main()
