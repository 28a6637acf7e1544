"""Builds the reference policy and the teacher from the configuration's sections [reference] and
[teacher]."""

from __future__ import annotations

from collections.abc import Callable

from covey.config.reference_kinds import check_reference, check_teacher, read_token
from covey.config.schema import Config, Teacher
from covey.config.schema import Reference as ReferenceSection
from covey.errors import ConfigError
from covey.models.language_model import LanguageModel
from covey.models.model_path import adapter_base
from covey.reference.client import Address, ServerReference
from covey.reference.fingerprint import tokenizer_digest
from covey.reference.frozen import (
    AdapterOffReference,
    CurrentPolicy,
    FrozenReference,
    OffloadedReference,
)
from covey.reference.moving import MovingReference
from covey.reference.protocol import Reference

TEACHER_FILE = "teacher.safetensors"


def make_reference(
    config: Config, *, policy: LanguageModel, load: Callable[[], LanguageModel]
) -> Reference:
    """Build the reference. `load` returns a second copy of the policy's starting weights."""
    section = config.reference
    check_reference(section)
    temperature, megabytes = config.rollout.temperature, config.train.logits_megabytes
    if section.kind == "server":
        return ServerReference(
            address=_address(section, "reference"),
            temperature=temperature,
            tokenizer=tokenizer_digest(policy),
            weights=section.fingerprint,
        )
    # Under a new adapter, the base weights are the starting weights: no second copy is needed.
    under = section.kind == "frozen" and policy.adapter and not adapter_base(config.model.path)
    if section.kind == "adapter_off" or under:
        return AdapterOffReference(
            model=policy, temperature=temperature, logits_megabytes=megabytes
        )
    if section.kind in ("moving", "renewed"):
        return MovingReference(
            model=load(),
            temperature=temperature,
            logits_megabytes=megabytes,
            alpha=section.alpha if section.kind == "moving" else 1.0,
            every=section.every,
        )
    return _frozen(load(), section.kind == "offloaded", temperature, megabytes)


def _frozen(model: LanguageModel, offload: bool, temperature: float, megabytes: float) -> Reference:
    # The shards themselves bring offloaded weights back to the device.
    kind = OffloadedReference if offload and not model.sharded else FrozenReference
    return kind(model=model, temperature=temperature, logits_megabytes=megabytes)


def make_self_teacher(
    config: Config, *, policy: LanguageModel, load: Callable[[], LanguageModel]
) -> Reference:
    """Build the teacher of self-distillation: the policy, or a copy of its starting weights.

    `load` returns the copy of the starting weights. The teacher uses the temperature at which the
    policy samples.
    """
    section = config.teacher
    if section.policy == "current":
        return CurrentPolicy(
            model=policy,
            temperature=config.rollout.temperature,
            logits_megabytes=config.train.logits_megabytes,
        )
    kind = "offloaded" if section.offload else section.policy
    moves = {"alpha": section.alpha, "every": section.every} if kind == "moving" else {}
    same = ReferenceSection.model_validate({"kind": kind, **moves})
    teacher = make_reference(
        config.model_copy(update={"reference": same}), policy=policy, load=load
    )
    if isinstance(teacher, MovingReference):
        teacher.file = TEACHER_FILE  # the run may have a moving reference too
    return teacher


def make_teacher(
    config: Config, *, policy: LanguageModel, load: Callable[[str], LanguageModel]
) -> Reference:
    """Build the teacher of distillation, which is a model with the policy's tokenizer.

    `load` loads the model at a path; for the path of an adapter, it also loads the base model.
    """
    section = config.teacher
    check_teacher(section, privileged=False)
    if section.url:
        return ServerReference(
            address=_address(section, "teacher"),
            temperature=section.temperature,
            tokenizer=tokenizer_digest(policy),
        )
    model = load(section.path)
    if tokenizer_digest(model) != tokenizer_digest(policy):
        raise ConfigError(
            f"config: teacher.path = {section.path!r} has a different tokenizer than model.path = "
            f"{config.model.path!r}; choose a teacher with the policy's tokenizer"
        )
    return _frozen(model, section.offload, section.temperature, config.train.logits_megabytes)


def _address(section: ReferenceSection | Teacher, name: str) -> Address:
    return Address(
        url=section.url.rstrip("/"),
        token=read_token(section.token_env, f"config: {name}.token_env = {section.token_env!r}"),
        timeout=section.timeout,
        patience=section.patience,
    )
