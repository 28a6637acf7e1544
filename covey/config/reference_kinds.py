"""Kinds of reference policy and the settings of each, checked without loading a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from covey.config.schema import Reference as Section
from covey.errors import ConfigError

OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "frozen": (),
        "offloaded": (),
        "adapter_off": (),
        "moving": ("alpha", "every"),
        "renewed": ("every",),
        "server": ("url", "token_env", "timeout", "patience", "fingerprint"),
    }
)
"""Each kind of reference with the settings that it reads."""


def check_reference(section: Section) -> None:
    """Reject a setting that the chosen kind of reference does not read."""
    for name, value in section.model_dump(exclude={"kind"}).items():
        if name not in OPTIONS[section.kind] and value != Section.model_fields[name].default:
            users = " or ".join(repr(kind) for kind, names in OPTIONS.items() if name in names)
            raise ConfigError(
                f"config: reference.{name} = {value!r} has no effect with reference.kind = "
                f"{section.kind!r}; it belongs to {users}"
            )
    if section.kind == "server" and not section.url:
        raise ConfigError("config: reference.url must be given for reference.kind = 'server'")
