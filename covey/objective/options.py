"""What is known about algorithms and their options: papers, meanings, types, bounds, checks.

An option has the same meaning in every algorithm and in every component function. The signature of
an algorithm's function lists the options of the algorithm.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar

from covey.errors import ConfigError, nearest

Function = TypeVar("Function", bound=Callable[..., Any])


def algorithm(*, title: str, source: str, pairs: bool = False) -> Callable[[Function], Function]:
    """Attach a title and a paper to an algorithm's function as its attribute `title`.

    `pairs` says that the algorithm trains on preference pairs. `covey.config.algorithm_names` reads
    these arguments from the source code, so they must be literals.
    """

    def attach(function: Function) -> Function:
        function.title = f"{title}, {source}"  # type: ignore[attr-defined]
        return function

    return attach


def function_of(piece: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a `partial`; return any other function unchanged."""
    return piece.func if isinstance(piece, partial) else piece


def option(piece: Callable[..., Any], name: str) -> Any:
    """Return the value of a function's option; None if the function has no such option."""
    parameter = options_of(piece).get(name)
    return None if parameter is None else parameter.default


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the options of a function: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.items()
    return {k: p for k, p in parameters if p.kind is p.KEYWORD_ONLY}


def hints_of(
    function: Callable[..., Any], options: Mapping[str, inspect.Parameter] | None = None
) -> dict[str, Any]:
    """Return the type of each option; by default, all keyword-only parameters are options."""
    options = options_of(function) if options is None else options
    # Other annotations name types of torch, which `covey plan` does not import.
    written = getattr(function, "__annotations__", {})
    of_options = SimpleNamespace(__annotations__={k: written[k] for k in written if k in options})
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(of_options, names)
    except (NameError, TypeError):  # a user's annotations may exist for type checkers only
        return {}


class Option(NamedTuple):
    """The meaning of an algorithm option, and the bounds of a numeric option."""

    meaning: str
    at_least: float = -math.inf
    at_most: float = math.inf


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "clip_low": Option(
            "How far a ratio may fall below 1 (in `gmpo`, its logarithm below 0; in `dppo`, how "
            "far a token's probability may fall).",
            0,
        ),
        "clip_high": Option(
            "How far a ratio may rise above 1 (in `gmpo`, its logarithm above 0; in `dppo`, how "
            "far a token's probability may rise).",
            0,
        ),
        "dual": Option(
            "Upper bound, above 1 + clip_high, on the ratio of tokens with a negative advantage; "
            "0: no bound.",
            0,
        ),
        "anchor": Option(
            "The log-probs that the change is measured from: the engine's (`sampler_logp`), or the "
            "trainer's at the start of the step (`old_logp`)."
        ),
        "max_weight": Option("The largest weight, as a value and not as a distance from 1.", 0),
        "min_weight": Option("The smallest weight, as a value and not as a distance from 1.", 0),
        "tau_pos": Option("Steepness of the gate for tokens with a positive advantage.", 1e-9),
        "tau_neg": Option("Steepness of the gate for tokens with an advantage <= 0.", 1e-9),
        "power_pos": Option("Power of the weight for good completions.", 0),
        "rate_pos": Option("Decay of the weight for good completions.", 0),
        "power_neg": Option("Power of the weight for bad completions.", 0),
        "rate_neg": Option("Decay of the weight for bad completions.", 0),
        "ddof": Option(
            "The variance is divided by n - ddof; 0 makes advantages sqrt(n/(n-1)) times larger.",
            0,
            1,
        ),
        "eps": Option("Added to the standard deviation; when whitening, to the variance.", 0),
        "of": Option("Take the standard deviation of the `rewards` or of the `centered` rewards."),
        "weighting": Option(
            "Compute the standard deviation over sequences (`sequence`) or tokens (`token`)."
        ),
        "gamma": Option("Discount factor of later rewards, per token or per turn.", 0, 1),
        "step_weight": Option("Weight of the advantage among turns in equal states.", 0),
        "normalize": Option(
            "Divide by the standard deviation (`std`), or only subtract the mean (`mean`)."
        ),
        "compare": Option(
            "Compare turns with the same index (`turn`), or all turns of a group (`group`)."
        ),
        "length": Option("Constant that token sums are divided by: the generation budget.", 1),
        "aggregation": Option("How the gains of tokens add up: the name of one of the weights."),
        "alpha1": Option("Reward of a correct completion; a wrong completion gets minus this."),
        "alpha2": Option("Size of the entropy part of a token's reward.", 0),
        "beta1": Option("Reward of a correct completion; a wrong completion gets minus this."),
        "beta2": Option("Size of the entropy part of a completion's reward.", 0),
        "scope": Option("Whether entropies are compared within the `group` or over the `batch`."),
        "norm": Option("Whether shaped rewards are normalized over the `batch` or by `polarity`."),
        "entropy_floor": Option("The smallest entropy H in the factor 1/H.", 1e-12),
        "mean": Option("Whether a completion's ratio is the `geometric` or `arithmetic` mean."),
        "bonus": Option("Factor of the advantage of conflict tokens in good completions.", 0),
        "max_entropy": Option("Completions with a larger mean entropy are left out.", 0),
        "entropy_cost": Option("Subtracted from the advantage, per nat of mean entropy."),
        "share": Option("Fraction of the step's tokens to select; at least one is selected.", 0, 1),
        "cov_low": Option("Tokens with a covariance above this are candidates."),
        "cov_high": Option("Tokens with a covariance below this are candidates."),
        "coefficient": Option("Weight of |logp - old_logp| on the selected tokens.", 0),
        "parts": Option("Names of the parts of the reward that count; if empty, all parts count."),
        "part_weights": Option("Weight of each part's advantage; if empty, each weight is 1."),
        "gate": Option("Index, from 0, of the part that the other parts depend on; -1: none.", -1),
        "gate_at": Option("Value that the gating part must reach for the other parts to count."),
        "all_wrong": Option("Advantage of groups without success: `zero` or `minus_one`."),
        "lam": Option("Lambda of GAE: 0 relies on the critic, 1 on the rewards.", 0, 1),
        "alpha": Option(
            "A completion of T tokens gets the lambda 1 - 1 / (alpha T); 0: all get `lam`.", 0
        ),
        "whiten": Option("Whiten advantages over the tokens of the step."),
        "value_lam": Option("Lambda of the critic's targets; 1: the returns themselves.", 0, 1),
        "value_clip": Option("How far a value may move from its old value; 0: no limit.", 0),
        "average": Option(
            "Average the log-ratios of a completion's tokens instead of adding them up."
        ),
        "k": Option("The k of max@k: the best of k completions counts.", 1),
        "baseline": Option("The baseline that is subtracted: `loo1`, `loo` or `centred`."),
        "keep": Option("How many completions of a group are trained on.", 1),
        "metric": Option(
            "Keep the completions that are shortest (`length`), or that have the most reward per "
            "token (`rate`)."
        ),
        "target": Option(
            "Fraction of the step's surrogate that tokens with a positive advantage should have.",
            0,
            1,
        ),
        "low_start": Option("Initial lower bound of the ratio.", 0, 1),
        "low_end": Option("Largest lower bound of the ratio.", 0, 1),
        "low_step": Option("Increment of the lower bound.", 1e-6),
        "high_start": Option("Initial upper bound of the ratio.", 1),
        "high_end": Option("Largest upper bound of the ratio.", 1),
        "high_step": Option("Increment of the upper bound.", 1e-6),
        "measure": Option(
            "Compute the share from the `gradient`, or from the `value` as the paper prints it."
        ),
        "tau": Option(
            "Largest mean of (log r)^2 over the tokens whose ratio r would move further from 1.", 0
        ),
        "cap": Option("Tokens with a larger ratio of old policy to engine are dropped.", 1),
        "discount": Option(
            "Discount factor of the KL of later tokens; 0: only the token's own KL.", 0, 1
        ),
        "scale": Option("Weight of the KL to the teacher.", 0),
        "task": Option("Weight of GRPO's advantage, added to the teacher's; 0: none."),
        "beta": Option(
            "Weight of the KL to the reference; with 0 no reference is loaded. For preference "
            "pairs, the scale of the log-ratios, above 0.",
            0,
        ),
        "kl": Option("Estimator of the KL to the reference."),
        "kl_in": Option(
            "Put the KL into the `loss`, for every token, or subtract it from the `reward`."
        ),
        "kl_target": Option(
            "Adapt beta to keep `objective/kl_avg` near this value, in nats per token; 0: beta is "
            "fixed. A target per completion, as in TRL and in arXiv 1909.08593, is divided by the "
            "mean number of tokens of a completion.",
            0,
        ),
        "kl_horizon": Option(
            "Number of completions over which an adaptive beta corrects the KL.", 1
        ),
        "entropy_bonus": Option("Weight of the policy's entropy, added to each token's gain."),
        "top_entropy": Option(
            "Train only on this fraction of tokens: those with the highest entropy.", 1e-9, 1
        ),
        "correction": Option("Correction for an engine whose log-probs differ from the trainer's."),
        "correction_low": Option("Lower bound of the correction.", 0),
        "correction_high": Option("Upper bound of the correction.", 0),
        "correction_mean_one": Option("Divide corrections by their mean over the step."),
        "veto": Option(
            "Drop a completion if a token's probability under the trainer is below this times its "
            "probability under the engine; 0: never.",
            0,
            1,
        ),
        "off_policy_limit": Option(
            "Drop a completion with a negative advantage whose mean logp has fallen by more than "
            "this since it was sampled; 0: never.",
            0,
        ),
        "advantage": Option("How advantages are computed."),
        "ratio": Option("How the policy is compared with the policy that sampled."),
        "surrogate": Option("The gain of a token, computed from ratio and advantage."),
        "weights": Option("How the gains of tokens add up."),
    }
)


# In each pair, the value of the first option must not exceed the value of the second option.
PAIRS = (
    ("min_weight", "max_weight"),
    ("cov_low", "cov_high"),
    ("correction_low", "correction_high"),
    ("low_start", "low_end"),
    ("high_start", "high_end"),
)


def check_types(name: str, options: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option's value does not match its type in the signature."""
    for key, value in options.items():
        hint, setting = hints.get(key), f"{name}: objective.{key} = {value!r}"
        if typing.get_origin(hint) is Literal:
            choices = typing.get_args(hint)
            if value not in choices:
                suggestion = nearest(str(value), choices)
                raise ConfigError(f"{setting} is not a known value{suggestion}")
        elif hint is bool and not isinstance(value, bool):
            raise ConfigError(f"{setting} must be true or false")
        elif hint in (int, float) and not _is_number(value, Integral if hint is int else Real):
            kind = "an integer" if hint is int else "a number"
            raise ConfigError(f"{setting} must be {kind}")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option is out of bounds or if two options contradict each other."""
    numbers = {k: v for k, v in options.items() if k in OPTIONS and _is_number(v, Real)}
    for key, value in numbers.items():
        option = OPTIONS[key]
        if not option.at_least <= value <= option.at_most:
            bounds = f"at least {option.at_least:g}"
            if option.at_most < math.inf:
                bounds += f" and at most {option.at_most:g}"
            raise ConfigError(f"{name}: objective.{key} = {value} must be {bounds}")
    dual, bound = numbers.get("dual"), 1 + numbers.get("clip_high", 0.0)
    if dual and dual <= bound:
        raise ConfigError(
            f"{name}: objective.dual = {dual} must be above {bound:g}, which is 1 + clip_high"
        )
    for clip_low, clip_high in PAIRS:
        if clip_low in numbers and clip_high in numbers and numbers[clip_low] > numbers[clip_high]:
            low, high = numbers[clip_low], numbers[clip_high]
            raise ConfigError(
                f"{name}: objective.{clip_low} = {low} must not exceed objective.{clip_high} = "
                f"{high}"
            )
