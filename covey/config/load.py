"""Reads configurations from TOML files, recipes and `--set a.b=1` overrides, and writes them.

Every mistake raises a one-line error that names the key, the value and the nearest valid name.
"""

from __future__ import annotations

import copy
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from covey.config.other_names import check_names, theirs, translated
from covey.config.reference_kinds import OPTIONS as REFERENCE_KINDS
from covey.config.schema import Config, Named
from covey.errors import ConfigError, nearest, reason
from covey.escape import is_hidden

RECIPES = files("covey") / "recipes"
"""One folder for each system, with its recipes `NAME.toml`."""
DEEPEST = 16
"""Maximum depth of nested tables; settings need only a few levels."""
PLAIN = ("seed", "trackers")
"""Settings that belong to no section."""
REMOVED = ("reward_change",)
"""Sections of earlier versions that had no effect on training; files may still contain them."""
MAIN = ("model", "rollout", "optimizer", "train", "evaluate")
"""Sections that every run uses."""
OF_KINDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "reference": REFERENCE_KINDS,
    "engine": {"native": (), "process": ("device",), "vllm": ("vllm",)},
}
"""For each section with a `kind`, the settings that only some kinds use, by kind."""
Say = Callable[[str], None]


@cache
def _recipes() -> dict[str, Traversable]:
    return {
        file.name.removesuffix(".toml"): file
        for system in RECIPES.iterdir()
        if system.is_dir()
        for file in system.iterdir()
        if file.name.endswith(".toml")
    }


def recipe_text(name: str) -> str:
    """Return the text of a packaged recipe's file."""
    return _recipes()[name].read_text("utf-8")


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(_recipes())


def load_config(
    source: str | None = None, overrides: Iterable[str] = (), say: Say = lambda text: None
) -> Config:
    """Load a file, a named recipe or the defaults, and apply `key=value` overrides.

    `say` gets a line for each section whose settings an override drops.
    """
    data = {} if source is None else read_settings(source)
    return parse_config(overridden(data, overrides, say))


def overridden(
    data: Mapping[str, Any], overrides: Iterable[str], say: Say = lambda text: None
) -> dict[str, Any]:
    """Return a copy of the settings with `key=value` overrides applied.

    A new `name` drops the options of the function that the section named before, and a new `kind`
    drops the settings that only other kinds use; `say` gets a line about them. The section's other
    settings are kept.
    """
    changed = copy.deepcopy(dict(data))
    # Names are set first, because a new name removes the options of the previous function.
    for override in sorted(overrides, key=_order):
        _apply(changed, override, say)
    return changed


def _order(override: str) -> tuple[bool, int]:
    """Return a sort key: overrides of `name` and `kind` come first, outermost sections first."""
    key = override.partition("=")[0].strip()
    is_name = key.endswith((".name", ".kind"))
    return not is_name, key.count(".") if is_name else 0


def parse_config(data: Mapping[str, Any]) -> Config:
    """Check settings against the schema, and return them as a configuration."""
    _check_depth(data, "config")
    data = {section: values for section, values in data.items() if section not in REMOVED}
    if old := check_names(data):
        raise ConfigError(old)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def read_settings(source: str) -> dict[str, Any]:
    """Read the settings in a file or a recipe, without defaults."""
    path = Path(source)
    try:
        if path.is_file():
            # utf-8-sig: some editors write a byte order mark.
            settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))
            _check_depth(settings, f"config: {source}")
            # Run folders may come from version 0.1; files that users write must use the new keys.
            of_run = (path.parent / "environment.json").is_file()
            return translated(settings) if of_run else settings
        if source in recipe_names():
            return tomllib.loads(recipe_text(source))
    except RecursionError:
        raise ConfigError(f"config: {source}: values are nested too deeply") from None
    except OSError as error:
        raise ConfigError(f"config: {source}: {reason(error)}") from None
    except ConfigError:
        raise
    except ValueError as error:  # bad TOML and bad text
        raise ConfigError(f"config: {source}: {error}") from None
    hint = nearest(source, recipe_names()) if path.suffix != ".toml" else ""
    raise ConfigError(f"config: there is no file or recipe {source!r}{hint}")


def _check_depth(data: Mapping[str, Any], source: str) -> None:
    """Reject deeply nested data, which would exceed Python's recursion limit."""
    level: list[Any] = [data]
    for _ in range(DEEPEST):
        inner = [list(v.values()) if isinstance(v, Mapping) else v for v in level]
        level = [v for values in inner for v in values]
        level = [v for v in level if isinstance(v, Mapping | list | tuple)]
    if level:
        raise ConfigError(
            f"{source}: values are nested too deeply, in more than {DEEPEST} tables or lists"
        )


def _apply(data: dict[str, Any], override: str, say: Say) -> None:
    key, equals, raw = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"the setting {override!r} must have the form key=value, such as train.steps=100"
        )
    *sections, last = key.strip().split(".")
    if (sections or [last])[0] in REMOVED:
        raise ConfigError(f"config: {key} has been removed, and has no effect; leave it out")
    table = data
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"config: {key} cannot be set, because {section!r} is a single value, not a table"
            )
    value = _value(raw.strip())
    if last in ("name", "kind"):
        _drop_others(table, sections, last, value, say)
    table[last] = value


def _drop_others(
    table: dict[str, Any], sections: list[str], key: str, value: object, say: Say
) -> None:
    """Remove the settings of a section that only its old name or kind has."""
    path, section = ".".join(sections), _section_at(sections)
    if key == "kind" and path in OF_KINDS and section:
        kinds, old = OF_KINDS[path], table.get("kind", section.model_fields["kind"].default)
        of_others = {name for names in kinds.values() for name in names}
        dropped = [k for k in table if k in of_others and k not in kinds.get(str(value), ())]
    elif key == "name":
        old = _present_name(section, table)
        declared = section.model_fields if section and issubclass(section, Named) else {"name": 0}
        dropped = [k for k in table if k not in declared]
    else:
        return
    if value == old:
        return
    for name in dropped:
        del table[name]
    if dropped:
        names = ", ".join(f"{path}.{name}" for name in dropped)
        say(f"{path}.{key} = {value!r} replaces {old!r}, so these settings are dropped: {names}")


def _section_at(path: list[str]) -> type[BaseModel] | None:
    """Return the section with a dotted path; None if the path leads into a table of options."""
    section: type[BaseModel] = Config
    for part in path:
        field = section.model_fields.get(part)
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        section = inner
    return section


def _present_name(section: type[BaseModel] | None, table: Mapping[str, Any]) -> object:
    """Return the `name` of a section, or the default name for its keys if no name is given."""
    if "name" in table or section is None or not issubclass(section, Named):
        return table.get("name")
    return section.model_validate(table).name


def _value(raw: str) -> Any:
    """Parse a text as a TOML value; return the text itself if it is not valid TOML."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except RecursionError:
        raise ConfigError("config: the value of a setting is nested too deeply") from None
    except ValueError:  # not TOML, or a number with too many digits for Python
        return raw


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        section = _section(path[:-1])
        elsewhere = "" if path[:-1] else _other_section(path[-1])
        hint = elsewhere or theirs(name, path[-1]) or nearest(path[-1], section.model_fields)
        return f"config: {name} is not a setting{hint}"
    if first["type"] == "value_error":
        return f"config: {first['ctx']['error']}"
    if first["type"] == "model_type":
        return f"config: {name} is a table: write [{name}], or {name}.KEY=VALUE"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"config: {name} = {first['input']!r}: {message}"


def _section(path: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for part in path:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        section = annotation
    return section


def _other_section(key: str) -> str:
    """Return a hint if another section has this key; prefer sections that every run uses."""
    sections = [*MAIN, *(name for name in Config.model_fields if name not in (*PLAIN, *MAIN))]
    found = (name for name in sections if key in _section([name]).model_fields)
    return next((f"; did you mean '{name}.{key}'?" for name in found), "")


def to_toml(config: Config) -> str:
    """Return TOML text from which `load_config` reads the same configuration."""
    lines = [f"{name} = {toml_value(getattr(config, name))}" for name in PLAIN]
    for name in Config.model_fields:
        section = getattr(config, name)
        if not isinstance(section, BaseModel):
            continue
        lines += ["", f"[{name}]"]
        values = section.model_dump()
        if isinstance(section, Named):
            values = {**section.settings, **section.options}
        lines += toml_lines(values)
    return "\n".join(lines) + "\n"


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Return the TOML lines of a table, one line per key.

    TOML has no null, so values of None are omitted. The omission loses no setting, because each
    setting that may be None is None by default.
    """
    return [f"{_key(k)} = {toml_value(v)}" for k, v in values.items() if v is not None]


def _key(key: str) -> str:
    """Return a key in TOML syntax, in quotes if the key needs quotes."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def _toml_sign(sign: str) -> str:
    if not is_hidden(sign):
        return sign
    return f"\\u{ord(sign):04x}" if ord(sign) < 0x10000 else f"\\U{ord(sign):08x}"


def plain_value(key: str, value: Any) -> Any:
    """Return a setting given in Python as plain data: a path as text, a numpy number as a number.

    Raise ConfigError if the value cannot be a setting.
    """
    if isinstance(value, Mapping):
        return {name: plain_value(f"{key}.{name}", each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(key, each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numbers, arrays and tensors of numpy and torch
        return plain_value(key, value.tolist())
    if value is None or isinstance(value, bool | int | float | str | date | time):
        return value
    raise ConfigError(
        f"config: {key} is an object of type {type(value).__name__}; a setting must be a text, a "
        "number, a boolean, a path, a list or a dict"
    )


def toml_value(value: Any) -> str:
    """Return one value as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML string once its invisible characters are escaped.
        return "".join(map(_toml_sign, json.dumps(value, ensure_ascii=False)))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    return repr(value)
