"""From a name and options to an objective.

A name is that of an algorithm, `composed` for one put together from pieces, or the dotted path of a
function of the user's own. Whatever it is, it becomes one function with one signature, which holds
the algorithm's own options and those that every algorithm has.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from covey.dotted import is_dotted, load_dotted
from covey.errors import ConfigError, nearest
from covey.objective import shaping
from covey.objective.advantage import ADVANTAGES
from covey.objective.algorithms import ALGORITHMS
from covey.objective.correction import CORRECTIONS
from covey.objective.loss import Objective
from covey.objective.options import check_options
from covey.objective.penalty import PENALTIES, Kl
from covey.objective.ratio import RATIOS
from covey.objective.surrogate import SURROGATES
from covey.objective.weights import WEIGHTS

COMPOSED = "composed"
SHAPED: Mapping[str, Callable[..., torch.Tensor]] = {
    "entropy_shaped_tokens": shaping.entropy_shaped_tokens,
    "entropy_shaped_answers": shaping.entropy_shaped_answers,
    "without_conflicts": shaping.without_conflicts,
}
PIECES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "advantage": {**ADVANTAGES, **SHAPED},
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "weights": WEIGHTS,
}
DEFAULT_PIECES = {
    "advantage": "standardized",
    "ratio": "token",
    "surrogate": "clipped",
    "weights": "token_mean",
}
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
    """Add what combines with every algorithm. The defaults add nothing."""
    corrects = None
    if correction != "none":
        corrects = partial(CORRECTIONS[correction], low=correction_low, high=correction_high)
    return replace(
        objective,
        kl_in=kl_in,
        kl_target=kl_target,
        kl_horizon=kl_horizon,
        entropy_bonus=entropy_bonus,
        top_entropy=top_entropy,
        correction=corrects,
        correction_mean_one=correction_mean_one,
        veto=veto,
        off_policy_limit=off_policy_limit,
    )


def algorithm(name: str, pieces: Mapping[str, Any] | None = None) -> Callable[..., Objective]:
    """Return the named algorithm as one function of its own options and of everybody's.

    `pieces` are the options given, of which `composed` needs those that name its pieces: they
    decide which other options there are.
    """
    if name == COMPOSED:
        own = _composer(pieces or {})
    elif is_dotted(name):
        own = load_dotted(name, "objective.name")
    elif name in ALGORITHMS:
        own = ALGORITHMS[name]
    else:
        hint = nearest(name, [*ALGORITHMS, COMPOSED])
        raise ConfigError(f"config: objective.name = {name!r} is not known{hint}")
    return _with_extensions(name, own)


def build(name: str, **options: Any) -> Objective:
    """Build an objective; an option that it does not have is an error that names those it has."""
    function = algorithm(name, options)
    parameters = inspect.signature(function).parameters
    for key in options:
        if key not in parameters:
            raise ConfigError(f"{name} has no option {key!r}; it has {', '.join(parameters)}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(f"{name} needs the option {key!r}")
    return function(**options)


def _with_extensions(name: str, own: Callable[..., Objective]) -> Callable[..., Objective]:
    """Join the options of an algorithm with those of `extended`; its own come first."""
    mine = inspect.signature(own).parameters
    more = {k: p for k, p in _options(extended).items() if k not in mine}
    parameters = {**mine, **more}

    def whole(**options: Any) -> Objective:
        given = {k: options.get(k, p.default) for k, p in parameters.items()}
        check_options(name, given)
        objective = own(**{k: given[k] for k in mine})
        if not isinstance(objective, Objective):
            raise ConfigError(f"objective.name = {name!r} gives no covey.objective.Objective")
        own_fields = {k: getattr(objective, k) for k in mine if k in _options(extended)}
        shared = {k: given[k] for k in more}
        return _checked(name, replace(extended(objective, **shared), **own_fields))

    whole.__name__, whole.__doc__ = getattr(own, "__name__", name), own.__doc__
    whole.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    whole.__annotations__ = {**_hints(extended), **_hints(own)}
    return whole


def _checked(name: str, objective: Objective) -> Objective:
    """Refuse what would silently not do what it says."""
    by_answer = objective.per_answer and objective.ratio is not RATIOS["sequence_token"]
    if objective.top_entropy < 1.0 and (by_answer or name == "gmpo"):
        raise ConfigError(
            f"objective.top_entropy of {name}: its gain is of whole answers, so tokens cannot be "
            "left out; gspo_token takes the ratio of the answer token by token"
        )
    if objective.kl_target and not objective.beta:
        raise ConfigError("objective.kl_target adapts beta, which is 0; start with a beta above 0")
    return objective


def _composer(given: Mapping[str, Any]) -> Callable[..., Objective]:
    """Return a function that puts the named pieces together, with all their options."""
    chosen = {}
    for kind, registry in PIECES.items():
        name = given.get(kind, DEFAULT_PIECES[kind])
        if name not in registry:
            what = f"config: objective.{kind} = {name!r} is not known"
            raise ConfigError(f"{what}{nearest(str(name), registry)}")
        chosen[kind] = registry[name]
    options = {k: p for function in chosen.values() for k, p in _options(function).items()}

    def composed(*, beta: float = 0.0, kl: Kl = "k3", **rest: Any) -> Objective:
        pieces = {
            kind: partial(function, **{k: rest[k] for k in _options(function)})
            if _options(function)
            else function
            for kind, function in chosen.items()
        }
        shaped = chosen["advantage"] in SHAPED.values()
        trajectory = chosen["advantage"] is shaping.without_conflicts
        return Objective(
            **pieces,
            penalty=PENALTIES[kl],
            beta=beta,
            needs_entropy=shaped,
            needs_tokens=trajectory,
            needs_success=shaped and not trajectory,
        )

    composed.__doc__ = "Put together from pieces."
    kinds = {
        kind: inspect.Parameter(kind, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=str)
        for kind, default in DEFAULT_PIECES.items()
    }
    parameters = {**kinds, **options, **_options(composed)}
    composed.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    hints = {k: h for function in chosen.values() for k, h in _hints(function).items()}
    composed.__annotations__ = {
        **{k: hints[k] for k in options}, **dict.fromkeys(kinds, str), "beta": float, "kl": Kl,
    }  # fmt: skip
    return composed


def _options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters: what is not data is an option."""
    parameters = inspect.signature(function).parameters.items()
    return {k: p for k, p in parameters if p.kind is p.KEYWORD_ONLY}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return {k: h for k, h in typing.get_type_hints(function).items() if k in _options(function)}
