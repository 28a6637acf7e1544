"""Converts GRPOConfig options of a TRL script to settings of Covey; lists unsupported options.

If TRL and Covey have different defaults for an option, the converted settings contain TRL's
default. On one device, the ported run trains in the same way as the TRL script.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from covey.compat.trl_options import (
    ALGORITHMS,
    COMPUTED,
    DEFAULTS,
    DIRECT,
    HANDLED,
    NAMED,
    OLDER,
    TRACKERS,
    TRAINER,
    VERSION,
)
from covey.compat.trl_source import Values, attributes, called, loading, parsed
from covey.config.load import toml_lines
from covey.errors import ConfigError
from covey.rewards.user import FUNCTIONS
from covey.tasks.dataset import NAME as DATASET

Settings = dict[str, Any]

HEAD = (
    f'Ported from TRL. Settings marked "# TRL\'s default" are defaults of TRL {VERSION}.',
    "The dataset and the rewards come from Python: covey.train('THIS_FILE', dataset=..., "
    "rewards=...)",
)
FROM_PYTHON = {"task.name": DATASET, "reward.name": FUNCTIONS}
"""Placeholders that covey.train replaces with the script's dataset and rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ported:
    """A configuration made from TRL's options."""

    settings: Mapping[str, Any]
    """Maps the dotted name of each setting to its value."""
    notes: tuple[str, ...]
    """A note for each TRL option that Covey lacks, or that means something else in Covey."""
    given: frozenset[str] = frozenset()
    """The settings that the script's options determine; all other settings have TRL's defaults."""

    computed: Mapping[str, str] = field(default_factory=dict)
    """Maps each setting whose value is unknown to the TRL option that determines it."""
    unpacked: tuple[str, ...] = ()
    """The script's `**name` arguments with unknown contents."""

    def toml(self) -> str:
        """Return the settings as a configuration file, with the notes as comments."""
        tables: dict[str, list[str]] = {"": []}
        for key, value in self.settings.items():
            section, _, name = key.rpartition(".")
            table = tables.setdefault(section, [])
            table += [f"{line}{self._mark(key)}" for line in toml_lines({name: value})]
        for key in sorted(self.computed.keys() - self.settings.keys()):
            section, _, name = key.rpartition(".")
            tables.setdefault(section, []).append(f"# {name} = ...{self._mark(key)}")
        lines = [f"# {note}" for note in (*HEAD, *self.notes)]
        lines += ["", *tables.pop("")]
        for section, table in tables.items():
            lines += ["", f"[{section}]", *table]
        return "\n".join(lines) + "\n"

    def _mark(self, key: str) -> str:
        """Return the comment that follows a setting in the configuration file."""
        if key in self.computed:
            return f"  # {self.computed[key]} is computed in the script; set it yourself"
        if key in self.given:
            return ""
        return "  # TRL's default" + "".join(f", unless {n} sets it" for n in self.unpacked)


def from_grpo_config(config: Any) -> Ported:
    """Convert a GRPOConfig object, or a dict of its options, to settings of Covey."""
    if isinstance(config, Mapping):
        return ported(config)
    if not is_dataclass(config) or isinstance(config, type):
        raise ConfigError("port: pass a GRPOConfig object, or a dict with options of GRPOConfig")
    given = {
        option.name: value.value if isinstance(value, Enum) else value
        for option in fields(config)
        if (value := getattr(config, option.name)) != option.default and option.init
    }
    return ported(given)


def from_script(text: str, name: str = "script.py") -> Ported:
    """Port the GRPOConfig and the GRPOTrainer of a script, without running the script."""
    tree = parsed(text, name)
    values, calls = Values.of(tree), [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    config, trainer, adapter = (
        next((call for call in calls if called(call) == wanted), None)
        for wanted in ("GRPOConfig", "GRPOTrainer", "LoraConfig")
    )
    if config is None:
        raise ConfigError(f"port: {name} creates no GRPOConfig, so there is nothing to convert")
    given = values.arguments(config)
    for attribute in attributes(tree, config, trainer):
        if attribute.plain:
            values.put(given, attribute.name, attribute.value)
        else:
            given.options.pop(attribute.name, None)
            given.unknown[attribute.name] = ast.unparse(attribute.value)
    more = _trainer(trainer, values) if trainer else Ported(settings={}, notes=())
    lora = _adapter(adapter, values) if adapter else Ported(settings={}, notes=())
    found, own = ported(given.options), {**more.settings, **lora.settings}
    missing = [
        *(f"{key}: its value is computed in the script; set it yourself" for key in given.unknown),
        *(f"options in {name} are not known: add them yourself" for name in given.unpacked),
    ]
    return Ported(
        settings=dict(sorted({**found.settings, **own}.items())),
        notes=(*more.notes, *lora.notes, *loading(tree, trainer), *found.notes, *missing),
        given=found.given | own.keys(),
        computed={k: name for name in given.unknown for k in _follows(name, found.settings)},
        unpacked=tuple(given.unpacked),
    )


def _follows(option: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that depend on an option.

    The first setting that depends on the option is always returned. The other settings that depend
    on the option are returned only if their values in `settings` are nonzero.
    """
    depends = _depends(option)
    further = (*depends[1:], *COMPUTED.get(option, ()))
    return [*depends[:1], *(key for key in further if settings.get(key))]


def _trainer(call: ast.Call, known: Values) -> Ported:
    """Return `model.path` from a GRPOTrainer call, and notes about the call's other arguments."""
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    settings, notes = {}, []
    model = values.get("model", call.args[0] if call.args else None)
    if model is not None and (path := known.text(model)) is not None:
        settings["model.path"] = path
    elif model is not None:
        notes.append(f"model = {ast.unparse(model)}: set model.path, or pass model=... a name")
    lora = values.get("peft_config")
    # A variable may hold a LoraConfig.
    if isinstance(lora, ast.Name) or (isinstance(lora, ast.Call) and called(lora) == "LoraConfig"):
        del values["peft_config"]
    for name, how in TRAINER.items():
        if name in values:
            notes.append(f"{name} = {ast.unparse(values[name])}: {how}")
    return Ported(settings=settings, notes=tuple(notes))


ADAPTER = {
    "r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "modules_to_save": "adapter.also_train",
}


def _adapter(call: ast.Call, known: Values) -> Ported:
    """Convert the known arguments of a LoraConfig; missing arguments get peft's defaults."""
    given = known.arguments(call)
    options, lost = given.options, (*given.unknown, *given.unpacked)
    notes = [f"LoraConfig: {name} is computed in the script; set it yourself" for name in lost]
    for name in sorted(options.keys() - ADAPTER.keys() - {"task_type", "inference_mode"}):
        notes.append(f"LoraConfig: {name} = {options[name]!r} has no counterpart")
    targets = options.pop("target_modules", None)
    if targets is None or (isinstance(targets, str) and targets != "all-linear"):
        notes.append(
            f"LoraConfig: target_modules = {targets!r}: adapter.targets is a list of names, such "
            "as ['q_proj', 'v_proj'], or ['all-linear']; set it yourself"
        )
    else:
        options["target_modules"] = [targets] if isinstance(targets, str) else sorted(targets)
    options = {"r": 8, "lora_alpha": 8, **options}
    settings = {key: options[name] for name, key in ADAPTER.items() if options.get(name)}
    settings["adapter.alpha"] = max(1, round(options["lora_alpha"]))
    return Ported(settings=settings, notes=tuple(notes))


def ported(given: Mapping[str, Any]) -> Ported:
    """Convert GRPOConfig options, given by name, to settings of Covey."""
    options = {**DEFAULTS, **given}
    settings: Settings = {**FROM_PYTHON, **_objective(options), **_batch(options)}
    settings |= _engine(options)
    if steps := options.get("warmup_steps"):  # below 1, a share of the optimizer steps
        key = "warmup_ratio" if steps < 1 else "warmup_steps"
        settings[f"optimizer.{key}"] = steps if steps < 1 else int(steps)
    rhythm, notes = _rhythm(options, settings["train.mini_batches"] * settings["train.epochs"])
    settings |= rhythm
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
    named = {key for name in given for key in _depends(name)}
    return Ported(
        settings=dict(sorted(settings.items())),
        notes=(*notes, *_remarks(options), *_differences(given)),
        given=frozenset(named | FROM_PYTHON.keys()),
    )


def _depends(name: str) -> tuple[str, ...]:
    """Return the settings that depend on an option."""
    return (*(DIRECT[name][:1] if name in DIRECT else ()), *HANDLED.get(name, ()))


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
    """Convert TRL's batch options to settings for a run on one device."""
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
    if options["max_steps"] <= 0:
        found["train.stop_after"] = {"epochs": float(options["num_train_epochs"])}
    if options.get("max_prompt_length"):
        found["rollout.long_prompts"] = "truncate"
    return found


def _rhythm(options: Mapping[str, Any], updates: int) -> tuple[Settings, list[str]]:
    """Convert options that count optimizer steps to settings that count training steps.

    A training step takes `updates` optimizer steps. `warmup_steps` and `ref_model_sync_steps` are
    not converted, because Covey, like TRL, counts them in optimizer steps.
    """
    evaluates, settings, notes = options["eval_strategy"] == "steps", {}, []
    counts = {
        "max_steps": ("train.steps", options["max_steps"]),
        "save_steps": ("save.every", options["save_steps"]),
        "eval_steps": (
            "evaluate.every",
            (options.get("eval_steps") or options["logging_steps"]) if evaluates else 0,
        ),
    }
    if options["eval_strategy"] == "no":
        settings["evaluate.every"] = 0
    elif not evaluates:
        notes.append(f"eval_strategy = {options['eval_strategy']!r}: set evaluate.every")
    for name, (key, value) in counts.items():
        if 0 < value < 1:  # a share of the run
            if options["max_steps"] <= 0:
                notes.append(f"{name} = {value}: a share of the steps; set {key} yourself")
                continue
            value = math.ceil(value * options["max_steps"])
        if value <= 0:
            continue
        settings[key] = math.ceil(value / updates)
        if value % updates:
            notes.append(
                f"{name} = {value}: a training step takes {updates} optimizer steps; {key} = "
                f"{settings[key]} is {settings[key] * updates} of them"
            )
    return settings, notes


def _engine(options: Mapping[str, Any]) -> Settings:
    if not options.get("use_vllm"):
        return {}
    found: Settings = {"engine.kind": "vllm"}
    if options.get("vllm_mode") == "colocate":
        found["engine.vllm.colocated"] = True
    if url := options.get("vllm_server_base_url"):
        found["engine.vllm.urls"] = [url]
    if (share := options.get("vllm_gpu_memory_utilization")) is not None:
        found["engine.vllm.memory"] = float(share)
    if size := options.get("vllm_tensor_parallel_size"):
        found["engine.vllm.tensor_parallel"] = size
    return found


def _remarks(options: Mapping[str, Any]) -> list[str]:
    """Return notes for the user about the ported settings."""
    scale, loss = options["scale_rewards"], options["loss_type"]
    plain = scale in (False, "none")
    found = []
    for name in OLDER:
        if name in options:
            found.append(f"{name} = {options[name]!r}: an option of TRL before {VERSION}; ported")
    names = options.get("report_to") or ()
    for name in [names] if isinstance(names, str) else names:
        if name not in ("none", "all", *TRACKERS):
            found.append(f"report_to = {name!r}: trackers has {', '.join(TRACKERS)}")
    if plain and loss != "dr_grpo":
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


def _differences(given: Mapping[str, Any]) -> list[str]:
    """Return notes about options of the script that mean something else in Covey."""
    found = []
    if "logging_steps" in given:
        found.append(
            f"logging_steps = {given['logging_steps']!r}: Covey logs every step, in steps.jsonl"
        )
    if given.get("loss_type") == "bnpo":
        found.append(
            "loss_type = 'bnpo': TRL divides by the tokens of each micro-batch, which depends on "
            "the accumulation; Covey's dapo divides by the tokens of the whole optimizer step"
        )
    return found
