"""Runs a TRL script with recorders in the place of TRL's trainer and configuration.

The script runs as it is, with its own argument parser, configuration files and loops. Its trainer
records what it was given, and trains nothing. Datasets that the script only passes on, and models,
are not loaded. `covey port trl` runs this module in a process of its own; the module that a port
writes for functions inside functions calls `passed`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from covey.compat.trl_options import LAUNCH, RENAMED, TRAINER_RENAMED
from covey.errors import ConfigError, CoveyError, nearest

ENDED = 3
"""The exit code of this module for an error that it has reported."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Training:
    """What a script passed to the trainer whose `train` it called."""

    given: dict[str, Any]
    """The options of the configuration that the script has set."""
    defaults: dict[str, Any]
    """The defaults of all options in the installed version of TRL."""
    arguments: dict[str, Any]
    """The arguments of the trainer, by name."""
    notes: list[str]


class _Found(BaseException):
    """Ends the script after the training that was asked for."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Recorder:
    """Collects the trainings of a script."""

    alone: bool = False
    """Whether the script may use nothing that is replaced, because it will be imported without
    recorders."""
    last: int | None = None
    """The index of the training after which the script ends; None lets it run to its end."""
    trainings: list[Training] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    made: int = 0
    namespace: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The global names of the script."""

    def check_alone(self) -> None:
        """End a script that uses something that is replaced although it may not."""
        if self.alone:
            raise _Found

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def train(self, config: Any, arguments: dict[str, Any]) -> None:
        given, defaults = _options(config)
        self.trainings.append(
            Training(given=given, defaults=defaults, arguments=arguments, notes=self.notes[:])
        )
        if len(self.trainings) - 1 == self.last:
            raise _Found


class Stand:
    """Stands in for a model or another object that a port does not need, and notes what is called.

    Every attribute is another stand-in, which may be called.
    """

    def __init__(self, name: str, recorder: Recorder, origin: Any = None) -> None:
        self.__dict__.update(_name=name, _recorder=recorder, origin=origin)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stand(f"{self._name}.{name}", self._recorder, self.origin)

    def __setattr__(self, name: str, value: Any) -> None:
        self._recorder.note(f"{self._name}.{name} = {value!r:.60}: not ported")

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Note the call, and return this stand-in again."""
        self._recorder.note(f"{self._name}(...): not ported")
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __format__(self, form: str) -> str:
        return str(self._name)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class LazyData:
    """A dataset that is loaded only if the script uses it in another way than to pass it on."""

    def __init__(self, load: Callable[[], Any], origin: Mapping[str, str]) -> None:
        self._load, self.origin, self._loaded = load, origin, None

    def loaded(self) -> Any:
        if self._loaded is None:
            try:
                self._loaded = self._load()
            except Exception as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise ConfigError(
                    f"port: the script uses the rows of the dataset {self.origin['path']!r}, which "
                    f"cannot be loaded: {why}; download the dataset first, or pass the path of a "
                    "local copy"
                ) from None
        return self._loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaded(), name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and self._loaded is None and "split" not in self.origin:
            origin = {**self.origin, "split": key}
            return LazyData(lambda: self.loaded()[key], origin)
        return self.loaded()[key]

    def __len__(self) -> int:
        return len(self.loaded())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loaded())


def _load_dataset(real: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return a `load_dataset` that loads a named dataset of the Hub only when it is used."""

    def load_dataset(path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
        def load() -> Any:
            return real(path, name, *args, **options)

        recorder.check_alone()
        split, revision = options.get("split"), options.get("revision")
        plain = {k for k, v in options.items() if v not in (None, False)} <= {"split", "revision"}
        named = split is None or (isinstance(split, str) and split.replace("_", "").isalnum())
        if args or not plain or not named:
            return load()
        texts = {"path": path, "subset": name, "split": split, "revision": revision}
        origin = {key: str(value) for key, value in texts.items() if value}
        return LazyData(load, origin)

    return load_dataset


def _config_class(real: Any, recorder: Recorder) -> Any:
    """Return TRL's GRPOConfig with the old names of options, which remembers what is set."""
    known = {f.name: f for f in dataclasses.fields(real) if f.init}
    hints = typing.get_type_hints(real)
    old = {name: new for name, new in RENAMED.items() if name not in known}
    fields = [
        (name, hints[new] | None, dataclasses.field(default=None)) for name, new in old.items()
    ]
    base: Any = dataclasses.make_dataclass(real.__name__, fields, bases=(real,))

    class GRPOConfig(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            recorder.check_alone()
            for name in options:
                if name not in known and name not in old:
                    raise ConfigError(
                        f"port: GRPOConfig has no option {name!r} in the installed version of TRL, "
                        f"and Covey knows no newer name of it{nearest(name, known)}; leave it out"
                    )
            own = dict(zip(known, args, strict=False)) | options
            for name, new in old.items():
                if (value := own.pop(name, None)) is not None:
                    if own.get(new, known[new].default) not in (known[new].default, value):
                        raise ConfigError(f"port: GRPOConfig has both {name} and {new}; keep one")
                    own[new] = value
            given = {k: v for k, v in own.items() if not _is_default(known[k], v)}
            # How the script is launched does not matter here, and may need other devices.
            super().__init__(**{k: v for k, v in own.items() if k not in LAUNCH or k not in given})
            for name in LAUNCH & given.keys():
                setattr(self, name, given[name])
            self._given = given
            self._made = {name: getattr(self, name, None) for name in known}

    GRPOConfig.__module__, GRPOConfig.__qualname__ = real.__module__, real.__qualname__
    return GRPOConfig


def _is_default(option: dataclasses.Field[Any], value: Any) -> bool:
    if option.default_factory is not dataclasses.MISSING:
        return bool(value == option.default_factory())
    return value is option.default or (
        type(value) is type(option.default) and bool(value == option.default)
    )


def _options(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that a script has set, and the defaults of all options."""
    fields = [f for f in dataclasses.fields(config) if f.init and f.name not in RENAMED]
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    if not hasattr(config, "_given"):
        given = {f.name: getattr(config, f.name) for f in fields}
        return {
            f.name: given[f.name] for f in fields if not _is_default(f, given[f.name])
        }, defaults
    now = {name: getattr(config, name) for name in config._made}
    set_later = {name: value for name, value in now.items() if value != config._made[name]}
    return {**config._given, **set_later}, defaults


def _trainer_class(real: Any, config_class: Any, recorder: Recorder) -> Any:
    signature = inspect.signature(real.__init__)

    class GRPOTrainer:
        def __init__(self, *args: Any, **options: Any) -> None:
            recorder.check_alone()
            recorder.made += 1
            own = [n for kind in type(self).__mro__ if issubclass(kind, GRPOTrainer)
                   and kind is not GRPOTrainer for n in vars(kind)
                   if n != "__init__" and hasattr(real, n) and not n.startswith("__")]  # fmt: skip
            if own:
                raise ConfigError(
                    f"port: {type(self).__name__} overrides {', '.join(sorted(own))} of TRL's "
                    "GRPOTrainer, and Covey cannot run code of another trainer"
                )
            options = {TRAINER_RENAMED.get(name, name): value for name, value in options.items()}
            try:
                bound = signature.bind(self, *args, **options).arguments
            except TypeError as error:
                raise ConfigError(f"port: GRPOTrainer: {error}") from None
            given = {name: v for name, v in bound.items() if name != "self" and v is not None}
            self.args = given.pop("args", None) or config_class(output_dir="trl")
            self._given = given

        def train(self, *args: Any, **options: Any) -> Any:
            checkpoint = [*args, *options.values()]
            if checkpoint and checkpoint[0]:
                recorder.note(
                    f"train: resume_from_checkpoint = {checkpoint[0]!r}: use covey train --resume"
                )
            recorder.train(self.args, self._given)
            return Stand("trainer.train()", recorder)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Stand(f"trainer.{name}", Recorder())  # what follows the training is not ported

    GRPOTrainer.__name__ = GRPOTrainer.__qualname__ = real.__name__
    return GRPOTrainer


@contextmanager
def recorders(recorder: Recorder) -> Iterator[None]:
    """Replace TRL's trainer and configuration, and functions that load models and datasets."""
    try:
        import datasets
        import transformers
        import trl
        from trl.trainer import grpo_config, grpo_trainer
    except ImportError as error:
        raise ConfigError(
            f"port: running a TRL script needs TRL: {error}; pip install trl"
        ) from None
    config = _config_class(trl.GRPOConfig, recorder)
    trainer = _trainer_class(trl.GRPOTrainer, config, recorder)
    parse = trl.TrlParser.parse_args_and_config

    def parsed(self: Any, *args: Any, **options: Any) -> Any:
        # TRL's own script ignores unknown options of a configuration file.
        return parse(self, *args, **{**options, "fail_with_unknown_args": True})

    def from_pretrained(path: Any, *args: Any, **options: Any) -> Any:
        recorder.check_alone()
        for name, value in options.items():
            if name in ("dtype", "torch_dtype", "quantization_config", "revision"):
                recorder.note(f"from_pretrained: {name} = {value!r:.60}: set model.dtype, or save "
                              "the model with it and name the folder as model.path")  # fmt: skip
        return Stand("model", recorder, {"path": os.fspath(path)})

    def get_peft_model(model: Any, peft_config: Any, *args: Any, **options: Any) -> Any:
        origin = {**getattr(model, "origin", {}), "peft_config": peft_config}
        return Stand("model", recorder, origin)

    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for module in (trl, trl.trainer, grpo_config, grpo_trainer):
            put(module, "GRPOConfig", config)
        for module in (trl, trl.trainer, grpo_trainer):
            put(module, "GRPOTrainer", trainer)
        put(trl.TrlParser, "parse_args_and_config", parsed)
        put(datasets, "load_dataset", _load_dataset(datasets.load_dataset, recorder))
        put(transformers.PreTrainedModel, "from_pretrained", staticmethod(from_pretrained))
        for name in dir(transformers):
            if name.startswith("AutoModel"):
                put(getattr(transformers, name), "from_pretrained", staticmethod(from_pretrained))
        # A machine without a GPU ports the script of a machine with one.
        put(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
        try:
            peft = importlib.import_module("peft")
        except ImportError:
            pass
        else:
            put(peft, "get_peft_model", get_peft_model)
        stack.enter_context(mock.patch.dict(os.environ, WANDB_MODE="disabled"))
        yield


def record(script: Path, arguments: Sequence[str], last: int | None = None) -> Recorder:
    """Run a script with recorders, and return what it passed to its trainers."""
    recorder = Recorder(last=last)
    with recorders(recorder), ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [str(script), *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(script.parent), *sys.path]))
        # Functions keep the names of the script: a namespace that outlives the run.
        module = types.ModuleType("__main__")
        module.__file__ = str(script)
        # Only this entry is restored: the modules that the script imports stay imported.
        stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        sys.modules["__main__"] = module
        recorder.namespace = vars(module)
        try:
            code = compile(script.read_text(encoding="utf-8"), str(script), "exec")
            exec(code, recorder.namespace)
        except _Found:
            pass
        except CoveyError:
            raise
        except SystemExit as error:
            if not recorder.trainings:
                raise ConfigError(f"port: {script} ended with exit({error.code!r})") from None
        except ImportError as error:
            if not recorder.trainings:
                raise ConfigError(f"port: {script} needs a package: {error}") from None
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if not recorder.trainings:
                raise ConfigError(
                    f"port: {script} failed: {what}{_where(error, script)}"
                ) from error
            recorder.note(f"after train(), the script ended with {what}; trainings that would have "
                          "followed are not ported")  # fmt: skip
    if not recorder.trainings:
        what = "trains no GRPOTrainer" if recorder.made else "creates no GRPOTrainer"
        raise ConfigError(f"port: {script} {what}, so there is nothing to convert")
    return recorder


def _where(error: BaseException, script: Path) -> str:
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(script):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def passed(script: str, arguments: Sequence[str], training: int, module: str) -> None:
    """Run a script up to one of its trainings, and name its functions in a module.

    The module that `covey port trl` writes calls this function with its own name. Afterwards, the
    module has the script's reward functions, tools and environment, under their exported names.
    """
    found = record(Path(script), arguments, training).trainings[-1]
    for name, function in exported(found.arguments).items():
        inner = getattr(function, "func", function)
        for each in {id(function): function, id(inner): inner}.values():
            if getattr(each, "__module__", "") == "__main__":
                each.__module__ = module
        if inspect.isfunction(function) or inspect.isclass(function):
            function.__qualname__, function.__module__ = name, module
        setattr(sys.modules[module], name, function)


def listed(value: Any) -> list[Any]:
    """Return an argument that may be one object or a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def exported(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions that a trainer got, by names that differ."""
    groups = {
        "reward": listed(arguments.get("reward_funcs")),
        "tool": listed(arguments.get("tools")),
        "environment": listed(arguments.get("environment_factory")),
    }
    found: dict[str, Any] = {}
    for kind, functions in groups.items():
        for number, function in enumerate(functions, 1):
            name = str(getattr(function, "__name__", ""))
            free = name.isidentifier() and name not in found
            found[name if free else f"{kind}_{number}"] = function
    return found


def main() -> None:
    """Port the script that the arguments name, and write the result as JSON."""
    from covey.compat.trl import ported_script

    result, script, out, *arguments = sys.argv[1:]
    try:
        files = ported_script(Path(script), Path(out), arguments)
    except CoveyError as error:
        Path(result).write_text(json.dumps({"error": str(error)}), encoding="utf-8")
        sys.exit(ENDED)
    Path(result).write_text(json.dumps({"files": files}), encoding="utf-8")


if __name__ == "__main__":
    main()
