"""Checks a section's options against the signature of the function that the section names."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from covey.config.other_names import theirs
from covey.config.schema import Named
from covey.errors import ConfigError, nearest

T = TypeVar("T")


def choose(
    registry: Mapping[str, Callable[..., T]], section: Named, table: str
) -> Callable[..., T]:
    """Return the function that the section's `name` refers to in the registry."""
    if section.name not in registry:
        hint = nearest(section.name, registry)
        raise ConfigError(f"config: {table}.name = {section.name!r} is not a known name{hint}")
    return registry[section.name]


def resolve_options(
    function: Callable[..., Any],
    section: Named,
    table: str,
    defaults: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Check the given options of `function`, and add the defaults of its other options.

    `defaults` has values for options that have no default in the function.
    """
    parameters, rest = _parameters(function)
    types = _types(function)
    others = {key: value for key, value in section.options.items() if key not in parameters}
    if others and rest is None:
        key = next(iter(others))
        if new := getattr(function, "renamed_options", {}).get(key):
            raise ConfigError(f"config: {table}.{key} was renamed to {table}.{new}")
        hint = theirs(key) or nearest(key, parameters)
        raise ConfigError(f"config: {table}.{key} is not an option of {section.name}{hint}")
    resolved = {}
    for key, parameter in parameters.items():
        if key in section.options:
            resolved[key] = _checked(types.get(key, Any), section.options[key], f"{table}.{key}")
        elif parameter.default is not parameter.empty:
            resolved[key] = parameter.default
        elif key in defaults:
            resolved[key] = defaults[key]
        else:
            raise ConfigError(
                f"config: {table}.{key} must be set for {section.name}, because it has no default"
            )
    for key, value in others.items():
        resolved[key] = _checked(types.get(rest or "", Any), value, f"{table}.{key}")
    return resolved


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], str | None]:
    """Return a function's named parameters, and the name of its `**` parameter or None."""
    parameters = inspect.signature(function).parameters
    rest = [key for key, p in parameters.items() if p.kind is p.VAR_KEYWORD]
    named = {
        key: p
        for key, p in parameters.items()
        if key != "name" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    return named, next(iter(rest), None)


def _types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's options, or an empty dict if a type hint is invalid."""
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # a user's annotations may exist for type checkers only
        return {}


def _checked(kind: Any, value: Any, setting: str) -> Any:
    adapter: TypeAdapter[Any] = TypeAdapter(
        kind, config=ConfigDict(strict=True, allow_inf_nan=False)
    )
    if isinstance(value, list) and typing.get_origin(kind) is tuple:
        value = tuple(value)  # TOML has arrays but no tuples
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        problem = message[0].lower() + message[1:]
        raise ConfigError(f"config: {setting} = {value!r}: {problem}") from None
