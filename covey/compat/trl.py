"""Converts GRPOConfig options and the trainer of a TRL script to a configuration of Covey.

If TRL and Covey have different defaults for an option, the converted settings contain TRL's
default. On one device, the ported run trains in the same way as the TRL script. An option that
changes what is trained, and that Covey lacks, raises ConfigError.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

from covey.compat.trl_options import (
    DEFAULTS,
    DIRECT,
    HANDLED,
    HARMLESS,
    NAMED,
    NAMES,
    OBJECTIVE,
    OLDER,
    PIECES,
    RENAMED,
    STOPS,
    TRACKERS,
    TRAINER,
    TRAINER_STOPS,
    VERSION,
)
from covey.compat.trl_script import (
    LazyData,
    Recorder,
    Stand,
    Training,
    exported,
    listed,
    record,
    recorders,
)
from covey.config.load import toml_lines
from covey.errors import ConfigError
from covey.rewards.identity import names_in_source
from covey.rewards.user import FUNCTIONS
from covey.tasks.rows import NAME as DATASET
from covey.tasks.rows import TARGET_COLUMNS, write_rows

Settings = dict[str, Any]
FROM_PYTHON = {"task.name": DATASET, "reward.name": FUNCTIONS}
"""The settings of a converted GRPOConfig, for which Python passes the dataset and the rewards."""
PLAIN = (str, bytes, int, float, bool, type(None), tuple, list, dict, set, frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ported:
    """A configuration made from TRL's options."""

    settings: Mapping[str, Any]
    """Maps the dotted name of each setting to its value."""
    notes: tuple[str, ...]
    """A note for each TRL option that Covey lacks, or that means something else in Covey."""
    given: frozenset[str] = frozenset()
    """The settings that the script's options determine; all other settings have TRL's defaults."""
    head: tuple[str, ...] = (
        "The dataset and the rewards come from Python: covey.train('THIS_FILE', dataset=..., "
        "rewards=...)",
    )
    version: str = VERSION
    """The version of TRL whose defaults the settings contain."""

    def toml(self) -> str:
        """Return the settings as a configuration file, with the notes as comments."""
        marked = f'Settings marked "# TRL\'s default" are defaults of TRL {self.version}.'
        lines = [f"# {note}" for note in (f"Ported from TRL. {marked}", *self.head, *self.notes)]
        tables: dict[str, list[str]] = {"": []}
        for key, value in self.settings.items():
            section, _, name = key.rpartition(".")
            mark = "" if key in self.given else "  # TRL's default"
            own = tables.setdefault(section, [])
            own += [f"{line}{mark}" for line in toml_lines({name: value})]
        lines += ["", *tables.pop("")]
        for section, table in tables.items():
            lines += ["", f"[{section}]", *table]
        return "\n".join(lines) + "\n"


def from_grpo_config(config: Any) -> Ported:
    """Convert a GRPOConfig object, or a dict of its options, to settings of Covey."""
    if isinstance(config, Mapping):
        return ported(config)
    if not is_dataclass(config) or isinstance(config, type):
        raise ConfigError("port: pass a GRPOConfig object, or a dict with options of GRPOConfig")
    values = {option.name: getattr(config, option.name) for option in fields(config) if option.init}
    defaults = {option.name: option.default for option in fields(config)}
    # TRL computes these from other options if they are not given.
    own = {"bf16", "steps_per_generation", "generation_batch_size", "scale_rewards"}
    given = {k: v for k, v in values.items() if v != defaults[k] and k not in own}
    if values["steps_per_generation"] != values["gradient_accumulation_steps"]:
        given["steps_per_generation"] = values["steps_per_generation"]
    if values["scale_rewards"] not in (True, "group"):
        given["scale_rewards"] = values["scale_rewards"]
    return ported(given)


def ported_script(script: Path, out: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run a script, and write a configuration with data and functions for each of its trainings.

    Return the path of each configuration, the modules that it needs trusted, and its notes.
    """
    is_yaml = script.suffix in (".yaml", ".yml")
    if is_yaml:  # what `trl grpo --config FILE` runs
        arguments = ["--config", str(script), *arguments]
        script = Path(str(importlib.util.find_spec("trl").origin)).parent / "scripts/grpo.py"  # type: ignore[union-attr]
    recorder = record(script, arguments)
    functions = _Functions(script, arguments, out, recorder.namespace)
    found = []
    for number, training in enumerate(recorder.trainings):
        several = len(recorder.trainings) > 1
        file = out.with_stem(f"{out.stem}-{number + 1}") if several else out
        notes = (*training.notes, *(n for n in recorder.notes[len(training.notes) :] if not number))
        noted = replace(training, notes=list(dict.fromkeys(notes)))
        one = _training(noted, functions, number, file)
        file.write_text(one.toml(), encoding="utf-8")
        found.append({"file": str(file), "trust": functions.trust, "notes": list(one.notes)})
    return found


def _training(training: Training, functions: _Functions, number: int, file: Path) -> Ported:
    arguments = training.arguments
    for name, why in TRAINER_STOPS.items():
        if arguments.get(name) not in (None, (None, None)):
            raise _lacks(name, "", why)
    found = ported(training.given, training.defaults)
    own: Settings = _model(arguments, training.given)
    notes = [*training.notes]
    adapter, more = _adapter(arguments, training.given, own["model.path"])
    notes += more
    data, more = _data(training, file)
    notes += more
    paths = functions.paths(number, arguments)
    rewards = listed(arguments.get("reward_funcs"))
    names = [paths[id(function)] for function in rewards if id(function) in paths]
    if len(names) < len(rewards) or not rewards:
        other = next((f for f in rewards if id(f) not in paths), None)
        raise _lacks("reward_funcs", other, "a trained reward model; Covey's rewards are functions")
    own |= {"reward.name": "sum", "reward.functions": names, "scoring.none_rewards": "skip"}
    if weights := [float(weight) for weight in training.given.get("reward_weights") or ()]:
        own["reward.weights"] = weights
    if tools := listed(arguments.get("tools")):
        own |= {"environment.name": "tools", "environment.functions": [paths[id(f)] for f in tools]}
    factory = arguments.get("environment_factory")
    if factory and (tools or isinstance(factory, Mapping)):
        what = "with tools" if tools else "several environments"
        raise _lacks("environment_factory", what, "a run has one environment")
    if factory:
        own["environment.name"] = paths[id(factory)]
    if any("environments" in inspect.signature(function).parameters for function in rewards):
        if not factory:
            raise _lacks("the argument 'environments'", "", "the script has no environment_factory")
        own = {key: value for key, value in own.items() if not key.startswith("reward.")}
        own |= {"reward.name": "environment", "environment.name": "trl"}
        own |= {"environment.factory": paths[id(factory)], "environment.rewards": names}
        own |= {"environment.weights": weights} if weights else {}
    if tools or factory:
        own["environment.max_tokens"] = found.settings["rollout.max_tokens"] + 2048
        notes.append("environment.max_tokens counts the prompt too, for which it has 2,048 tokens")
        if "environment.max_turns" not in found.settings:
            notes.append("TRL has no limit on tool calls; environment.max_turns and "
                         "environment.max_calls have Covey's defaults")  # fmt: skip
    for name, how in TRAINER.items():
        if name in arguments:
            notes.append(f"{name} = {arguments[name]!r:.60}: {how}")
    settings = {**found.settings, **own, **adapter, **data}
    return Ported(
        settings=dict(sorted(settings.items())),
        notes=(*dict.fromkeys([*notes, *found.notes]),),
        given=found.given | own.keys() | adapter.keys() | data.keys(),
        head=("The data and the functions are those that the script passed to its trainer.",),
        version=str(getattr(sys.modules.get("trl"), "__version__", VERSION)),
    )


def _lacks(name: str, value: Any, why: str) -> ConfigError:
    shown = f" = {value!r:.80}" if value not in ("", None) else ""
    return ConfigError(f"port: {name}{shown} cannot be ported: {why}")


def _model(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    model = arguments["model"]
    origin = model.origin if isinstance(model, Stand) else {"path": model}
    if not origin or not isinstance(origin["path"], str):
        raise _lacks("model", type(model).__name__, "pass the name or the folder of a model")
    settings: Settings = {"model.path": origin["path"]}
    options = {**(given.get("model_init_kwargs") or {})}
    dtype = str(options.pop("dtype", None) or options.pop("torch_dtype", None) or "")
    if (dtype := dtype.removeprefix("torch.")) in ("bfloat16", "float32"):
        settings["model.dtype"] = dtype
    if options.pop("trust_remote_code", False):
        raise _lacks("trust_remote_code", True, STOPS["trust_remote_code"])
    if (revision := options.pop("revision", None)) not in (None, "main"):
        raise _lacks("revision", revision, "download the revision, and pass its folder as model")
    return settings


ADAPTER = {
    "r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "modules_to_save": "adapter.also_train",
}
NOT_TRAINED = frozenset(
    ("task_type", "inference_mode", "base_model_name_or_path", "revision", "peft_type",
     "auto_mapping", "peft_version", "runtime_config")
)  # fmt: skip
"""Options of a LoraConfig that do not change what is trained."""


def _adapter(
    arguments: Mapping[str, Any], given: Mapping[str, Any], model: str
) -> tuple[Settings, list[str]]:
    stand = arguments["model"]
    notes: list[str] = []
    config = arguments.get("peft_config")
    config = (getattr(stand, "origin", None) or {}).get("peft_config", config)
    settings: Settings = {}
    options = given.get("model_init_kwargs") or {}
    quantization = arguments.get("quantization_config") or options.get("quantization_config")
    if quantization is not None:
        if config is None or not getattr(quantization, "load_in_4bit", False):
            raise _lacks("quantization_config", quantization, "only 4 bits with a LoRA adapter")
        settings["adapter.load_in_4bit"] = True
    if config is None:
        return settings, notes
    if type(config).__name__ != "LoraConfig":
        raise _lacks("peft_config", type(config).__name__, "the only adapter is LoRA")
    defaults = type(config)()
    for option in fields(config):
        value = getattr(config, option.name)
        plain = value.value if isinstance(value, Enum) else value
        if option.name in ADAPTER or option.name in NOT_TRAINED or option.name.startswith("_"):
            continue
        if plain != getattr(defaults, option.name):
            raise _lacks(f"LoraConfig: {option.name}", plain, "adapters are plain LoRA")
    targets = config.target_modules
    if targets is None:
        targets = _usual_targets(model)
        notes.append(f"LoraConfig: target_modules is not set; {targets} are peft's for this model")
    if isinstance(targets, str) and targets != "all-linear" and not targets.isidentifier():
        raise _lacks("LoraConfig: target_modules", targets, "list the names of the layers")
    settings |= {
        "adapter.rank": config.r,
        "adapter.alpha": max(1, round(config.lora_alpha)),
        "adapter.dropout": float(config.lora_dropout),
        "adapter.targets": [targets] if isinstance(targets, str) else sorted(targets),
    }
    if config.modules_to_save:
        settings["adapter.also_train"] = sorted(config.modules_to_save)
    return settings, notes


def _usual_targets(model: str) -> list[str]:
    """Return the layers that peft adapts if a LoraConfig names none."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    try:
        from transformers import AutoConfig

        return list(USUAL[AutoConfig.from_pretrained(model).model_type])
    except (OSError, ValueError, KeyError):
        name = model.rpartition("/")[2].lower()
        kinds = [kind for kind in USUAL if name.startswith(kind)]  # qwen3-4b: qwen3
        if not kinds:
            raise _lacks("LoraConfig: target_modules", None, "name the layers") from None
        return list(USUAL[max(kinds, key=len)])


def _data(training: Training, file: Path) -> tuple[Settings, list[str]]:
    """Convert the datasets: by name if the script only loaded them, and otherwise as JSON Lines."""
    train, held_out = (training.arguments.get(f"{split}_dataset") for split in ("train", "eval"))
    strategy = training.given.get("eval_strategy", training.defaults.get("eval_strategy", "no"))
    evaluates = str(getattr(strategy, "value", strategy)) != "no"
    if train is None:
        raise _lacks("train_dataset", None, "the script passes no dataset")
    if evaluates and held_out is None:
        raise _lacks("eval_strategy", strategy, "the script passes no eval_dataset")
    if isinstance(held_out, Mapping) and evaluates:
        raise _lacks("eval_dataset", ", ".join(held_out), "a run has one held-out dataset")
    settings: Settings = {"task.optional_target": True, "task.prompt": "prompt"}
    if not evaluates:
        held_out = None
        settings |= {"task.held_out_share": 0.0, "evaluate.every": 0}
    known = [data.origin for data in (train, held_out) if isinstance(data, LazyData)]
    wanted = 1 if held_out is None else 2
    if len(known) == wanted and len({(o["path"], o.get("subset")) for o in known}) == 1:
        settings |= {"task.name": "hub", "task.path": known[0]["path"]}
        settings |= {f"task.{k}": known[0][k] for k in ("subset", "revision") if k in known[0]}
        settings["task.train_split"] = known[0].get("split", "train")
        if held_out is not None:
            settings["task.held_out_split"] = known[1].get("split", "test")
        note = "if its prompts are texts and not messages, TRL uses no chat template: set "
        return settings, [f"the dataset {known[0]['path']} was not loaded: {note}"
                          "model.template = 'plain'"]  # fmt: skip
    settings["task.name"] = "jsonl"
    rows: list[dict[str, Any]] = []
    for data, key, suffix in ((train, "train_file", ""), (held_out, "held_out_file", "-held-out")):
        if data is None:
            continue
        rows = _rows(data, rows)
        path = file.with_name(f"{file.stem}{suffix}.jsonl")
        write_rows(path, rows)
        settings[f"task.{key}"] = path.name
    if isinstance(rows[0]["prompt"], str):
        settings["model.template"] = "plain"  # TRL uses the chat template only for messages
    columns = [name for name in TARGET_COLUMNS if name in rows[0]]
    if columns and not all(isinstance(r.get(columns[0]), str | int | float) for r in rows):
        settings["task.target"] = "no target"  # reward functions get the column as it is
    return settings, []


def _rows(data: Any, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a dataset; raise ConfigError for images and for rows without a prompt."""
    data = data.loaded() if isinstance(data, LazyData) else data
    if isinstance(data, Mapping):
        raise _lacks("train_dataset", ", ".join(map(str, data)), "choose a split of the dataset")
    kinds = {
        name: type(kind).__name__ for name, kind in (getattr(data, "features", None) or {}).items()
    }
    images = [name for name, kind in kinds.items() if kind in ("Image", "Video", "Audio")]
    rows = [] if images else [dict(row) for row in data]
    first = rows[0] if rows else {}
    images += [name for name, value in first.items() if type(value).__module__.startswith("PIL.")]
    images += [n for n in ("image", "images") if n in first]
    if images:
        raise _lacks(f"the column {images[0]!r}", "", "Covey has no images: its models read text")
    if not rows or "prompt" not in first:
        have = ", ".join(first) or "none"
        raise _lacks("train_dataset", "", f"it has no column 'prompt'; its columns are {have}")
    return rows


class _Functions:
    """Names the functions of a script so that another process can import them.

    A function is imported from the script if the import finds the same function without training.
    Otherwise, a module beside the configuration runs the script up to the training, and has the
    functions that it passed.
    """

    def __init__(
        self, script: Path, arguments: Sequence[str], out: Path, namespace: Mapping[str, Any]
    ) -> None:
        self._script, self._arguments, self._out = script.resolve(), list(arguments), out
        self._namespace = namespace
        self._module: Any = None
        self.trust: list[str] = []

    def paths(self, number: int, arguments: Mapping[str, Any]) -> dict[int, str]:
        """Return the import path of each function that a trainer got, by its id."""
        found = {
            name: f for name, f in exported(arguments).items()
            if callable(f) and not hasattr(f, "parameters") and not isinstance(f, Stand)
        }  # fmt: skip
        own = {name: self._own_path(f) for name, f in found.items()}
        self.trust = sorted(
            {path.partition(":")[0].partition(".")[0] for path in own.values() if path}
        )
        if not all(own.values()):
            module = f"{self._out.stem.replace('-', '_')}_trl"
            module += f"_{number + 1}" if number else ""
            self._write(self._out.with_name(f"{module}.py"), number, list(found))
            own = {name: f"{module}:{name}" for name in found}
            self.trust = [module]
        return {id(f): str(own[name]) for name, f in found.items()}

    def _own_path(self, function: Any) -> str | None:
        """Return the path under which a function can be imported, or None."""
        if not (inspect.isfunction(function) or inspect.isclass(function)):
            return None
        name, module = function.__qualname__, str(function.__module__)
        if not name.isidentifier():
            return None
        if module != "__main__":
            there = getattr(sys.modules.get(module), name, None)
            return f"{module}:{name}" if there is function else None
        imported = self._imported()
        there = getattr(imported, name, None)
        if there is None or self._script.parent != self._out.resolve().parent:
            return None
        for used in names_in_source(function):
            mine, theirs = self._namespace.get(used), getattr(imported, used, None)
            differs = isinstance(mine, PLAIN) and mine != theirs
            if used in self._namespace and (not hasattr(imported, used) or differs):
                return None
        return f"{self._script.stem}:{name}"

    def _imported(self) -> Any:
        """Import the script as a module, with recorders; None if it trains or fails."""
        if self._module is None and self._script.stem.isidentifier():
            try:
                self._module = _import_alone(self._script)
            except BaseException:  # a script may do anything while it is imported
                self._module = False
        return self._module or None

    def _write(self, file: Path, number: int, names: Sequence[str]) -> None:
        try:
            script = (
                f'str(Path(__file__).parent / "{self._script.relative_to(file.parent.resolve())}")'
            )
        except ValueError:
            script = repr(str(self._script))
        text = (
            f'"""The functions of {self._script.name}: importing this module runs the script up to '
            'its training."""\n\nfrom pathlib import Path\n\n'
            "from covey.compat.trl_script import passed\n\n"
            f"# Names: {', '.join(names)}\n"
            f"passed({script}, {self._arguments!r}, {number}, __name__)\n"
        )
        file.write_text(text, encoding="utf-8")


def _import_alone(script: Path) -> Any:
    # A script that reads the command line cannot be imported: the line is that of `covey train`.
    command = mock.patch.object(sys, "argv", ["covey", "train", f"{script.stem}.toml"])
    silent = io.StringIO()
    with (
        recorders(Recorder(alone=True)),
        command,
        redirect_stdout(silent),
        redirect_stderr(silent),
    ):
        spec = importlib.util.spec_from_file_location(script.stem, script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(script.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(script.parent))
    return module


def ported(given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Ported:
    """Convert GRPOConfig options, given by name, to settings of Covey.

    `defaults` are those of the installed version of TRL; None means those of `VERSION`. Raise
    ConfigError for an option that changes what is trained, and that Covey lacks.
    """
    given = {RENAMED.get(k, k): _plain(v) for k, v in given.items()}
    installed = {k: _plain(v) for k, v in (defaults or {}).items() if k in DEFAULTS}
    options = {**DEFAULTS, **installed, **given}
    if defaults and "use_bias_correction_kl" not in {**defaults, **given}:
        options["use_bias_correction_kl"] = False  # a version without this option
    for name, why in STOPS.items():
        if name in given and given[name] is not None and given[name] not in HARMLESS.get(name, ()):
            raise _lacks(name, given[name], why)
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
                raise _lacks(name, value, f"{key} has no such value")
        elif name in NAMED:
            if given.get(name) not in (None, False, "", [], {}):  # parsers pass all options
                notes.append(f"{name} = {value!r}: {NAMED[name]}")
        elif name not in HANDLED and name not in STOPS:
            raise _lacks(name, value, "it is no option of GRPOConfig that Covey knows")
    named = {key for name in given for key in (*DIRECT.get(name, ())[:1], *HANDLED.get(name, ()))}
    return Ported(
        settings=dict(sorted(settings.items())),
        notes=(*notes, *_remarks(options), *_differences(given)),
        given=frozenset(named | FROM_PYTHON.keys()),
    )


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _objective(options: Mapping[str, Any]) -> Settings:
    loss, scale = options["loss_type"], options["scale_rewards"]
    level = options["importance_sampling_level"]
    if loss not in PIECES:
        raise _lacks("loss_type", loss, f"Covey ports {', '.join(PIECES)}")
    ratio, surrogate, weights = PIECES[loss]
    if level == "sequence":
        ratio = "sequence"
    scale = {True: "group", False: "none"}.get(scale, scale)
    advantage = {"group": "standardized", "none": "centered", "batch": "batch_standardized"}[scale]
    if options.get("multi_objective_aggregation") == "normalize_then_sum":
        advantage = "parts_standardized"
    pieces = (advantage, ratio, surrogate, weights)
    name = NAMES.get(pieces, "composed")
    found: Settings = {"objective.name": name, "objective.beta": options["beta"]}
    if name == "composed":
        keys = ("advantage", "ratio", "surrogate", "weights")
        found |= {f"objective.{key}": piece for key, piece in zip(keys, pieces, strict=True)}
    if advantage == "parts_standardized":
        weighted = options.get("reward_weights")
        found |= {"objective.part_weights": [float(w) for w in weighted]} if weighted else {}
    if options["beta"] and options["use_bias_correction_kl"]:
        found["objective.kl"] = "ratio_k3"
    high = options["epsilon_high"]
    if surrogate == "clipped":
        found["objective.clip_low"] = options["epsilon"]
        found["objective.clip_high"] = options["epsilon"] if high is None else high
        if options.get("delta") is not None:
            if ratio != "token":
                raise _lacks("delta", options["delta"], "it bounds ratios of tokens only")
            found["objective.dual"] = options["delta"]
    if surrogate == "truncated_weight":
        found["objective.max_weight"] = high or 5.0
    for name, key in OBJECTIVE.get(loss, {}).items():
        if options.get(name) is not None:
            found[key] = options[name]
    if options.get("top_entropy_quantile", 1.0) < 1.0:
        found["objective.top_entropy"] = options["top_entropy_quantile"]
    if options.get("sync_ref_model"):
        found["reference.kind"] = "moving"
    return found


def _batch(options: Mapping[str, Any]) -> Settings:
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
    if options.get("vllm_importance_sampling_correction", True):
        high = options.get("vllm_importance_sampling_clip_max", 3.0)
        found["objective.correction"] = options.get(
            "vllm_importance_sampling_mode", "sequence_mask"
        )
        found["objective.correction_high"] = 1e9 if high is None else float(high)
        if (low := options.get("vllm_importance_sampling_clip_min")) is not None:
            found["objective.correction_low"] = float(low)
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
    found = []
    for name in OLDER:
        if name in options:
            found.append(f"{name} = {options[name]!r}: an option of TRL before {VERSION}; ported")
    names = options.get("report_to") or ()
    for name in [names] if isinstance(names, str) else names:
        if name not in ("none", "all", *TRACKERS):
            found.append(f"report_to = {name!r}: trackers has {', '.join(TRACKERS)}")
    return found


def _differences(given: Mapping[str, Any]) -> list[str]:
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
