"""Checks the settings of [reference] and [teacher] without loading a model."""

from __future__ import annotations

import os
from collections.abc import Mapping

from covey.config.schema import Reference as Section
from covey.config.schema import Teacher
from covey.errors import ConfigError

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "frozen": (),
    "offloaded": (),
    "adapter_off": (),
    "moving": ("alpha", "every"),
    "renewed": ("every",),
    "server": ("url", "token_env", "timeout", "patience", "fingerprint"),
}
"""Maps each kind of reference policy to the settings that this kind uses."""


def check_reference(section: Section) -> None:
    """Reject a setting that the chosen kind of reference does not use."""
    for name, value in section.model_dump(exclude={"kind"}).items():
        if name not in OPTIONS[section.kind] and value != Section.model_fields[name].default:
            kinds = " or ".join(repr(kind) for kind, names in OPTIONS.items() if name in names)
            raise ConfigError(
                f"config: reference.{name} = {value!r} has no effect with reference.kind = "
                f"{section.kind!r}, only with reference.kind = {kinds}"
            )
    if section.kind == "server" and not section.url:
        raise ConfigError(
            "config: reference.kind = 'server' needs reference.url, such as http://127.0.0.1:8500"
        )


def read_token(variable: str, setting: str) -> str:
    """Return the bearer token in an environment variable; an empty text if `variable` is empty.

    The error message names `setting`, the setting or option that contains the name of the variable.
    """
    token = os.environ.get(variable, "") if variable else ""
    if variable and not (token and token.isascii() and token.isprintable()):
        raise ConfigError(
            f"{setting}: this environment variable does not contain a valid access token; a token "
            "consists of printable ASCII characters"
        )
    return token


SELF_TEACHER = ("alpha", "every", "context", "template")
"""The settings of [teacher] that are used only together with `teacher.policy`."""


def check_teacher(section: Teacher, *, privileged: bool) -> None:
    """Reject [teacher] if the objective cannot use the teacher, or if a setting has no effect.

    If `privileged` is true, the teacher must be the policy itself, which sees extra text in its
    prompt, such as a correct completion.
    """
    if privileged:
        _check_self_teacher(section)
        return
    if section.policy:
        raise ConfigError(
            f"config: teacher.policy = {section.policy!r} works only with the objective sdpo; "
            "for other objectives, set teacher.path or teacher.url"
        )
    if bool(section.path) == bool(section.url):
        raise ConfigError(
            "config: the chosen objective needs a teacher; set either teacher.path or teacher.url"
        )
    idle = ("token_env", "timeout", "patience") if section.path else ("offload",)
    _check_idle(section, idle, "url" if section.path else "path")
    _check_idle(section, SELF_TEACHER, "policy")


def _check_self_teacher(section: Teacher) -> None:
    if not section.policy or section.path or section.url:
        raise ConfigError(
            "config: the chosen objective uses the policy as its own teacher; set teacher.policy "
            "to 'current', 'frozen' or 'moving', and leave out teacher.path and teacher.url"
        )
    _check_idle(section, ("token_env", "timeout", "patience"), "url")
    _check_idle(section, ("temperature",), "path or teacher.url")
    if section.policy != "moving":
        _check_idle(section, ("alpha", "every"), "policy = 'moving'")
    if section.policy != "frozen":
        _check_idle(section, ("offload",), "policy = 'frozen'")
    if not section.context:
        raise ConfigError(
            "config: teacher.context is empty, so the teacher would get the same prompt as the "
            "policy; add a source of text to teacher.context"
        )
    for name, text in section.context.items():
        if "{text}" not in text:
            raise ConfigError(
                f"config: teacher.context.{name} must contain the placeholder {{text}}"
            )
    for field in ("{prompt}", "{context}"):
        if field not in section.template:
            raise ConfigError(f"config: teacher.template must contain the placeholder {field}")


def _check_idle(section: Teacher, names: tuple[str, ...], other: str) -> None:
    for name in names:
        if getattr(section, name) != Teacher.model_fields[name].default:
            raise ConfigError(
                f"config: teacher.{name} has no effect without teacher.{other}; set "
                f"teacher.{other}, or leave out teacher.{name}"
            )
