"""Write docs/settings.md from the schema (python -m tools.settings_page FILE)."""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from covey.config.load import toml_value
from covey.config.other_names import OTHER_NAMES, Names
from covey.config.schema import Config

START = "<!-- generated: make docs -->\n"
HEAD = "| setting | type | default | meaning | TRL | verl |\n|---|---|---|---|---|---|"


def page() -> str:
    """Return the settings page: one Markdown table per configuration section."""
    top = [_row(n, n, f, _texts(Config)) for n, f in Config.model_fields.items() if not _inner(f)]
    parts = [f"## Outside of sections\n\n{HEAD}\n" + "\n".join(top)]
    for key, section in sections(Config):
        texts = _texts(section)
        rows = [
            _row(f"{key}.{name}", name, field, texts)
            for name, field in section.model_fields.items()
            if not _inner(field)
        ]
        # Options that an algorithm, a task or a reward defines.
        text = "An option; `covey algorithms NAME` shows its default." if "objective" in key else ""
        for other, names in OTHER_NAMES.items():
            place, _, name = other.rpartition(".")
            if place == key and name not in section.model_fields:
                rows.append(_line([f"`{other}`", "", "", text, *map(_code, names)]))
        parts.append(f"## [{key}]\n\n{HEAD}\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def sections(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted name and the class of each config section, outer sections first."""
    for name, field in kind.model_fields.items():
        inner = _inner(field)
        if inner is not None:
            yield prefix + name, inner
            yield from sections(inner, f"{prefix}{name}.")


def _inner(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _texts(kind: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field of a class."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, BaseModel) and each.__module__.startswith("covey."):
            body = ast.parse(inspect.getsource(each)).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, text in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    value = text.value if isinstance(text, ast.Expr) else None
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        found[field.target.id] = " ".join(value.value.split())
    return found


def _row(key: str, name: str, field: FieldInfo, texts: dict[str, str]) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "" if default is PydanticUndefined or default is None else f"`{toml_value(default)}`"
    names = OTHER_NAMES.get(key, Names())
    cells = [
        f"`{key}`",
        type_text(field.annotation),
        shown,
        texts.get(name, ""),
        *map(_code, names),
    ]
    return _line(cells)


def _code(name: str) -> str:
    return f"`{name}`" if name else ""


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def type_text(annotation: Any) -> str:
    """Return a plain-English name for a type annotation.

    >>> type_text(list[str]), type_text(Literal["a", "b"]), type_text(float | None)
    ('list of text', '"a" or "b"', 'number')
    """
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f'"{each}"' for each in inside)
    if origin in (typing.Union, types.UnionType):
        kinds = dict.fromkeys(type_text(each) for each in inside if each is not type(None))
        return " or ".join(kinds)
    if origin is typing.Annotated:
        return type_text(inside[0])
    if origin is list:
        return f"list of {type_text(inside[0])}"
    if origin is dict:
        return "table"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return names.get(annotation, "table")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    introduction = file.read_text(encoding="utf-8").partition(START)[0]
    file.write_text(introduction + START + page(), encoding="utf-8")
