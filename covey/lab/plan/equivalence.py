"""Finds algorithms with equal gradients by comparing normal forms of their objectives.

The normal form of an objective omits everything that cannot change the gradient. With one optimizer
step per rollout batch, every importance ratio is 1, so clipping has no effect. At a ratio of 1, the
derivative of the usual surrogates with respect to the ratio is the advantage. If all ratios are 1
and all tokens of a completion have the same advantage, a sequence-level ratio has the same effect
as token ratios. With one optimizer step per rollout batch, algorithms differ mainly in the
advantage, the token weights and the KL penalty.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from covey.config import Config
from covey.config.resolve import objective_of, truncates_unseen
from covey.errors import ConfigError
from covey.lab.plan.forecast import cuda_available
from covey.lab.plan.task_facts import TaskFacts
from covey.notices import notice
from covey.objective import (
    ALGORITHMS,
    Objective,
    advantage,
    find_algorithm,
    penalty,
    ratio,
    weights,
)
from covey.objective import surrogate as surrogates
from covey.objective.algorithms.entropy import entropy_shaped_sequences, entropy_shaped_tokens
from covey.objective.algorithms.turns import by_state
from covey.objective.options import function_of, options_of
from covey.records.folder import CHANGES, RunFolder
from covey.records.records import ANY_OBJECT, usable_lines

# Defines `Finding`, a warning about a configuration, and `Setup`, the input of the rules.


# Says whether an engine's log-probs are exact, for commands that run without the engine.


def recorded_exact_logp(run: RunFolder, config: Config) -> bool:
    """Return whether a run's engine has exact log-probs, according to the run's newest record.

    Earlier versions of Covey did not record whether log-probs are exact. For a run of an earlier
    version, return `expected_exact_logp(config)`.
    """
    records = [run.environment(), *usable_lines(run.path / CHANGES, ANY_OBJECT, notice)]
    declared = [record["exact_logp"] for record in records if "exact_logp" in record]
    return bool(declared[-1]) if declared else expected_exact_logp(config)


def expected_exact_logp(config: Config) -> bool:
    if config.engine.kind == "vllm" or config.engine.rounds:
        return False
    if config.model.dtype != "auto":
        return config.model.dtype == "float32"
    own = config.engine.kind == "process" and config.engine.device != "auto"
    device = config.engine.device if own else config.model.device
    # With "auto", a model computes in float32 except on a GPU.
    return not device.startswith("cuda") and not (device == "auto" and cuda_available())


Kind = Literal["same", "idle", "risk"]
PAGE = "docs/plan.md"
UNKNOWN = TaskFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A warning or note about a configuration, with a remedy."""

    kind: Kind
    """The kind `same` means that algorithms with different names train in the same way, `idle`
    means that a setting has no effect, and `risk` means that a setting may harm the run."""
    title: str
    """The finding in one line, with settings and their values."""
    why: str
    remedy: str
    docs: str
    """The page and section of the docs that explain the finding."""
    settings: tuple[str, ...]
    """The full names of the settings that the finding depends on."""

    def row(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "settings"}

    def depends_on(self, settings: Collection[str]) -> bool:
        return not set(settings).isdisjoint(self.settings)

    def line(self) -> str:
        return f"{self.title}: {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A resolved configuration, its objective, and known properties of its data."""

    config: Config
    objective: Objective
    facts: TaskFacts = UNKNOWN

    @property
    def single_optimizer_step(self) -> bool:
        """Whether every ratio is 1 because a training step takes one optimizer step.

        If a training step may use rollouts from older weights, ratios can differ from 1.
        """
        return self.config.train.optimizer_steps == 1 and not self.config.stale

    @property
    def on_policy(self) -> bool:
        """Whether every ratio is 1, including ratios of trainer probabilities to engine
        probabilities."""
        return self.single_optimizer_step and (
            self.exact or "sampler_as_old" not in self.objective.needs
        )

    @property
    def truncates(self) -> bool:
        """Whether sampling is truncated (top-k, top-p, min-p), but training ignores truncation."""
        return truncates_unseen(self.config)

    @property
    def exact(self) -> bool:
        """Whether the log-probs of engine and trainer differ by at most 1e-5."""
        return expected_exact_logp(self.config) and not self.truncates

    @property
    def advantage(self) -> Callable[..., Any]:
        return function_of(self.objective.advantage)

    @property
    def surrogate(self) -> Callable[..., Any]:
        return function_of(self.objective.surrogate)

    def option(self, name: str, otherwise: Any = None) -> Any:
        return self.config.objective.options.get(name, otherwise)


def setup_of(config: Config, facts: TaskFacts | None = None) -> Setup:
    return Setup(config=config, objective=objective_of(config), facts=facts or UNKNOWN)


ONE_PER_COMPLETION = frozenset(
    {*advantage.ADVANTAGES.values(), entropy_shaped_sequences} - {advantage.returns_whitened}
)
"""Advantage functions that give all tokens of a completion the same advantage."""

IGNORES_REWARD = frozenset({entropy_shaped_sequences, entropy_shaped_tokens})
"""Advantage functions that use the correctness of each completion instead of its reward."""

THROUGH_LOGP = frozenset(
    {
        surrogates.log_likelihood,
        surrogates.truncated_weight,
        surrogates.gamma_weight,
        surrogates.trust_mask,
    }
)
"""Surrogates whose gradient flows through the log-prob, and not through the ratio."""

INERT_MARKS = frozenset(
    {
        surrogates.penalized_where_marked,
        surrogates.unclipped_without_marked,
        surrogates.clipped_at_marks,
    }
)
"""Surrogates whose gradient does not depend on which tokens `Objective.marks` selects, provided
that every ratio is 1."""

SLOPE_ONE = (
    THROUGH_LOGP
    | INERT_MARKS
    | {
        surrogates.clipped,
        surrogates.unclipped,
        surrogates.geometric_clipped,
        surrogates.soft_gate,
        surrogates.clipped_without_marked,
    }
)
"""Surrogates for which `d surrogate / d ratio` equals the advantage at a ratio of 1."""


class Piece(NamedTuple):
    """One function of an objective, such as its surrogate, with the values of its options."""

    function: Callable[..., Any] | str
    options: tuple[tuple[str, Any], ...] = ()


def piece_of(piece: Callable[..., Any]) -> Piece:
    """Return one of an objective's functions as a `Piece`, with its options and their defaults."""
    function = function_of(piece)
    given = piece.keywords if isinstance(piece, partial) else {}
    usual = {k: p.default for k, p in options_of(function).items()}
    return Piece(function, tuple(sorted({**usual, **given}.items())))


def normal_form(setup: Setup) -> dict[str, Any]:
    """Return an objective's normal form; equal normal forms mean equal gradients."""
    objective = setup.objective
    kl = active_penalty(setup)
    corrects = objective.corrects and not setup.exact
    drifts = not (setup.single_optimizer_step and setup.exact)  # away from the sampling policy
    return {
        "advantage": _advantage(setup),
        **_gain(setup),
        "penalty": kl,
        "beta": objective.beta if kl else 0.0,
        "kl_in": objective.kl_in if kl else "",
        "kl_target": (objective.kl_target, objective.kl_horizon) if objective.kl_target else (),
        "entropy_bonus": objective.entropy_bonus,
        "top_entropy": objective.top_entropy,
        "correction": piece_of(objective.correction) if corrects and objective.correction else None,
        "mean_one": objective.correction_mean_one and corrects,
        "veto": objective.veto if corrects else 0.0,
        "critic": [piece_of(each) for each in (objective.targets, objective.value_loss) if each],
        "to_sampler": "sampler_as_old" in objective.needs and not setup.exact,
        "off_policy_limit": objective.off_policy_limit if drifts else 0.0,
    }


def up_to_a_factor(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return an objective's normal form without factors that scale the whole loss."""
    same = dict(form)
    if form["entropy_bonus"] or (form["penalty"] and form["kl_in"] == "loss"):
        return same  # a constant factor would not scale the whole loss
    if form["advantage"].function is advantage.against_the_others:
        same["advantage"] = Piece(advantage.group_centered)
    if form["weights"].function is weights.sequence_mean_token_sum_norm:
        same["weights"] = Piece(weights.sequence_mean_token_sum)
    return same


def active_penalty(setup: Setup) -> Piece | None:
    """Return the objective's KL penalty, or None if the KL penalty has no effect."""
    objective = setup.objective
    if not objective.beta:
        return None
    if objective.pairs:
        return piece_of(objective.penalty)  # in a pair, beta also matters at a margin of 0
    if objective.kl_in == "reward" and setup.advantage in IGNORES_REWARD:
        return None
    in_loss = objective.kl_in == "loss"
    steep = in_loss and objective.penalty in (penalty.k1, penalty.ratio_k1)
    if reference_is_policy(setup) and not steep:
        return None
    if in_loss and objective.penalty is penalty.k3_plus and not objective.kl_target:
        return Piece(penalty.k2)  # the value differs, but the gradient is the same
    return piece_of(objective.penalty)


def reference_is_policy(setup: Setup) -> bool:
    reference = setup.config.reference
    whole = reference.kind == "renewed" or (reference.kind == "moving" and reference.alpha == 1.0)
    # Within a batch the policy moves away from the reference, which affects a KL in the loss.
    unseen = setup.single_optimizer_step or setup.objective.kl_in == "reward"
    return whole and unseen and setup.config.train.optimizer_steps % reference.every == 0


def _advantage(setup: Setup) -> Piece:
    config, found = setup.config, piece_of(setup.objective.advantage)
    options = dict(found.options)
    if found.function is advantage.group_whitened and options["weighting"] == "sequence":
        options = {"ddof": 1, "eps": options["eps"], "of": "centered"}
        found = Piece(advantage.standardized_by_batch, tuple(sorted(options.items())))
    if found.function is advantage.standardized_by_batch and config.rollout.prompts_per_step == 1:
        options.pop("of")  # with one group, the std of the batch equals the std of the group
        found = Piece(advantage.group_standardized, tuple(sorted(options.items())))
    keeps_all = (
        found.function is advantage.kept_standardized
        and options["keep"] >= config.rollout.group_size
    )
    single_turn = config.environment.name == "none"  # so no state repeats
    alone = found.function is by_state and options["normalize"] == "std" and single_turn
    if keeps_all or alone:
        common = (("ddof", options["ddof"]), ("eps", options["eps"]))
        found = Piece(advantage.group_standardized, common)
    if found.function is advantage.best_of_k and options["k"] == 1 and options["baseline"] != "loo":
        found = Piece(advantage.against_the_others)
    if found.function is advantage.length_weighted and _single_tokens(config):
        found = Piece(advantage.group_centered)
    return found


def _gain(setup: Setup) -> dict[str, Any]:
    objective, kind = setup.objective, setup.objective.ratio
    surrogate, marks = piece_of(objective.surrogate), objective.marks
    token_weights = _weights(setup)
    shared = (
        setup.advantage in ONE_PER_COMPLETION
        and objective.top_entropy == 1.0
        and objective.correction is None
        and marks is None
    )
    if setup.on_policy and has_slope_one(objective):
        if setup.surrogate in INERT_MARKS:
            marks = None  # at a ratio of 1, |log r| is flat, no token is dropped, no bound applies
        without = setup.surrogate is surrogates.clipped_without_marked
        surrogate = Piece("slope 1 except where marked" if without else "slope 1")
        kind, token_weights = _plain_ratio(setup, shared, token_weights)
    elif setup.surrogate is surrogates.log_likelihood:
        kind = ratio.token
    elif shared and kind is ratio.sequence_token:
        kind = ratio.sequence
    picked = None
    if marks is not None:
        options = dict(piece_of(marks).options)
        if setup.single_optimizer_step:  # the clip excludes no candidates
            options = {k: v for k, v in options.items() if k not in ("clip_low", "clip_high")}
        picked = Piece(function_of(marks), tuple(sorted(options.items())))
    return {"ratio": kind, "surrogate": surrogate, "weights": token_weights, "marks": picked}


def _plain_ratio(setup: Setup, shared: bool, token_weights: Piece) -> tuple[ratio.Ratio, Piece]:
    """Return the simplest ratio that gives the objective's gradient if all ratios are 1.

    The token weights are returned too, because a simpler ratio may need different token weights.
    """
    kind = setup.objective.ratio
    if setup.surrogate in THROUGH_LOGP or kind in (ratio.one, ratio.sequence_token):
        return ratio.token, token_weights
    if setup.surrogate is surrogates.geometric_clipped or kind is ratio.arithmetic:
        kind = ratio.sequence
    if _single_tokens(setup.config) or (shared and kind is ratio.sequence):
        return ratio.token, token_weights
    per_completion = token_weights.function is weights.sequence_mean_token_mean
    if shared and kind is ratio.product and per_completion:
        return ratio.token, Piece(weights.sequence_mean_token_sum)
    return kind, token_weights


def _weights(setup: Setup) -> Piece:
    config, found = setup.config, piece_of(setup.objective.weights)
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    means = [weights.sequence_mean_token_mean, weights.token_mean]
    alone = config.train.mini_batches == completions
    one_group = alone or (config.rollout.prompts_per_step == 1 and config.train.mini_batches == 1)
    if one_group and found.function is weights.group_mean_token_mean:
        found = Piece(weights.token_mean)
    if alone and found.function in means:
        return Piece(weights.sequence_mean_token_mean)
    if _single_tokens(config) and found.function in (*means, weights.sequence_mean_token_sum):
        return Piece(weights.sequence_mean_token_mean)
    return found


def _single_tokens(config: Config) -> bool:
    return config.rollout.max_tokens == 1 and not config.filter.mask_truncated


def has_slope_one(objective: Objective) -> bool:
    """Whether `d surrogate / d ratio` equals the advantage at a ratio of 1."""
    bounds = dict(piece_of(objective.surrogate).options)
    bounds |= dict(piece_of(objective.marks).options) if objective.marks else {}
    if not bounds.get("min_weight", 0.0) <= 1.0 <= bounds.get("max_weight", 1.0):
        return False
    if not bounds.get("low_end", 0.0) < 1.0 < bounds.get("high_start", 2.0):
        return False
    return function_of(objective.surrogate) in SLOPE_ONE


def equivalent_algorithms(setup: Setup) -> list[str]:
    mine, name = normal_form(setup), setup.config.objective.name
    privileged = "privileged" in setup.objective.needs
    found = []
    for other in ALGORITHMS:
        if other == name:
            continue
        function = find_algorithm(other)
        known = inspect.signature(function).parameters
        given = {"length": setup.config.rollout.max_tokens, **setup.config.objective.options}
        try:
            objective = function(**{k: v for k, v in given.items() if k in known})
        except ConfigError:
            continue
        alike = Setup(config=setup.config, objective=objective)
        # A teacher with privileged text differs from any teacher without privileged text.
        same_teacher = ("privileged" in objective.needs) == privileged
        if same_teacher and normal_form(alike) == mine:
            found.append(other)
    return found


# Arms of a comparison that train in the same way.


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
    return Finding(
        kind="same",
        title=f"{_listed(names)} are the same algorithm here",
        why=f"{why}The arms differ in {what}: any difference between their results is chance.",
        remedy=remedy,
        docs=f"{PAGE}#{'single-optimizer-step' if single else 'arms-of-a-comparison'}",
        settings=(*differences,),
    )


def _proportional_runs(names: list[str]) -> Finding:
    return Finding(
        kind="same",
        title=f"{_listed(names)} differ only by a constant factor of the loss",
        why="The gradients of these arms have the same direction in every optimizer step. AdamW "
        "divides a constant factor out; only max_grad_norm and optimizer.eps make a difference.",
        remedy="keep only one of these arms, or compare algorithms that differ in more than a "
        "constant factor",
        docs=f"{PAGE}#constant-factors",
        settings=("objective.name",),
    )


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
