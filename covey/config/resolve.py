"""Checks the names and options of a configuration, and builds objects that need no model.

The module builds the task, the reward, the objective, the sampling settings and the prompt
template. The module imports torch only to build an objective or a sampling distribution, so a
misspelled name is reported within a second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from covey.config import Config, parse_config
from covey.config.algorithm_names import check_algorithm_name
from covey.config.reference_kinds import check_reference, check_teacher
from covey.config.resolve_options import choose, resolve_options
from covey.config.schema import Named, Reward
from covey.environments.registry import NONE, find_environment
from covey.errors import ConfigError, DataError
from covey.models.chat_template import Template
from covey.records.health import check_names
from covey.records.trackers.registry import check_trackers
from covey.records.watch import check_metric
from covey.rewards import LENGTH_PENALTIES
from covey.rewards import Reward as RewardFunction
from covey.rewards.registry import check_alone, make_reward, reward_options
from covey.tasks import Task, find_task, is_user_task, make_task
from covey.trust import is_import_path
from covey.types import Prompt

if TYPE_CHECKING:
    from covey.engines.protocol import Sampling
    from covey.objective import Objective


CORRECTION = "token_truncate"
"""Default of `objective.correction` if rollouts are sampled with older weights or float8 weights,
for an algorithm without a correction of its own. The default is truncated importance sampling,
which is decoupled PPO if old_logp is recomputed."""


def resolve(config: Config, *, imports: bool = True, passed: Collection[str] = ()) -> Config:
    """Fill in the default options of task, reward, environment, length penalty and objective.

    All names are checked before anything imports torch. If `imports` is false, no user code is
    loaded, and the options of user-defined tasks, rewards, objectives and environments stay
    unchanged. `passed` lists the config sections, such as task and reward, for which the caller
    passed a Python object. Names in the sections listed in `passed` are not looked up.
    """
    if not is_import_path(config.objective.name):
        check_algorithm_name(config.objective.name)
    _check_watching(config)
    options = {
        where: options_of(config)
        for where, options_of in _OPTIONS.items()
        if where not in passed and (imports or not _is_user_code(config, where))
    }
    named = {where: {**getattr(config, where).settings, **o} for where, o in options.items()}
    apart = config.evaluate.reward
    if apart.name and (imports or not is_import_path(apart.name)):
        reward = {"name": apart.name, **reward_options(apart, "evaluate.reward")}
        named["evaluate"] = {**config.evaluate.model_dump(), "reward": reward}
    resolved = parse_config({**config.model_dump(), **named})
    check_reference(resolved.reference)
    _check_engine(resolved)
    template_of(resolved)
    if "objective" in options:
        objective = objective_of(resolved)
        _check_old_logp(resolved, objective)
        _check_groups(resolved, objective)
        _check_preferences(resolved, objective)
        _check_mask_replay(resolved, objective)
        if "teacher" in objective.needs:
            _check_teacher(resolved, objective)
    return resolved


def _is_user_code(config: Config, where: str) -> bool:
    """Return whether a config section names a function in the user's own code."""
    name = getattr(config, where).name
    return is_user_task(name) if where == "task" else is_import_path(name)


def _check_engine(config: Config) -> None:
    """Raise ConfigError if the settings of [engine] and [overlap] contradict each other.

    The engine's device is checked later, when a run starts (`check_float8`).
    """
    overlap, engine, rank = config.overlap, config.engine, config.adapter.rank
    setting = f"config: engine.{engine.rounds} = 'float8'"
    if engine.rounds and engine.kind == "vllm":
        raise ConfigError(f"{setting} works only with Covey's own engine, not with vLLM")
    if engine.rounds and rank:
        raise ConfigError(
            f"{setting} does not work with adapter.rank = {rank}, because layers with an adapter "
            "are not quantized; leave out one of the two settings"
        )
    if overlap.mode == "copy" and engine.kind == "native" and not config.cluster.engine_actors:
        raise ConfigError(
            "config: overlap.mode = 'copy' needs an engine with its own copy of the weights; set "
            "engine.kind = 'process' or 'vllm', or set overlap.mode = 'ahead'"
        )
    if overlap.in_flight and not (overlap.staleness and overlap.mode == "copy"):
        raise ConfigError(
            "config: overlap.in_flight = true needs overlap.mode = 'copy' and overlap.staleness "
            "of at least 1, because otherwise the engine is idle while the weights change"
        )
    if engine.device != "auto" and engine.kind != "process":
        raise ConfigError(
            f"config: engine.device = {engine.device!r} needs engine.kind = 'process'; the native "
            "engine generates on model.device"
        )


def _check_teacher(resolved: Config, objective: Objective) -> None:
    """Check the [teacher] section; reject self-distillation in an environment."""
    privileged = "privileged" in objective.needs
    check_teacher(resolved.teacher, privileged=privileged)
    if privileged and resolved.environment.name != NONE:
        raise ConfigError(
            f"config: the algorithm {resolved.objective.name} does not work with an environment, "
            "because the teacher's prompt with the privileged text has only one turn; leave out "
            "environment.name"
        )


def over_epochs(config: Config, prompts: int) -> Config:
    """Compute `train.steps` from `train.stop_after.epochs` if epochs are set."""
    train = config.train.over_prompts(prompts, config.rollout.prompts_per_step)
    return config if train is config.train else config.model_copy(update={"train": train})


def _check_groups(resolved: Config, objective: Objective) -> None:
    """Raise ConfigError if the objective does not fit the groups, mini-batches or reward parts."""
    from covey.objective.compose import option

    size, k = resolved.rollout.group_size, option(objective.advantage, "k")
    if size == 1 and "groups" in objective.needs:
        raise ConfigError(
            f"config: rollout.group_size = 1, but the algorithm {resolved.objective.name} compares "
            "several completions of a prompt; set rollout.group_size to at least 2"
        )
    others = option(objective.advantage, "baseline") not in (None, "loo1")
    if k is not None and k > size - others:
        least = k + others
        raise ConfigError(
            f"config: objective.k = {k} needs rollout.group_size of at least {least}, not {size}"
        )
    prompts, mini_batches = resolved.rollout.prompts_per_step, resolved.train.mini_batches
    if objective.pairs and mini_batches > prompts:
        raise ConfigError(
            f"config: train.mini_batches = {mini_batches} must be at most rollout.prompts_per_step "
            f"= {prompts}, because the algorithm {resolved.objective.name} needs whole groups in "
            "every optimizer step"
        )
    given = resolved.objective.options
    if "parts" in objective.needs and not objective.parts:
        for name in ("part_weights", "gate"):
            if given.get(name, ()) not in ((), [], -1):
                raise ConfigError(
                    f"config: objective.{name} depends on the order of the reward parts; list the "
                    "parts in objective.parts"
                )


def _check_preferences(config: Config, objective: Objective) -> None:
    """Refuse settings that cannot be combined with a preference file."""
    section = config.preferences
    if not section.file:
        if section.max_tokens:
            raise ConfigError(
                "config: preferences.max_tokens has no effect without a preference file; set "
                "preferences.file, or leave out preferences.max_tokens"
            )
        return
    if not objective.pairs:
        raise ConfigError(
            f"config: preferences.file needs an objective on preference pairs (dpo or ipo), not "
            f"{config.objective.name}"
        )
    if config.overlap.staleness:
        raise ConfigError(
            "config: preferences.file needs overlap.staleness = 0, because training on a file "
            "does not generate completions"
        )
    if config.curriculum.active:
        raise ConfigError(
            "config: preferences.file does not work with [curriculum], because all preference "
            "pairs have the same pass rate; leave out [curriculum]"
        )


def _check_ratios_to_engine(resolved: Config, objective: Objective) -> None:
    """Reject settings that conflict with sampler_logp as the denominator of the importance
    ratio."""
    name = resolved.objective.name
    if truncates_unseen(resolved):
        raise ConfigError(
            f"config: the algorithm {name} divides by the engine's probabilities, but "
            "rollout.top_k, top_p or min_p truncates the engine's distribution; set "
            "rollout.mask_replay = true"
        )
    if objective.corrects:
        raise ConfigError(
            f"config: the algorithm {name} already divides by the engine's probabilities, so "
            "objective.correction and objective.veto have nothing to correct; leave out both "
            "settings"
        )


def truncates_unseen(config: Config) -> bool:
    """Return whether sampling is truncated and training does not know the allowed tokens."""
    sampling = sampling_of(config)
    return sampling.distribution.truncates and not sampling.returns_kept


def old_logp_from_sampler(config: Config, objective: Objective, *, exact_logp: bool) -> bool:
    """Return whether the engine's log-probs serve as old_logp.

    If rollouts may be stale and the objective has no importance correction, the engine's log-probs
    serve as old_logp, so that the ratio corrects for staleness. `exact_logp` is the field
    `EngineInfo.exact_logp` of the engine.
    """
    exact = exact_logp and not truncates_unseen(config)
    if config.stale:
        exact = not objective.corrects
    source = config.train.old_logp
    return not config.preferences.file and (source == "sampler" or (source == "auto" and exact))


def _check_mask_replay(resolved: Config, objective: Objective) -> None:
    """Reject `rollout.mask_replay` with vLLM, and with a reference or teacher on a server."""
    if not sampling_of(resolved).returns_kept:
        return
    if resolved.engine.kind == "vllm":
        raise ConfigError(
            "config: rollout.mask_replay = true does not work with engine.kind = 'vllm', which "
            "does not return the tokens that top_k, top_p and min_p kept"
        )
    server = "reference" in objective.needs and resolved.reference.kind == "server"
    if server or ("teacher" in objective.needs and resolved.teacher.url):
        section = "reference.kind = 'server'" if server else "teacher.url"
        raise ConfigError(
            f"config: rollout.mask_replay = true does not work with {section}, because the server "
            "does not receive the tokens that top_k, top_p and min_p kept"
        )


def _check_watching(config: Config) -> None:
    """Check the names of trackers, health checks and the metric for the best checkpoint."""
    check_trackers(config.trackers)
    check_names(config.train.stop_on)
    if config.save.best:
        check_metric(config.save.best, samples=config.evaluate.samples)
    elif config.train.patience:
        raise ConfigError(
            "config: train.patience needs save.best, the name of the metric that must improve"
        )


def _check_old_logp(resolved: Config, objective: Objective) -> None:
    """Check that `train.old_logp` works with truncated sampling, float8, staleness and correction.

    If the trainer computes old_logp, the importance ratio starts at 1 even for stale rollouts.
    Stale rollouts therefore need a correction. Pairwise objectives such as DPO have no importance
    ratio, and are not checked.
    """
    if objective.pairs:
        return
    if "sampler_as_old" in objective.needs:
        _check_ratios_to_engine(resolved, objective)
        return
    truncates, from_sampler = truncates_unseen(resolved), resolved.train.old_logp == "sampler"
    if from_sampler and truncates:
        raise ConfigError(
            "config: train.old_logp = 'sampler' cannot be combined with rollout.top_k, top_p or "
            "min_p, because the engine then returns log-probs of a truncated distribution; "
            "set rollout.mask_replay = true"
        )
    if resolved.engine.rounds and not from_sampler and objective.correction is None:
        raise ConfigError(
            f"config: with engine.{resolved.engine.rounds} = 'float8', the engine generates with "
            "rounded weights; to correct for the rounding, set objective.correction = "
            f"{CORRECTION!r} or 'token_mask'"
        )
    blind = truncates or resolved.train.old_logp == "recompute" or "old_entropy" in objective.needs
    if resolved.stale and blind and not objective.corrects:
        staleness, groups = resolved.overlap.staleness, resolved.replay.groups
        cause = f"overlap.staleness = {staleness}" if staleness else f"replay.groups = {groups}"
        raise ConfigError(
            f"config: with {cause}, the engine generates with older weights than the trainer has; "
            f"to correct for the difference, set objective.correction = {CORRECTION!r}"
        )
    taken = from_sampler and "old_entropy" not in objective.needs
    if taken and objective.corrects:
        raise ConfigError(
            "config: objective.correction and objective.veto compare the trainer's old_logp with "
            "the engine's log-probs, so they need train.old_logp = 'recompute', not 'sampler'"
        )


def _length_defaults(config: Config) -> dict[str, int]:
    """Return the defaults of length options, which are derived from `rollout.max_tokens`."""
    budget = config.rollout.max_tokens
    return {"length": budget, "limit": budget, "cache": max(1, budget // 5)}


def _length_penalty_options(config: Config) -> dict[str, object]:
    section = config.length_penalty
    maker = choose(LENGTH_PENALTIES, section, "length_penalty")
    return resolve_options(maker, section, "length_penalty", _length_defaults(config))


def _objective_options(config: Config) -> dict[str, object]:
    from covey.objective import algorithm

    section: Named = config.objective
    maker = algorithm(section.name, section.options)
    options = resolve_options(maker, section, "objective", _length_defaults(config))
    off_policy = config.stale or config.engine.rounds
    if off_policy and config.train.old_logp != "sampler" and "correction" not in section.options:
        objective = maker(**options)
        if not objective.pairs and not _has_own_correction(objective):
            options["correction"] = CORRECTION
    return options


def _has_own_correction(objective: Objective) -> bool:
    """Return whether an algorithm itself corrects for stale rollouts, as decoupled_ppo and m2po."""
    return objective.correction is not None or "sampler_as_old" in objective.needs


def _task_options(config: Config) -> dict[str, object]:
    section = config.task
    maker, preset = find_task(section.name)
    given = Named.model_validate({"name": section.name, **preset, **section.options})
    return resolve_options(maker, given, "task")


def _environment_options(config: Config) -> dict[str, object]:
    section = config.environment
    if section.name == NONE:
        if section.options:
            key = next(iter(section.options))
            raise ConfigError(
                f"config: environment.{key} has no effect, because no environment is chosen; set "
                "environment.name"
            )
        return {}
    return resolve_options(find_environment(section.name), section, "environment")


_OPTIONS: Mapping[str, Callable[[Config], dict[str, object]]] = MappingProxyType(
    {
        "length_penalty": _length_penalty_options,
        "reward": lambda config: reward_options(config.reward),
        "task": _task_options,
        "environment": _environment_options,
        "objective": _objective_options,
    }
)
"""Maps each config section to the function that resolves its options. The objective is last,
because resolving its options imports torch."""


def task_of(config: Config) -> Task:
    """Build the task that the configuration names."""
    return make_task(config.task.name, config.task.options)


def reward_of(config: Config) -> RewardFunction:
    """Build the reward that the configuration names."""
    reward = make_reward(config.reward.name, config.reward.options)
    return check_alone(config.reward.name, reward)


def evaluation_config(config: Config) -> Config:
    """Return the configuration for evaluations, in which `evaluate.reward` replaces [reward]."""
    apart = config.evaluate.reward
    if not apart.name:
        return config
    return config.model_copy(update={"reward": Reward.model_validate(apart.model_dump())})


def objective_of(config: Config) -> Objective:
    """Build the objective that the configuration names."""
    from covey.objective import build

    return build(config.objective.name, **config.objective.options)


def sampling_of(config: Config) -> Sampling:
    """Build the engine's sampling settings."""
    from covey.engines.draw import Distribution
    from covey.engines.protocol import Sampling

    rollout = config.rollout
    return Sampling(
        group_size=rollout.group_size,
        distribution=Distribution(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
        ),
        max_tokens=rollout.max_tokens,
        stop_strings=tuple(rollout.stop),
        max_concurrent=config.engine.max_concurrent,
        cache_gigabytes=config.engine.cache_gigabytes,
        seed=config.seed,
        mask_replay=rollout.mask_replay,
    )


def held_out_of(config: Config, task: Task, *, needed: bool = True) -> Sequence[Prompt]:
    """Return the held-out prompts; if `needed` is true and there are none, raise DataError."""
    prompts = task.held_out()
    prompts = prompts[: config.evaluate.prompts] if config.evaluate.prompts else prompts
    if needed and not prompts:
        raise DataError(f"task: {task.name} has no held-out prompts")
    return prompts


def template_of(config: Config) -> Template:
    """Build the prompt template."""
    model = config.model
    return Template(
        form=model.template,
        chat_options=model.chat_options,
        prefill=model.prefill,
        prefill_in_text=model.prefill_in_text,
    )
