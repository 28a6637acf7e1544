"""Kinds of reference policy and teacher and their settings, checked without loading a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from covey.config.schema import Reference as Section
from covey.config.teacher import Teacher
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
    """Reject a setting that the chosen kind of reference does not use."""
    for name, value in section.model_dump(exclude={"kind"}).items():
        if name not in OPTIONS[section.kind] and value != Section.model_fields[name].default:
            users = " or ".join(repr(kind) for kind, names in OPTIONS.items() if name in names)
            raise ConfigError(
                f"config: reference.{name} = {value!r} has no effect with reference.kind = "
                f"{section.kind!r}; it is a setting of {users}"
            )
    if section.kind == "server" and not section.url:
        raise ConfigError(
            "config: reference.kind = 'server' needs reference.url, such as http://127.0.0.1:8500"
        )


def check_teacher(section: Teacher) -> None:
    """Reject a [teacher] with no model, with both path and url, or with unused settings."""
    if bool(section.path) == bool(section.url):
        raise ConfigError(
            "config: this objective needs a teacher; set one of teacher.path and teacher.url"
        )
    idle = ("token_env", "timeout", "patience") if section.path else ("offload",)
    for name in idle:
        if getattr(section, name) != Teacher.model_fields[name].default:
            other = "url" if section.path else "path"
            raise ConfigError(f"config: teacher.{name} has no effect without teacher.{other}")
