"""Port a TRL script: convert options of GRPOConfig to Covey's settings, and list all others.

If TRL's default of an option differs from Covey's, the converted settings include TRL's default.
The ported run then trains as the script did on one device.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from covey.compat.trl_options import ALGORITHMS, DEFAULTS, DIRECT, NAMED, TRACKERS
from covey.config.load import toml_lines
from covey.errors import ConfigError

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ported:
    """A configuration made from TRL's options."""

    settings: Mapping[str, Any]
    """Dotted setting -> value."""
    notes: tuple[str, ...]
    """A line for each option without a counterpart, or with a different meaning in Covey."""

    def toml(self) -> str:
        """Return the settings as a configuration file, with the notes as comments."""
        tables: dict[str, Settings] = {}
        for key, value in self.settings.items():
            section, _, name = key.rpartition(".")
            tables.setdefault(section, {})[name] = value
        lines = [f"# {note}" for note in self.notes]
        lines += ["", *toml_lines(tables.pop("", {}))]
        for section, values in tables.items():
            lines += ["", f"[{section}]", *toml_lines(values)]
        return "\n".join(lines).lstrip("\n") + "\n"


def from_grpo_config(config: Any) -> Ported:
    """Port a GRPOConfig object, or a mapping of the options that were given."""
    return ported(_given(config))


def _given(config: Any) -> dict[str, Any]:
    """Return the options of a config that differ from their defaults."""
    if isinstance(config, Mapping):
        return dict(config)
    if not is_dataclass(config) or isinstance(config, type):
        raise ConfigError("port: give a GRPOConfig, or a dict of its options")
    return {
        field.name: value
        for field in fields(config)
        if (value := getattr(config, field.name)) != field.default and field.init
    }


def from_script(text: str, name: str = "script.py") -> Ported:
    """Port the GRPOConfig and the GRPOTrainer of a script, without running it."""
    try:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except SyntaxError as error:
        raise ConfigError(
            f"port: {name} is not valid Python, line {error.lineno}: {error.msg}"
        ) from None
    configs = [call for call in calls if _called(call) == "GRPOConfig"]
    if not configs:
        raise ConfigError(f"port: {name} creates no GRPOConfig")
    options, unknown = _literals(configs[0])
    trainers = [call for call in calls if _called(call) == "GRPOTrainer"]
    more = _trainer(trainers[0]) if trainers else Ported(settings={}, notes=())
    found = ported(options)
    missing = tuple(
        f"{key}: its value is computed in the script; set it yourself" for key in unknown
    )
    return Ported(
        settings={**more.settings, **found.settings}, notes=(*more.notes, *found.notes, *missing)
    )


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _literals(call: ast.Call) -> tuple[dict[str, Any], list[str]]:
    """Return the keyword arguments with literal values, and the names of all other keywords."""
    options, unknown = {}, []
    for keyword in call.keywords:
        try:
            if keyword.arg is not None:
                options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            unknown.append(str(keyword.arg))
    return options, unknown


def _trainer(call: ast.Call) -> Ported:
    """Return the model of a GRPOTrainer, with notes about its other arguments."""
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    settings, notes = {}, []
    model = values.get("model", call.args[0] if call.args else None)
    if isinstance(model, ast.Constant) and isinstance(model.value, str):
        settings["model.path"] = model.value
    for name, how in TRAINER.items():
        if name in values:
            notes.append(f"{name} = {ast.unparse(values[name])}: {how}")
    return Ported(settings=settings, notes=tuple(notes))


TRAINER = {
    "reward_funcs": "pass it as rewards=... to covey.train, or name it in [reward]",
    "train_dataset": "pass it as dataset=... to covey.train, or use the task hub or jsonl",
    "eval_dataset": "pass it as held_out=... to covey.train",
    "peft_config": "set adapter.rank, adapter.alpha, adapter.targets and adapter.dropout",
    "callbacks": "callbacks=[f] of covey.train get the metrics of each step",
    "processing_class": "the tokenizer is that of the model's folder",
    "environment_factory": "pass it as environment=... to covey.train",
}


def ported(given: Mapping[str, Any]) -> Ported:
    """Port options of GRPOConfig by name."""
    options = {**DEFAULTS, **given}
    settings: Settings = {**_objective(options), **_batch(options), **_engine(options)}
    notes = []
    for name, value in options.items():
        if name in DIRECT:
            key, convert = DIRECT[name]
            if (found := convert(value)) is not None:
                settings[key] = found
            elif value not in (None, False, 0, -1):
                notes.append(f"{name} = {value!r}: {key} has no such value")
        elif name in NAMED:
            if name in given:
                notes.append(f"{name} = {value!r}: {NAMED[name]}")
        elif name not in HANDLED:
            notes.append(f"{name} = {value!r}: not an option of GRPOConfig that Covey knows")
    return Ported(settings=dict(sorted(settings.items())), notes=(*notes, *_remarks(options)))


HANDLED = frozenset(
    {
        "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
        "generation_batch_size", "num_generations", "num_iterations", "max_steps",
        "num_train_epochs", "loss_type", "importance_sampling_level", "scale_rewards", "beta",
        "epsilon", "epsilon_high", "delta", "use_bias_correction_kl", "top_entropy_quantile",
        "sapo_temperature_neg", "sapo_temperature_pos", "use_vllm", "vllm_mode",
        "vllm_server_base_url", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
        "eval_strategy", "eval_steps", "sync_ref_model",
    }
)  # fmt: skip
"""Options that are ported only in combination with other options."""


def _objective(options: Mapping[str, Any]) -> Settings:
    loss, sequence = options["loss_type"], options["importance_sampling_level"] == "sequence"
    name = "gspo" if sequence and loss == "grpo" else ALGORITHMS.get(loss, loss)
    found: Settings = {"objective.name": name, "objective.beta": options["beta"]}
    if options["beta"] and options["use_bias_correction_kl"]:
        found["objective.kl"] = "ratio_k3"
    if name in ("grpo", "dr_grpo", "dapo", "gspo", "luspo"):
        high = options["epsilon_high"]
        found["objective.clip_low"] = options["epsilon"]
        found["objective.clip_high"] = options["epsilon"] if high is None else high
    if name == "cispo":
        found["objective.max_weight"] = options["epsilon_high"] or 5.0
    if name in ("grpo", "dr_grpo", "dapo") and options.get("delta") is not None:
        found["objective.dual"] = options["delta"]
    if name == "sapo":
        for sign in ("pos", "neg"):
            if (value := options.get(f"sapo_temperature_{sign}")) is not None:
                found[f"objective.tau_{sign}"] = value
    if options.get("top_entropy_quantile", 1.0) < 1.0:
        found["objective.top_entropy"] = options["top_entropy_quantile"]
    if options.get("sync_ref_model"):
        found["reference.kind"] = "moving"
    return found


def _batch(options: Mapping[str, Any]) -> Settings:
    """Return the settings for prompts, mini-batches and steps of a run on one device."""
    per_device, accumulated = (
        options["per_device_train_batch_size"],
        options["gradient_accumulation_steps"],
    )
    total = options.get("generation_batch_size")
    steps = options.get("steps_per_generation") or (
        max(1, total // per_device) if total else accumulated
    )
    completions = total or per_device * steps
    mini_batches, epochs = max(1, steps // accumulated), options["num_iterations"]
    found: Settings = {
        "rollout.group_size": options["num_generations"],
        "rollout.prompts_per_step": max(1, completions // options["num_generations"]),
        "train.mini_batches": mini_batches,
        "train.epochs": epochs,
    }
    if options["max_steps"] > 0:  # optimizer steps in TRL, rollout batches here
        found["train.steps"] = math.ceil(options["max_steps"] / (mini_batches * epochs))
    else:
        found["train.stop_after"] = {"epochs": float(options["num_train_epochs"])}
    return found


def _engine(options: Mapping[str, Any]) -> Settings:
    found: Settings = {}
    if options.get("use_vllm"):
        found["engine.kind"] = "vllm"
        if options.get("vllm_mode") == "colocate":
            found["engine.vllm.colocated"] = True
        if url := options.get("vllm_server_base_url"):
            found["engine.vllm.urls"] = [url]
        if (share := options.get("vllm_gpu_memory_utilization")) is not None:
            found["engine.vllm.memory"] = float(share)
        if size := options.get("vllm_tensor_parallel_size"):
            found["engine.vllm.tensor_parallel"] = size
    every = options.get("eval_steps")
    if options.get("eval_strategy", "no") == "no":
        found["evaluate.every"] = 0
    elif isinstance(every, int):
        found["evaluate.every"] = every
    return found


def _remarks(options: Mapping[str, Any]) -> list[str]:
    """Return notes about the ported settings that the user should read."""
    scale, loss = options["scale_rewards"], options["loss_type"]
    plain = scale in (False, "none")
    found = []
    names = options.get("report_to") or ()
    for name in [names] if isinstance(names, str) else names:
        if name not in ("none", "all", *TRACKERS):
            found.append(f"report_to = {name!r}: trackers has {', '.join(TRACKERS)}")
    if plain and loss not in ("dr_grpo",):
        found.append(
            "scale_rewards = 'none': use objective.name = 'dr_grpo', or compose one with "
            "objective.advantage = 'centered'"
        )
    if not plain and loss == "dr_grpo":
        found.append(
            "TRL's dr_grpo divides by the deviation unless scale_rewards is 'none'; this does not"
        )
    if scale == "batch":
        found.append(
            "scale_rewards = 'batch': objective.name = 'lite_ppo' divides by the batch's deviation"
        )
    if options["importance_sampling_level"] == "sequence" and loss != "grpo":
        found.append(
            f"importance_sampling_level = 'sequence' with loss_type = {loss!r}: see objective.ratio"
        )
    return found
