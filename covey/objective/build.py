"""Builds an objective from a name and options.

The name is an algorithm, `composed` for a combination of named functions (advantage, ratio,
surrogate, weights), or the import path of a user's function. Each name stands for a function that
returns an `Objective`. The function of an algorithm accepts the algorithm's own options and the
options that all algorithms share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

from covey.errors import ConfigError, CoveyError, nearest, users_error
from covey.objective.algorithms import ALGORITHMS
from covey.objective.compose import composer, hints_of, options_of, signed
from covey.objective.correction import AGREEMENT, CORRECTIONS
from covey.objective.loss import Objective
from covey.objective.options import check_options, check_types
from covey.objective.penalty import k3_sequence
from covey.objective.ratio import RATIOS
from covey.objective.surrogate import geometric_clipped
from covey.trust import import_callable, is_import_path

COMPOSED = "composed"
Correction = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
    "divergence_mask",
]


def extended(
    objective: Objective,
    *,
    kl_in: Literal["loss", "reward"] = "loss",
    kl_target: float = 0.0,
    kl_horizon: float = 10_000.0,
    entropy_bonus: float = 0.0,
    top_entropy: float = 1.0,
    correction: Correction = "none",
    correction_low: float = 0.0,
    correction_high: float = 2.0,
    correction_mean_one: bool = False,
    veto: float = 0.0,
    off_policy_limit: float = 0.0,
) -> Objective:
    """Set the options that all algorithms share; default values leave the objective unchanged."""
    given = {
        "kl_in": kl_in,
        "kl_target": kl_target,
        "kl_horizon": kl_horizon,
        "entropy_bonus": entropy_bonus,
        "top_entropy": top_entropy,
        "correction_mean_one": correction_mean_one,
        "veto": veto,
        "off_policy_limit": off_policy_limit,
    }
    usual = {k: p.default for k, p in options_of(extended).items()}
    changes: dict[str, Any] = {k: v for k, v in given.items() if v != usual[k]}
    if objective.pairs and "kl_in" in changes:
        raise ConfigError(
            "objective.kl_in = 'reward' does not work with preference pairs, because objectives "
            "on pairs have no KL penalty; leave out objective.kl_in"
        )
    if correction != "none":
        bounds = {"low": correction_low, "high": correction_high}
        agreement = AGREEMENT.get(correction, 1.0)
        if not correction_low <= agreement <= correction_high:
            raise ConfigError(
                f"the range from objective.correction_low = {correction_low} to "
                f"objective.correction_high = {correction_high} must contain {agreement:g}, the "
                f"value of the correction {correction!r} for equal log-probs of engine and trainer"
            )
        changes["correction"] = partial(CORRECTIONS[correction], **bounds)
    return replace(objective, **changes)


def algorithm(name: str, pieces: Mapping[str, Any] | None = None) -> Callable[..., Objective]:
    """Return a callable that builds the objective of the named algorithm.

    The callable's parameters are the algorithm's own options and the shared options. For the
    algorithm `composed`, `pieces` names the advantage, ratio, surrogate and weights functions to
    combine. The options of the combined functions are parameters of the callable too.
    """
    if name == COMPOSED:
        own = composer(pieces or {})
    elif is_import_path(name):
        own = _users(name, import_callable(name, "objective.name"))
    elif name in ALGORITHMS:
        return _with_extensions_once(name, ALGORITHMS[name])
    else:
        hint = nearest(name, [*ALGORITHMS, COMPOSED])
        raise ConfigError(f"config: objective.name = {name!r} is not a known algorithm{hint}")
    return _with_extensions(name, own)


def build(name: str, **options: Any) -> Objective:
    """Build an objective; an unknown option raises an error that lists the known options."""
    function = algorithm(name, options)
    parameters = inspect.signature(function).parameters
    for key in options:
        if key not in parameters:
            known = ", ".join(parameters)
            raise ConfigError(f"algorithm {name} has no option {key!r}; its options are {known}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(f"algorithm {name} needs the option {key!r}")
    return function(**options)


def _users(name: str, function: Callable[..., Any]) -> Callable[..., Objective]:
    """Wrap a user's function, so that an exception becomes a one-line error message."""
    parameters = dict(inspect.signature(function).parameters)
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise ConfigError(
                f"objective.name = {name!r}: the function cannot have the parameter "
                f"'{parameter}', because Covey passes every option by name"
            )
        parameters[key] = parameter.replace(kind=parameter.KEYWORD_ONLY)

    def own(**options: Any) -> Objective:
        try:
            objective = function(**options)
        except CoveyError:
            raise
        except Exception as error:
            what = users_error(error)
            raise ConfigError(f"objective.name = {name!r} raised an error: {what}") from error
        if not isinstance(objective, Objective):
            raise ConfigError(
                f"objective.name = {name!r} returned {type(objective).__name__}; it must return a "
                "covey.objective.Objective"
            )
        return objective

    own.__doc__ = function.__doc__
    return signed(own, parameters, hints_of(function, parameters))


def _with_extensions(name: str, own: Callable[..., Objective]) -> Callable[..., Objective]:
    """Return a function that accepts an algorithm's options and the options of `extended`."""
    mine = inspect.signature(own).parameters
    more = {k: p for k, p in options_of(extended).items() if k not in mine}
    parameters = {**mine, **more}
    hints = {**hints_of(extended), **hints_of(own)}

    def whole(**options: Any) -> Objective:
        check_types(name, options, hints)
        given = {k: options.get(k, p.default) for k, p in parameters.items()}
        check_options(name, given)
        objective = own(**{k: given[k] for k in mine})
        return _checked(name, extended(objective, **{k: given[k] for k in more}))

    whole.__name__, whole.__doc__ = getattr(own, "__name__", name), own.__doc__
    return signed(whole, parameters, hints)


_with_extensions_once = cache(_with_extensions)


def _checked(name: str, objective: Objective) -> Objective:
    """Reject combinations of options that would silently have no effect."""
    by_sequence = objective.per_sequence and objective.ratio is not RATIOS["sequence_token"]
    surrogate = getattr(objective.surrogate, "func", objective.surrogate)
    if objective.top_entropy < 1.0 and (by_sequence or surrogate is geometric_clipped):
        raise ConfigError(
            f"objective.top_entropy selects single tokens, but the loss of {name} has only one "
            "term per completion; use gspo_token, whose loss has one term per token"
        )
    if objective.penalty is k3_sequence and objective.kl_in == "reward":
        raise ConfigError(
            f"{name}: objective.kl = 'k3_sequence' does not work with objective.kl_in = 'reward', "
            "because this KL estimate covers whole completions; set objective.kl = 'k1', or "
            "objective.kl_in = 'loss'"
        )
    if "parts" in objective.needs and objective.kl_in_reward:
        raise ConfigError(
            f"objective.kl_in = 'reward' does not work with {name}, which normalizes each part of "
            "the reward separately; set objective.kl_in = 'loss'"
        )
    if "teacher" in objective.reads and "groups" not in objective.reads and objective.kl_in_reward:
        raise ConfigError(
            f"objective.kl_in = 'reward' does not work with {name}, which does not use the reward; "
            "set objective.kl_in = 'loss', or set objective.task above 0"
        )
    if objective.pairs:
        _check_pairs(name, objective)
    if objective.kl_target and not objective.beta:
        raise ConfigError(
            "objective.kl_target adapts objective.beta, so it has no effect with objective.beta "
            "= 0; set objective.beta above 0"
        )
    return objective


def _check_pairs(name: str, objective: Objective) -> None:
    """Reject options that have no effect on a loss that compares pairs of completions."""
    refused = {
        "correction": objective.correction is not None,
        "veto": objective.veto > 0,
        "off_policy_limit": objective.off_policy_limit > 0,
        "top_entropy": objective.top_entropy < 1,
        "kl_target": objective.kl_target > 0,
    }
    for option, given in refused.items():
        if given:
            raise ConfigError(
                f"objective.{option} has no effect on {name}, which compares pairs of whole "
                f"completions; leave out objective.{option}"
            )
    if objective.beta <= 0:
        raise ConfigError(f"objective.beta = {objective.beta} must be above 0 for {name}")
