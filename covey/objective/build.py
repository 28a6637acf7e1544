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
from types import MappingProxyType
from typing import Any, Literal

from covey.errors import ConfigError, CoveyError, nearest, users_error
from covey.objective.advantage import (
    ADVANTAGES,
    parts_standardized,
    returns_whitened,
    reward_itself,
)
from covey.objective.algorithms import ALGORITHMS
from covey.objective.algorithms.distillation import READS as TEACHER
from covey.objective.algorithms.distillation import towards_teacher
from covey.objective.algorithms.entropy import (
    SHAPED_BY_ENTROPY,
    WITHOUT_CONFLICTS,
    entropy_shaped_sequences,
    entropy_shaped_tokens,
    without_conflicts,
)
from covey.objective.algorithms.turns import OF_STATES, OF_TURNS, by_state, by_turn
from covey.objective.correction import AGREEMENT, CORRECTIONS
from covey.objective.loss import Need, Objective
from covey.objective.options import check_options, check_types, hints_of, options_of
from covey.objective.penalty import PENALTIES, Kl, k3_sequence
from covey.objective.ratio import RATIOS
from covey.objective.surrogate import SURROGATES, geometric_clipped
from covey.objective.weights import WEIGHTS
from covey.trust import import_callable, is_import_path

COMPOSED = "composed"
PIECES: Mapping[str, Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "advantage": {
            **ADVANTAGES,
            "entropy_shaped_tokens": entropy_shaped_tokens,
            "entropy_shaped_sequences": entropy_shaped_sequences,
            "without_conflicts": without_conflicts,
            "towards_teacher": towards_teacher,
            "by_turn": by_turn,
            "by_state": by_state,
        },
        "ratio": RATIOS,
        "surrogate": SURROGATES,
        "weights": WEIGHTS,
    }
)
READS: Mapping[Callable[..., Any], frozenset[Need]] = MappingProxyType(
    {
        reward_itself: frozenset(),
        returns_whitened: frozenset(),
        entropy_shaped_tokens: SHAPED_BY_ENTROPY,
        entropy_shaped_sequences: SHAPED_BY_ENTROPY,
        without_conflicts: WITHOUT_CONFLICTS,
        parts_standardized: frozenset({"groups", "parts"}),
        towards_teacher: TEACHER,
        by_turn: OF_TURNS,
        by_state: OF_STATES,
    }
)
"""Maps an advantage function to the inputs that it reads; advantage functions that are not listed
read only "groups"."""
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


def find_algorithm(name: str, pieces: Mapping[str, Any] | None = None) -> Callable[..., Objective]:
    """Return a callable that builds the objective of the named algorithm.

    The callable's parameters are the algorithm's own options and the shared options. For the
    algorithm `composed`, `pieces` names the advantage, ratio, surrogate and weights functions to
    combine. The options of the combined functions are parameters of the callable too.
    """
    if name == COMPOSED:
        return _with_shared(name, *_composed(pieces or {}))
    if is_import_path(name):
        return _with_shared(name, *_users(name, import_callable(name, "objective.name")))
    if name not in ALGORITHMS:
        hint = nearest(name, [*ALGORITHMS, COMPOSED])
        raise ConfigError(f"config: objective.name = {name!r} is not a known algorithm{hint}")
    return _of_registry(name)


@cache
def _of_registry(name: str) -> Callable[..., Objective]:
    function = ALGORITHMS[name]
    return _with_shared(name, function, options_of(function), hints_of(function))


def build(name: str, **options: Any) -> Objective:
    """Build an objective; an unknown option raises an error that lists the known options."""
    function = find_algorithm(name, options)
    parameters = inspect.signature(function).parameters
    for key in options:
        if key not in parameters:
            known = ", ".join(parameters)
            raise ConfigError(f"algorithm {name} has no option {key!r}; its options are {known}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(f"algorithm {name} needs the option {key!r}")
    return function(**options)


Own = tuple[Callable[..., Objective], dict[str, inspect.Parameter], dict[str, Any]]
"""An algorithm's function, and the parameters and types of its options."""


def _composed(given: Mapping[str, Any]) -> Own:
    names: dict[str, Any] = {
        "advantage": "standardized",
        "ratio": "token",
        "surrogate": "clipped",
        "weights": "token_mean",
    }
    names |= {kind: given[kind] for kind in names if kind in given}
    for kind, name in names.items():
        if not isinstance(name, str) or name not in PIECES[kind]:
            hint = nearest(str(name), PIECES[kind])
            if is_import_path(str(name)):
                hint = (
                    "; a function of your own is an algorithm: set objective.name = "
                    f"'MODULE:FUNCTION' to a function that returns an Objective with your {kind}"
                )
            raise ConfigError(f"config: objective.{kind} = {name!r} is not a known value{hint}")
    pieces = {kind: PIECES[kind][name] for kind, name in names.items()}

    def composed(*, beta: float = 0.0, kl: Kl = "k3", **options: Any) -> Objective:
        """Combine the chosen advantage, ratio, surrogate and weights."""
        made: dict[str, Any] = {}
        for kind, piece in pieces.items():
            mine = {key: options[key] for key in options_of(piece)}
            made[kind] = partial(piece, **mine) if mine else piece
        reads = READS.get(pieces["advantage"], frozenset({"groups"}))
        return Objective(**made, beta=beta, penalty=PENALTIES[kl], reads=reads)

    place = inspect.Parameter.KEYWORD_ONLY
    parameters = {k: inspect.Parameter(k, place, default=name) for k, name in names.items()}
    hints: dict[str, Any] = dict.fromkeys(names, str)
    for function in (*pieces.values(), composed):
        parameters |= options_of(function)
        hints |= hints_of(function)
    return composed, parameters, hints


def _users(name: str, function: Callable[..., Any]) -> Own:
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
    return own, parameters, hints_of(function, parameters)


def _with_shared(
    name: str,
    own: Callable[..., Objective],
    mine: dict[str, inspect.Parameter],
    hints: dict[str, Any],
) -> Callable[..., Objective]:
    """Return a function that accepts an algorithm's options and the options of `extended`."""
    more = {k: p for k, p in options_of(extended).items() if k not in mine}
    parameters = {**mine, **more}
    hints = {**hints_of(extended), **hints}

    def whole(**options: Any) -> Objective:
        check_types(name, options, hints)
        given = {k: options.get(k, p.default) for k, p in parameters.items()}
        check_options(name, given)
        objective = own(**{k: given[k] for k in mine})
        return _checked(name, extended(objective, **{k: given[k] for k in more}))

    whole.__name__, whole.__doc__ = getattr(own, "__name__", name), own.__doc__
    whole.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    whole.__annotations__ = hints
    return whole


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
