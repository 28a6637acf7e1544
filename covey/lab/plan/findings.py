"""Finds equivalent algorithms, settings without effect, and harmful settings before training.

`findings` checks one resolved configuration, and `coincidences` checks the arms of a comparison.
`findings` and `coincidences` load neither a model nor data. The caller passes known facts about the
data as `TaskFacts`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from covey.config import Config

# Importing these modules registers their rules.
from covey.lab.plan import idle_settings, risky_settings  # noqa: F401
from covey.lab.plan.equivalence import normal_form, up_to_a_factor
from covey.lab.plan.finding import RULES, Finding, Said, Setup, setup_of
from covey.lab.plan.task_facts import TaskFacts


def findings(config: Config, facts: TaskFacts | None = None) -> list[Finding]:
    """Return all findings about a resolved configuration."""
    setup = setup_of(config, facts)
    return [finding for rule in RULES for finding in rule(setup)]


def coincidences(configs: Mapping[str, Config]) -> list[Finding]:
    """Return a finding for each set of a comparison's arms that train in the same way.

    Arms train in the same way if their gradients are equal in every optimizer step, or differ only
    by a constant factor. Gradients are equal bit for bit if the arms use the same arithmetic, and
    otherwise up to rounding. Every configuration must be a result of `resolve`.
    """
    setups = {name: setup_of(config) for name, config in configs.items()}
    forms = {name: normal_form(setup) for name, setup in setups.items()}
    others = {name: _other_settings(setup) for name, setup in setups.items()}
    results: list[Finding] = []
    reported: set[frozenset[str]] = set()
    for name in configs:
        alike = [n for n in configs if forms[n] == forms[name] and others[n] == others[name]]
        if len(alike) > 1 and frozenset(alike) not in reported:
            reported.add(frozenset(alike))
            results.append(_equal_runs(setups, alike))
    scaled = {name: up_to_a_factor(form) for name, form in forms.items()}
    for name in configs:
        alike = [n for n in configs if scaled[n] == scaled[name] and others[n] == others[name]]
        distinct = [n for i, n in enumerate(alike) if all(forms[n] != forms[m] for m in alike[:i])]
        if len(distinct) > 1 and frozenset(distinct) not in reported:
            reported.add(frozenset(distinct))
            results.append(_proportional_runs(distinct))
    return results


def _equal_runs(setups: Mapping[str, Setup], names: list[str]) -> Finding:
    differences = _differences([setups[name].config for name in names])
    single = all(setups[name].single_optimizer_step for name in names)
    why, remedy = "", "keep only one of these arms"
    if single:
        why = (
            "With one optimizer step per training step, every ratio is 1, so ratios and clips "
            "have no effect. "
        )
        remedy = (
            "take several optimizer steps, such as train.mini_batches = 4, or keep only one of "
            "these arms"
        )
    what = f"{', '.join(differences)}, which changes no gradient here" if differences else "nothing"
    said = Said(
        (*differences,),
        title=f"{_listed(names)} are the same algorithm here",
        why=f"{why}The arms differ in {what}: any difference between their results is chance.",
        remedy=remedy,
    )
    return said.finding("same", "single-optimizer-step" if single else "arms-of-a-comparison")


def _proportional_runs(names: list[str]) -> Finding:
    said = Said(
        ("objective.name",),
        title=f"{_listed(names)} differ only by a constant factor of the loss",
        why="The gradients of these arms have the same direction in every optimizer step. AdamW "
        "divides a constant factor out; only max_grad_norm and optimizer.eps make a difference.",
        remedy="keep only one of these arms, or compare algorithms that differ in more than a "
        "constant factor",
    )
    return said.finding("same", "constant-factors")


def _other_settings(setup: Setup) -> dict[str, Any]:
    """Return all settings outside the [objective] section that can change a gradient."""
    config = setup.config
    rest = config.model_dump(
        exclude={
            "objective": True,
            "scoring": True,
            "save": True,
            "evaluate": True,
            "sft": True,
            "model": {"gradient_checkpointing", "offload_activations", "deterministic"},
            "filter": {"skip_zero_gradient"},
            "train": {"micro_batch_tokens", "logits_megabytes", "graphs"},
        }
    )
    if not config.overlap.staleness:
        del rest["overlap"]["max_staleness"]
    if not config.filter.dynamic_sampling:
        del rest["filter"]["max_rounds"]
    if setup.single_optimizer_step and "old_logp" not in setup.objective.needs:
        del rest["train"]["old_logp"]
    if normal_form(setup)["penalty"] is None:
        del rest["reference"]
    if "teacher" not in setup.objective.needs:
        del rest["teacher"]
    if "values" not in setup.objective.needs:
        del rest["critic"]
    return rest


def _differences(configs: list[Config]) -> list[str]:
    """Return the dotted names of the settings in which configurations differ."""
    flat = []
    for config in configs:
        tables = config.model_dump()
        tables["objective"] = {"name": config.objective.name, **config.objective.options}
        pairs = {f"{table}.{key}": value for table, values in tables.items()
                 if isinstance(values, dict) for key, value in values.items()}  # fmt: skip
        flat.append(pairs | {"seed": config.seed})
    keys = dict.fromkeys(key for pairs in flat for key in pairs)
    values = {key: {json.dumps(p.get(key), default=str) for p in flat} for key in keys}
    return [key for key in keys if len(values[key]) > 1]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}"
