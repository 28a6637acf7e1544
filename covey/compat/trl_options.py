"""Maps options of TRL's GRPOConfig to settings of Covey, or to advice for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Convert = Callable[[Any], Any]

ALGORITHMS = {"bnpo": "dapo"}
"""Maps TRL's loss_type to Covey's algorithm, if the two names differ."""

VERSION = "1.16"
"""The version of TRL that the options and defaults in this module come from."""
OLDER = ("max_prompt_length", "warmup_ratio")
"""Options of older TRL versions that scripts still use."""
TRACKERS = ("tensorboard", "wandb", "trackio")
DEFAULTS: Mapping[str, Any] = {
    "loss_type": "dapo", "importance_sampling_level": "token", "scale_rewards": "group",
    "beta": 0.0, "use_bias_correction_kl": True, "epsilon": 0.2, "epsilon_high": None,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8,
    "num_iterations": 1, "max_steps": -1, "num_train_epochs": 3.0, "max_completion_length": 512,
    "lr_scheduler_type": "linear", "seed": 42, "gradient_checkpointing": True, "save_steps": 500,
    "eval_strategy": "no", "logging_steps": 10,
}  # fmt: skip
"""TRL's default values of the options that the conversion always needs."""


def _same(value: Any) -> Any:
    return value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _trackers(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else list(value or ())
    return [name for name in names if name in TRACKERS]


def _count(value: Any) -> int | None:
    return None if value is None or value < 1 else int(value)


SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
DIRECT: Mapping[str, tuple[str, Convert]] = {
    "learning_rate": ("optimizer.learning_rate", _number),
    "adam_beta1": ("optimizer.beta1", _number),
    "adam_beta2": ("optimizer.beta2", _number),
    "adam_epsilon": ("optimizer.eps", _number),
    "weight_decay": ("optimizer.weight_decay", _number),
    "max_grad_norm": ("optimizer.max_grad_norm", _number),
    "lr_scheduler_type": ("optimizer.schedule", lambda value: SCHEDULES.get(str(value))),
    "warmup_ratio": ("optimizer.warmup_ratio", _number),
    "temperature": ("rollout.temperature", _number),
    "top_p": ("rollout.top_p", _number),
    "top_k": ("rollout.top_k", _count),
    "min_p": ("rollout.min_p", _number),
    "max_completion_length": ("rollout.max_tokens", _same),
    "max_prompt_length": ("rollout.max_prompt_tokens", _count),
    "chat_template_kwargs": ("model.chat_options", _same),
    "gradient_checkpointing": ("model.gradient_checkpointing", bool),
    "bf16": ("model.dtype", lambda value: "bfloat16" if value else None),
    "full_determinism": ("model.deterministic", bool),
    "mask_truncated_completions": ("filter.mask_truncated", bool),
    "ref_model_mixup_alpha": ("reference.alpha", _number),
    "ref_model_sync_steps": ("reference.every", _count),
    "num_generations_eval": ("evaluate.samples", _count),
    "save_total_limit": ("save.keep", _count),
    "seed": ("seed", _same),
    "report_to": ("trackers", _trackers),
}
"""Maps a TRL option to Covey's setting and to a function that converts the option's value. A
setting is left out if its conversion function returns None."""

_NOT_NEEDED = "not needed"
_HUB = "use `covey export`, and upload the folder"
_DEVICES = "see docs/scaling.md: start several ranks, and set [parallel]"
_COMPILE = "not needed: the native engine uses CUDA graphs and kernels of its own"
_DATA = "not needed: prompts are plain data in memory"
_LOGS = "metrics of every step are in steps.jsonl of the run folder"

NAMED: Mapping[str, str] = {
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "ddp_backend", "ddp_broadcast_buffers",
         "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout",
         "local_rank", "accelerator_config", "parallelism_config", "ds3_gather_for_generation",
         "average_tokens_across_devices", "save_on_each_node", "log_on_each_node"), _DEVICES),
    **dict.fromkeys(
        ("push_to_hub", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision",
         "hub_strategy", "hub_token", "log_completions_hub_repo"), _HUB),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel",
         "liger_kernel_config", "use_cache", "cache_implementation", "use_transformers_paged",
         "use_transformers_continuous_batching", "transformers_continuous_batching_config",
         "pad_to_multiple_of", "torch_empty_cache_steps", "auto_find_batch_size", "tf32",
         "enable_jit_checkpoint", "gradient_checkpointing_kwargs"), _COMPILE),
    **dict.fromkeys(
        ("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context",
         "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
         "dataloader_prefetch_factor", "remove_unused_columns", "length_column_name",
         "label_names", "label_smoothing_factor", "data_seed", "ignore_data_skip",
         "train_sampling_strategy", "shuffle_dataset", "neftune_noise_alpha"), _DATA),
    **dict.fromkeys(
        ("logging_strategy", "logging_first_step", "logging_nan_inf_filter",
         "log_level", "log_level_replica", "log_multimodal", "log_unique_prompts",
         "num_completions_to_print", "disable_tqdm", "debug",
         "include_for_metrics", "include_num_input_tokens_seen", "skip_memory_metrics",
         "prediction_loss_only", "batch_eval_metrics", "eval_do_concat_batches",
         "eval_use_gather_object", "eval_accumulation_steps", "trackio_bucket_id",
         "trackio_space_id", "trackio_static_space_id", "project"), _LOGS),
    **dict.fromkeys(
        ("do_eval", "do_predict", "do_train", "eval_on_start", "eval_delay", "save_strategy",
         "save_only_model", "restore_callback_states_from_checkpoint", "use_cpu",
         "per_device_eval_batch_size", "bf16_full_eval", "fp16_full_eval", "disable_dropout"),
        _NOT_NEEDED),
    "log_completions": "completions of every step are in rollouts/*.jsonl of the run folder",
    "output_dir": "covey train --run FOLDER",
    "run_name": "covey train --run FOLDER",
    "resume_from_checkpoint": "covey train --resume FOLDER",
    "model_init_kwargs": "set model.path, model.dtype and model.device",
    "trust_remote_code": "refused: model files may not run code (docs/security.md)",
    "fp16": "use model.dtype = 'bfloat16' or 'float32'",
    "cast_lm_head_to_fp32": "not needed: log-probs are computed in float32",
    "optim": "the optimizer is AdamW; optimizer.state = 'compact' saves memory",
    "optim_args": "the optimizer is AdamW",
    "optim_target_modules": "the optimizer is AdamW",
    "lr_scheduler_kwargs": "optimizer.schedule is constant, linear or cosine",
    "load_best_model_at_end": "set save.best, such as save.best = 'greedy'",
    "metric_for_best_model": "set save.best, such as save.best = 'greedy'",
    "greater_is_better": "set save.best_is to 'highest' or 'lowest'",
    "reward_weights": "pass rewards as a dict of function to weight to covey.train",
    "multi_objective_aggregation": "objective.name = 'gdpo' normalizes each part by itself",
    "generation_kwargs": "set rollout.stop, rollout.top_k and the like",
    "repetition_penalty": "no counterpart: it would bias the policy gradient",
    "off_policy_mask_threshold": "set objective.off_policy_limit",
    "router_aux_loss_coef": "no counterpart: the router's loss is not trained",
    "max_tool_calling_iterations": "set environment.max_turns",
    "vllm_importance_sampling_correction": "set objective.correction",
    "vllm_importance_sampling_mode": "set objective.correction",
    "vllm_importance_sampling_cap": "set objective.correction and its options",
    "vllm_importance_sampling_clip_max": "set objective.correction and its options",
    "vllm_importance_sampling_clip_min": "set objective.correction and its options",
    "vllm_enable_sleep_mode": "set engine.vllm.colocated = true",
    "vllm_group_port": "not needed: the port is chosen",
    "vllm_max_model_length": "set engine.vllm.arguments = ['--max-model-len', 'N']",
    "vllm_model_impl": "set engine.vllm.arguments",
    "vllm_server_host": "set engine.vllm.urls",
    "vllm_server_port": "set engine.vllm.urls",
    "vllm_server_timeout": "set engine.vllm.patience",
    "vllm_structured_outputs_regex": "no counterpart: reward the format instead",
    "entropy_coef": "set objective.entropy_bonus",
    **dict.fromkeys(
        ("entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
         "use_adaptive_entropy"), "no counterpart: objective.entropy_bonus is constant"),
    "vespo_k_pos": "set objective.power_pos",
    "vespo_k_neg": "set objective.power_neg",
    "vespo_lambda_pos": "set objective.rate_pos",
    "vespo_lambda_neg": "set objective.rate_neg",
}  # fmt: skip
"""Maps each TRL option without a direct counterpart to advice for the user."""

HANDLED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
         "generation_batch_size"), ("rollout.prompts_per_step", "train.mini_batches")),
    "num_generations": ("rollout.group_size", "rollout.prompts_per_step"),
    "num_iterations": ("train.epochs",),
    "max_steps": ("train.steps",),
    "num_train_epochs": ("train.stop_after",),
    "loss_type": ("objective.name",),
    "importance_sampling_level": ("objective.name",),
    "scale_rewards": ("objective.name",),
    "beta": ("objective.beta",),
    "use_bias_correction_kl": ("objective.kl",),
    "epsilon": ("objective.clip_low", "objective.clip_high"),
    "epsilon_high": ("objective.clip_high", "objective.max_weight"),
    "delta": ("objective.dual",),
    "top_entropy_quantile": ("objective.top_entropy",),
    "sapo_temperature_neg": ("objective.tau_neg",),
    "sapo_temperature_pos": ("objective.tau_pos",),
    "use_vllm": ("engine.kind",),
    "vllm_mode": ("engine.vllm.colocated",),
    "vllm_server_base_url": ("engine.vllm.urls",),
    "vllm_gpu_memory_utilization": ("engine.vllm.memory",),
    "vllm_tensor_parallel_size": ("engine.vllm.tensor_parallel",),
    "sync_ref_model": ("reference.kind",),
    "warmup_steps": ("optimizer.warmup_steps", "optimizer.warmup_ratio"),
    "save_steps": ("save.every",),
    "eval_steps": ("evaluate.every",),
    "eval_strategy": ("evaluate.every",),
    "logging_steps": (),  # a note; used only if eval_steps is missing
    "max_prompt_length": ("rollout.long_prompts",),
}  # fmt: skip
"""Maps a TRL option to the settings that are computed from this option and other options."""

_STEPS = ("train.steps", "save.every", "evaluate.every")
COMPUTED: Mapping[str, tuple[str, ...]] = {
    "max_steps": ("train.stop_after",),
    "logging_steps": ("evaluate.every",),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
         "generation_batch_size", "num_iterations"), _STEPS),
}  # fmt: skip
"""Maps a TRL option to the settings that depend on the option's value and are not in `HANDLED`."""

TRAINER: Mapping[str, str] = {
    "reward_funcs": "pass it as rewards=... to covey.train, or name it in [reward]",
    "train_dataset": "pass it as dataset=... to covey.train, or use the task hub or jsonl",
    "eval_dataset": "pass it as held_out=... to covey.train",
    "peft_config": "set adapter.rank, adapter.alpha, adapter.targets and adapter.dropout",
    "callbacks": "callbacks=[f] of covey.train get the metrics of each step",
    "processing_class": "the tokenizer is that of the model's folder",
    "environment_factory": "pass it as environment=... to covey.train",
}
"""Maps each argument of GRPOTrainer to advice on what to use instead."""
