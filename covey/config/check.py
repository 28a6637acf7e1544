"""Refuses what cannot start before a model is loaded; `covey plan` makes the same checks.

The module does not import torch, so that `covey plan` and a command that starts ranks refuse within
a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from covey.config import Config
from covey.config.resolve import held_out_of, objective_of
from covey.environments.registry import NONE, PASSED, make_factory
from covey.errors import ConfigError, CoveyError, DataError
from covey.models.model_path import adapter_base, check_model_path
from covey.rewards import LENGTH_PENALTIES, Reward
from covey.rewards.user import check_columns
from covey.rollout.prompts import check_enough
from covey.scoring import check_timeout
from covey.tasks.task import Task
from covey.trust import is_import_path
from covey.types import Prompt

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
    from covey.models.four_bit import check_four_bit, check_peft

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
