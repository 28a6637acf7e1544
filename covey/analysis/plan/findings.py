"""Which settings are the same, which do nothing and which may harm: said before training.

`findings` looks at one resolved configuration, `coincidences` at the arms of a comparison. Nothing
is loaded but what a configuration names by itself; what is known of the data is given as `Seen`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from covey.analysis.plan import idle, risk
from covey.analysis.plan.finding import Finding, Kind, Rule, Seen, Setup, setup_of, told
from covey.analysis.plan.same import normal_form, up_to_a_factor
from covey.config import Config

__all__ = ["Finding", "Kind", "Seen", "coincidences", "findings"]

RULES: tuple[Rule, ...] = (*idle.RULES, *risk.RULES)


def findings(config: Config, seen: Seen | None = None) -> list[Finding]:
    """Return what is to be said about a resolved configuration."""
    setup = setup_of(config, seen)
    return [finding for rule in RULES for finding in rule(setup)]


def coincidences(configs: Mapping[str, Config]) -> list[Finding]:
    """Return which arms of a comparison are one and the same run under several names.

    The configurations are resolved. Equal means the same gradient in every update: to the last bit
    where the arithmetic is the same too, and else up to rounding.
    """
    setups = {name: setup_of(config) for name, config in configs.items()}
    forms = {name: normal_form(setup) for name, setup in setups.items()}
    others = {name: _elsewhere(setup) for name, setup in setups.items()}
    found = []
    said: set[frozenset[str]] = set()
    for name in configs:
        alike = [n for n in configs if forms[n] == forms[name] and others[n] == others[name]]
        if len(alike) > 1 and frozenset(alike) not in said:
            said.add(frozenset(alike))
            found.append(_one_run(setups, alike))
    scaled = {name: up_to_a_factor(form) for name, form in forms.items()}
    for name in configs:
        alike = [n for n in configs if scaled[n] == scaled[name] and others[n] == others[name]]
        distinct = [n for i, n in enumerate(alike) if all(forms[n] != forms[m] for m in alike[:i])]
        if len(distinct) > 1 and frozenset(distinct) not in said:
            said.add(frozenset(distinct))
            found.append(_one_direction(distinct))
    return found


def _one_run(setups: Mapping[str, Setup], names: list[str]) -> Finding:
    differences = _differences([setups[name].config for name in names])
    one_update = all(setups[name].one_update for name in names)
    why = (
        "With one update per rollout every ratio is exactly 1, so ratios and clips do nothing. "
        if one_update
        else ""
    )
    what = f"{', '.join(differences)}, which changes no gradient here" if differences else "nothing"
    return told(
        "same",
        "one-update-per-rollout" if one_update else "arms-of-a-comparison",
        title=f"{_listed(names)} are the same algorithm here",
        why=f"{why}They differ in {what}: whatever comes out between them is chance.",
        remedy="take several updates per rollout, such as train.mini_batches = 4, or drop all but "
        "one"
        if one_update
        else "drop all but one",
    )


def _one_direction(names: list[str]) -> Finding:
    return told(
        "same",
        "a-constant-factor",
        title=f"{_listed(names)} differ by a constant factor of the loss only",
        why="Their gradients point the same way in every update. AdamW divides a constant factor "
        "out; only max_grad_norm and optimizer.eps can tell them apart.",
        remedy="drop all but one, or compare algorithms whose advantages or weights differ in more",
    )


def _elsewhere(setup: Setup) -> dict[str, Any]:
    """Return all settings outside of the objective that can change a gradient."""
    config = setup.config
    rest = config.model_dump(
        exclude={
            "objective": True,
            "scoring": True,
            "save": True,
            "evaluate": True,
            "sft": True,
            "model": {"gradient_checkpointing", "deterministic"},
            "filter": {"skip_zero_gradient"},
            "overlap": True,
            "train": {"micro_batch_tokens", "logits_megabytes", "graphs"},
        }
    )
    if not config.filter.dynamic_sampling:
        del rest["filter"]["max_rounds"]
    if setup.one_update and "old_logp" not in setup.objective.needs:
        del rest["train"]["old_logp"]
    if normal_form(setup)["penalty"] is None:
        del rest["reference"]
    return rest


def _differences(configs: list[Config]) -> list[str]:
    """Return the settings in which configurations differ, as dotted names."""
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
