"""Checking a named section's options against the function that it names."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from covey.config.schema import Named
from covey.errors import ConfigError, nearest

T = TypeVar("T")


def choose(
    registry: Mapping[str, Callable[..., T]], section: Named, where: str
) -> Callable[..., T]:
    """Return the function that a section names."""
    if section.name not in registry:
        hint = nearest(section.name, registry)
        raise ConfigError(f"config: {where}.name = {section.name!r} is not known{hint}")
    return registry[section.name]


def resolve_options(
    function: Callable[..., Any],
    section: Named,
    where: str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return all options of `function`: those given, checked, and the defaults of the others.

    `defaults` stand in where the function itself has none.
    """
    parameters = {
        name: p for name, p in inspect.signature(function).parameters.items() if name != "name"
    }
    types = typing.get_type_hints(function)
    for key in section.options:
        if key not in parameters:
            what = f"{where}.{key} is not an option of {section.name}"
            raise ConfigError(f"config: {what}{nearest(key, parameters)}")
    resolved = {}
    for key, parameter in parameters.items():
        if key in section.options:
            resolved[key] = _checked(types.get(key, Any), section.options[key], f"{where}.{key}")
        elif parameter.default is not parameter.empty:
            resolved[key] = parameter.default
        elif key in defaults:
            resolved[key] = defaults[key]
        else:
            raise ConfigError(f"config: {where}.{key} must be given for {section.name}")
    return resolved


def _checked(kind: Any, value: Any, where: str) -> Any:
    adapter: TypeAdapter[Any] = TypeAdapter(
        kind, config=ConfigDict(strict=True, allow_inf_nan=False)
    )
    if isinstance(value, list) and typing.get_origin(kind) is tuple:
        value = tuple(value)  # TOML has one kind of array
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(
            f"config: {where} = {value!r}: {message[0].lower()}{message[1:]}"
        ) from None
