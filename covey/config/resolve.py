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
from covey.config.resolve_options import choose, resolve_options
from covey.config.schema import Named, Reward
from covey.environments.registry import NONE, find_environment
from covey.errors import ConfigError, DataError
from covey.models.chat import Template
from covey.rewards import LENGTH_PENALTIES
from covey.rewards import Reward as RewardFunction
from covey.rewards.registry import check_alone, make_reward, reward_options
from covey.tasks.registry import find_task, is_user_task, make_task
from covey.tasks.task import Task
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
    from covey.config.check import check_settings, check_watching

    if not is_import_path(config.objective.name):
        check_algorithm_name(config.objective.name)
    check_watching(config)
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
    template_of(resolved)
    check_settings(resolved, objective_of(resolved) if "objective" in options else None)
    return resolved


def _is_user_code(config: Config, where: str) -> bool:
    """Return whether a config section names a function in the user's own code."""
    name = getattr(config, where).name
    return is_user_task(name) if where == "task" else is_import_path(name)


def over_epochs(config: Config, prompts: int) -> Config:
    """Compute `train.steps` from `train.stop_after.epochs` if epochs are set."""
    train = config.train.over_prompts(prompts, config.rollout.prompts_per_step)
    return config if train is config.train else config.model_copy(update={"train": train})


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


def _length_defaults(config: Config) -> dict[str, int]:
    """Return the defaults of length options, which are derived from `rollout.max_tokens`."""
    budget = config.rollout.max_tokens
    return {"length": budget, "limit": budget, "cache": max(1, budget // 5)}


def _length_penalty_options(config: Config) -> dict[str, object]:
    section = config.length_penalty
    maker = choose(LENGTH_PENALTIES, section, "length_penalty")
    return resolve_options(maker, section, "length_penalty", _length_defaults(config))


def _objective_options(config: Config) -> dict[str, object]:
    from covey.objective import find_algorithm

    section: Named = config.objective
    maker = find_algorithm(section.name, section.options)
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
