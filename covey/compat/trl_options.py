"""Maps options of TRL's GRPOConfig to settings of Covey, or to advice for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Convert = Callable[[Any], Any]

PIECES: Mapping[str, tuple[str, str, str]] = {
    "grpo": ("token", "clipped", "sequence_mean_token_mean"),
    "dapo": ("token", "clipped", "token_mean"),
    "bnpo": ("token", "clipped", "token_mean"),
    "dr_grpo": ("token", "clipped", "sequence_mean_token_sum_norm"),
    "cispo": ("token", "truncated_weight", "token_mean"),
    "sapo": ("token", "soft_gate", "sequence_mean_token_mean"),
    "luspo": ("sequence", "clipped", "sequence_mean_token_sum"),
    "vespo": ("product", "gamma_weight", "token_mean"),
}
"""Maps TRL's loss_type to the pieces of a composed objective: ratio, surrogate and weights."""
NAMES: Mapping[tuple[str, str, str, str], str] = {
    ("centered", *PIECES["dr_grpo"]): "dr_grpo",
    ("standardized", "sequence", "clipped", "sequence_mean_token_mean"): "gspo",
    ("batch_standardized", *PIECES["dapo"]): "lite_ppo",
    ("parts_standardized", *PIECES["grpo"]): "gdpo",
    **{("standardized", *PIECES[name]): name
       for name in ("grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
}  # fmt: skip
"""The names of algorithms that are compositions of an advantage and these pieces."""
OBJECTIVE: Mapping[str, Mapping[str, str]] = {
    "sapo": {"sapo_temperature_pos": "objective.tau_pos",
             "sapo_temperature_neg": "objective.tau_neg"},
    "vespo": {"vespo_k_pos": "objective.power_pos", "vespo_k_neg": "objective.power_neg",
              "vespo_lambda_pos": "objective.rate_pos", "vespo_lambda_neg": "objective.rate_neg"},
}  # fmt: skip
"""Maps options of one loss_type to settings."""

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


def _turns(value: Any) -> int | None:
    """A message after the last tool call is a turn too."""
    return None if value is None else int(value) + 1


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
    "max_tool_calling_iterations": ("environment.max_turns", _turns),
    "entropy_coef": ("objective.entropy_bonus", _number),
    "off_policy_mask_threshold": ("objective.off_policy_limit", _number),
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
         "train_sampling_strategy", "shuffle_dataset"), _DATA),
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
    "cast_lm_head_to_fp32": "not needed: log-probs are computed in float32",
    "load_best_model_at_end": "set save.best, such as save.best = 'greedy'",
    "metric_for_best_model": "set save.best, such as save.best = 'greedy'",
    "greater_is_better": "set save.best_is to 'highest' or 'lowest'",
    "vllm_importance_sampling_cap": "set objective.correction and its options",
    "vllm_enable_sleep_mode": "set engine.vllm.colocated = true",
    "vllm_group_port": "not needed: the port is chosen",
    "vllm_max_model_length": "set engine.vllm.arguments = ['--max-model-len', 'N']",
    "vllm_model_impl": "set engine.vllm.arguments",
    "vllm_server_host": "set engine.vllm.urls",
    "vllm_server_port": "set engine.vllm.urls",
    "vllm_server_timeout": "set engine.vllm.patience",
}  # fmt: skip
"""Maps each TRL option that does not change what is trained to advice for the user."""

_ENTROPY = "objective.entropy_bonus is constant"
STOPS: Mapping[str, str] = {
    "fp16": "use bf16, which becomes model.dtype = 'bfloat16'",
    "trust_remote_code": "model files may not run code (docs/security.md)",
    "optim": "the optimizer is AdamW",
    "optim_args": "the optimizer is AdamW",
    "optim_target_modules": "the optimizer is AdamW",
    "lr_scheduler_kwargs": "optimizer.schedule is constant, linear or cosine",
    "generation_kwargs": "name the options, such as top_k, in GRPOConfig itself",
    "repetition_penalty": "it would bias the policy gradient",
    "router_aux_loss_coef": "the router's loss is not trained",
    "vllm_structured_outputs_regex": "reward the format instead",
    "neftune_noise_alpha": "there is no noise on embeddings",
    **dict.fromkeys(
        ("entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
         "use_adaptive_entropy"), _ENTROPY),
}  # fmt: skip
"""Maps each option that changes what is trained, and that Covey lacks, to a reason or advice."""
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "optim": ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_8bit", "paged_adamw_8bit",
              "adamw_bnb_8bit", "paged_adamw_32bit"),
    "repetition_penalty": (1.0,), "router_aux_loss_coef": (0.0,), "use_adaptive_entropy": (False,),
    "fp16": (False,), "trust_remote_code": (False,),
}  # fmt: skip
"""Values with which an option in `STOPS` changes nothing."""

RENAMED: Mapping[str, str] = {
    "kl_coef": "beta", "kl_beta": "beta", "init_kl_coef": "beta",
    "max_new_tokens": "max_completion_length", "response_length": "max_completion_length",
    "num_generation": "num_generations", "num_return_sequences": "num_generations",
    "evaluation_strategy": "eval_strategy", "cliprange": "epsilon", "clip_range": "epsilon",
    "epsilon_low": "epsilon", "num_ppo_epochs": "num_iterations", "mu": "num_iterations",
    "no_cuda": "use_cpu", "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size", "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token", "vllm_max_model_len": "vllm_max_model_length",
    "sampling_temperature": "temperature",
}  # fmt: skip
"""Maps names that options of GRPOConfig had in older versions and tutorials to those of today."""
TRAINER_RENAMED = {
    "tokenizer": "processing_class",
    "config": "args",
    "reward_functions": "reward_funcs",
}
LAUNCH = frozenset(
    ("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config", "tf32",
     "torch_compile", "torch_compile_backend", "torch_compile_mode")
)  # fmt: skip
"""Options that need packages or devices which the machine of a port may lack."""

HANDLED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
         "generation_batch_size"), ("rollout.prompts_per_step", "train.mini_batches")),
    "num_generations": ("rollout.group_size", "rollout.prompts_per_step"),
    "num_iterations": ("train.epochs",),
    "max_steps": ("train.steps",),
    "num_train_epochs": ("train.stop_after",),
    "loss_type": ("objective.name", "objective.surrogate", "objective.weights"),
    "importance_sampling_level": ("objective.name", "objective.ratio"),
    "scale_rewards": ("objective.name", "objective.advantage"),
    "beta": ("objective.beta",),
    "use_bias_correction_kl": ("objective.kl",),
    "reward_weights": ("reward.weights",),
    "multi_objective_aggregation": ("objective.name",),
    "model_init_kwargs": ("model.dtype",),
    "vespo_k_pos": ("objective.power_pos",),
    "vespo_k_neg": ("objective.power_neg",),
    "vespo_lambda_pos": ("objective.rate_pos",),
    "vespo_lambda_neg": ("objective.rate_neg",),
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
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
         "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        ("objective.correction", "objective.correction_high", "objective.correction_low")),
    "sync_ref_model": ("reference.kind",),
    "warmup_steps": ("optimizer.warmup_steps", "optimizer.warmup_ratio"),
    "save_steps": ("save.every",),
    "eval_steps": ("evaluate.every",),
    "eval_strategy": ("evaluate.every",),
    "logging_steps": (),  # a note; used only if eval_steps is missing
    "max_prompt_length": ("rollout.long_prompts",),
}  # fmt: skip
"""Maps a TRL option to the settings that are computed from this option and other options."""

TRAINER: Mapping[str, str] = {
    "callbacks": "callbacks=[f] of covey.train get the metrics of each step",
    "processing_class": "the tokenizer is that of the model's folder",
}
"""Maps each argument of GRPOTrainer that does not change what is trained to advice."""
TRAINER_STOPS: Mapping[str, str] = {
    "rollout_func": "an own rollout function; write an environment (docs/environments.md)",
    "reward_processing_classes": "a reward model; Covey's rewards are functions",
    "optimizers": "an own optimizer; Covey's optimizer is AdamW",
}
"""Maps each argument of GRPOTrainer that Covey lacks to a reason."""
