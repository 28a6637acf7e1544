"""Refuses configurations, before a model is loaded.

`check_settings` refuses combinations of settings when a configuration is resolved. `check_start`
refuses what cannot start with so many ranks or on this machine; `covey plan` makes the same checks.
The module does not import torch, so that a wrong setting is reported within a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from covey.config import Config
from covey.config.reference_kinds import check_reference, check_teacher
from covey.config.resolve import (
    CORRECTION,
    held_out_of,
    objective_of,
    sampling_of,
    truncates_unseen,
)
from covey.environments.registry import NONE, PASSED, make_factory
from covey.errors import ConfigError, CoveyError, DataError
from covey.models.model_path import adapter_base, check_model_path
from covey.records.health import check_names
from covey.records.trackers.registry import check_trackers
from covey.records.watch import check_metric
from covey.rewards import LENGTH_PENALTIES, Reward
from covey.rewards.user import check_columns
from covey.rollout.prompts import check_enough
from covey.scoring import check_timeout
from covey.tasks.task import Task
from covey.trust import is_import_path
from covey.types import Prompt

if TYPE_CHECKING:
    from covey.objective import Objective


# Combinations of settings.


def check_settings(config: Config, objective: Objective | None) -> None:
    """Refuse a resolved configuration whose settings contradict each other.

    Without `objective`, which user code may define, what depends on it is not checked.
    """
    check_reference(config.reference)
    _check_engine(config)
    if objective is None:
        return
    _check_old_logp(config, objective)
    _check_groups(config, objective)
    _check_preferences(config, objective)
    _check_mask_replay(config, objective)
    if "teacher" in objective.needs:
        _check_teacher(config, objective)


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


def _check_groups(resolved: Config, objective: Objective) -> None:
    """Raise ConfigError if the objective does not fit the groups, mini-batches or reward parts."""
    from covey.objective.options import option

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


def check_watching(config: Config) -> None:
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


# What a run needs to start.

Check = Callable[[Config, int], None]
"""A check of a resolved configuration for a number of ranks; it raises CoveyError."""


def check_start(config: Config, ranks: int, *, sft: bool = False) -> None:
    """Raise the first error of the checks that a run makes before it loads a model."""
    for check in (*MODEL, *([] if sft else ROLLOUTS), *([] if sft else MACHINE)):
        check(config, ranks)


def obstacles(config: Config, ranks: int, *, here: bool = True) -> list[str]:
    """Return the errors of all checks of an RL run.

    If `here` is false, the run is planned for another machine, and this one is not checked.
    """
    found = []
    for check in (*MODEL, *ROLLOUTS, *(MACHINE if here else ())):
        try:
            check(config, ranks)
        except CoveyError as error:
            found.append(str(error))
    return found


def checked_prompts(
    config: Config, task: Task, reward: Reward
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Return the training and held-out prompts of an RL run.

    Raise an error if the task has none, or if the reward cannot score them.
    """
    file = config.preferences.file
    if file:
        from covey.policy.preferences import read_pairs

        train_prompts: Sequence[Prompt] = read_pairs(file)
    else:
        train_prompts = task.train()
    held_out = held_out_of(config, task, needed=config.evaluate.every > 0)
    if not train_prompts:
        raise DataError(f"task: {task.name} has no training prompts")
    check_enough(train_prompts, config.rollout.prompts_per_step)
    for prompt in (held_out if file else train_prompts)[:1]:
        check_columns(reward, prompt)
    if not reward.quick:
        check_timeout(config.reward.name, reward, config.scoring.timeout)
    return train_prompts, held_out


def _check_path(config: Config, ranks: int) -> None:
    check_model_path(config.model.path)


def _has_adapter(config: Config) -> bool:
    return config.adapter.rank > 0 or adapter_base(config.model.path) is not None


def _check_adapter(config: Config, ranks: int) -> None:
    from covey.models.model_path import check_four_bit, check_peft

    wanted = config.adapter
    if not _has_adapter(config):
        for name in ("also_train", "dropout", "load_in_4bit"):
            if getattr(wanted, name):
                raise ConfigError(
                    f"config: adapter.{name} has no effect without an adapter; set adapter.rank, "
                    f"or leave adapter.{name} out to train all weights"
                )
        return
    check_peft()
    if wanted.load_in_4bit:
        check_four_bit()


def _check_ranks(config: Config, ranks: int) -> None:
    if ranks == 1:
        return
    if config.model.device.startswith("cuda:"):
        raise ConfigError(
            f"config: model.device = {config.model.device!r} does not work with {ranks} ranks; set "
            "model.device = 'cuda', so that rank n of a machine uses GPU n"
        )
    size = min(config.parallel.shard_ranks or ranks, ranks)
    if config.parallel.strategy == "fsdp" and ranks % size:
        raise ConfigError(
            f"config: parallel.shard_ranks = {size} must be a divisor of the number of ranks, "
            f"{ranks}"
        )


def _check_overlap(config: Config, ranks: int) -> None:
    if ranks > 1 and config.overlap.staleness and config.overlap.mode == "copy":
        raise ConfigError(
            "config: overlap.mode = 'copy' works only on one rank; set overlap.mode = 'ahead' or "
            "overlap.staleness = 0"
        )


def _check_environment(config: Config, ranks: int) -> None:
    section, rollout = config.environment, config.rollout
    if section.name == NONE:
        return
    if section.max_tokens <= rollout.max_tokens:
        raise ConfigError(
            f"config: environment.max_tokens = {section.max_tokens} (for a whole conversation) "
            f"must be more than rollout.max_tokens = {rollout.max_tokens} (for one turn)"
        )
    if rollout.long_prompts == "truncate":
        raise ConfigError(
            "config: rollout.long_prompts = 'truncate' does not work with an environment, because "
            "conversations are not truncated; set rollout.long_prompts = 'skip'"
        )
    if section.call_format != "auto":
        check_calls(config, section.call_format)
    if section.name != PASSED and not is_import_path(section.name):
        make_factory(section.name, section.options)()  # its own checks


def check_calls(config: Config, name: str) -> None:
    """Raise ConfigError if a turn cannot end after its first call in the tool-call format."""
    from covey.environments.calls import CALL_FORMATS

    form = CALL_FORMATS[name]
    ends = config.environment.parallel_calls or form.one_per_turn or form.stops({"tool": None})
    if not ends:
        raise ConfigError(
            "config: environment.parallel_calls = false does not work with the tool-call format "
            f"{name}, whose calls have no end of their own; set environment.parallel_calls = true"
        )


def _check_length_penalty(config: Config, ranks: int) -> None:
    LENGTH_PENALTIES[config.length_penalty.name](**config.length_penalty.options)


def _check_reference(config: Config, ranks: int) -> None:
    section, adapter = config.reference, _has_adapter(config)
    if "reference" not in objective_of(config).needs:
        return
    if config.cluster.address and config.cluster.reference_actor:
        if section.kind != "frozen" or config.adapter.rank:
            raise ConfigError(
                "config: cluster.reference_actor = true needs reference.kind = 'frozen' and no "
                "adapter, because other kinds of references change with the policy or use its "
                "weights"
            )
    elif section.kind == "adapter_off" and not adapter:
        raise ConfigError(
            "config: reference.kind = 'adapter_off' works only with an adapter; set adapter.rank, "
            "or set reference.kind = 'frozen'"
        )
    elif section.kind in ("moving", "renewed") and adapter:
        raise ConfigError(
            f"config: reference.kind = {section.kind!r} does not work with an adapter; set "
            "reference.kind = 'adapter_off' or 'frozen'"
        )


def _check_vllm(config: Config, ranks: int) -> None:
    if config.engine.kind == "vllm" and config.adapter.rank and config.adapter.also_train:
        from covey.engines.vllm.check import WHOLE_LAYERS

        raise ConfigError(WHOLE_LAYERS)


def _check_engine_here(config: Config, ranks: int) -> None:
    """Check that this machine has what the engine and the devices need."""
    if config.cluster.address:
        from covey.cluster.ray_client import check_ray

        check_ray()
    if config.engine.kind == "vllm":
        from covey.engines.vllm.check import NCCL_WITHOUT_GPU, check_vllm
        from covey.models.device import device_of

        check_vllm(config)
        if config.engine.vllm.transfer == "nccl" and device_of(config.model.device).type != "cuda":
            raise ConfigError(NCCL_WITHOUT_GPU)


def _check_devices_here(config: Config, ranks: int) -> None:
    if config.cluster.address and config.cluster.trainers:
        return  # the trainers may run on other machines
    if config.engine.rounds:
        from covey.engines.make import check_float8

        check_float8(config)
    if config.model.device.startswith("cuda"):
        from covey.models.device import device_of

        device_of(config.model.device)


MODEL: Sequence[Check] = (_check_path, _check_adapter, _check_ranks)
ROLLOUTS: Sequence[Check] = (
    _check_overlap, _check_environment, _check_length_penalty, _check_reference, _check_vllm,
)  # fmt: skip
MACHINE: Sequence[Check] = (_check_engine_here, _check_devices_here)
"""Checks of this machine: packages, servers and devices."""
