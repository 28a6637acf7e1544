"""The Python API: train, evaluate and compare from a script or a notebook.

    result = covey.train(dataset=rows, rewards=[correct, short], **{"train.steps": 10})

Every function takes a configuration. Keyword arguments with dotted keys override settings of the
configuration, as on the command line. Errors are `CoveyError`s. Ctrl-C saves a checkpoint, and the
run can be resumed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.config import Config, parse_config, toml_value
from covey.config.load import overridden, read_settings
from covey.errors import ConfigError
from covey.run.best import best_checkpoint
from covey.run.folder import RunFolder, check_new_run, next_run_path
from covey.run.resume import Start, start_of
from covey.run.trackers import Tracker
from covey.stopping import StopSignal, stop_signal
from covey.training.passed_objects import check_evaluated, check_resumed, model_name

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation
    from covey.rewards import Reward
    from covey.tasks.dataset import DatasetTask
    from covey.training.build import Parts
    from covey.training.parallel.world import World

Source = Config | Mapping[str, Any] | str | Path | None
"""The configuration of a call: a Config, a dict of settings, a TOML file, a recipe's name, or None
for the default."""
Dataset = Iterable[Mapping[str, Any]] | str | Path
Callback = Callable[[Mapping[str, Any]], str | None]
"""A function that gets the metrics of every training step. If a callback returns a text, the run
ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a training run."""

    folder: Path
    """The run folder."""
    step: int
    """The last saved training step."""
    metrics: list[dict[str, Any]]
    """The metrics of every step."""
    evaluation: dict[str, Any] | None
    """The last evaluation; None if the run had no evaluation."""
    model: Any
    """The trained transformers model, or a peft model if it has an adapter."""
    tokenizer: Any
    interrupted: bool
    """Whether a signal ended the run early; `covey.train(resume=folder)` resumes the run."""
    stopped: str | None = None
    """Why a health check, train.patience or a callback stopped the run early; None otherwise."""
    best: Path | None = None
    """The checkpoint with the best value of the metric that `save.best` names."""


class _Callbacks(Tracker):
    """Calls the user's callbacks with the metrics of each step. Each callback may end the run."""

    def __init__(self, functions: Sequence[Callback], stop: StopSignal) -> None:
        self.functions = functions
        self.stop = stop

    def step(self, metrics: Mapping[str, Any]) -> None:
        for function in self.functions:
            why = function(metrics)
            if isinstance(why, str):
                self.stop.ask(why)


def load_config(source: Source = None, **overrides: Any) -> Config:
    """Return a validated configuration; keyword arguments override settings by dotted key."""
    if isinstance(source, Config):
        settings: dict[str, Any] = source.model_dump()
    elif isinstance(source, Mapping):
        settings = dict(source)
    else:
        settings = {} if source is None else read_settings(str(source))
    return parse_config(overridden(settings, _settings(overrides)))


def _settings(overrides: Mapping[str, Any]) -> list[str]:
    return [f"{key}={toml_value(value)}" for key, value in overrides.items()]


def train(
    config: Source = None,
    *,
    model: str | Path | None = None,
    dataset: Dataset | None = None,
    held_out: Dataset | None = None,
    rewards: Any = None,
    environment: Any = None,
    trackers: Sequence[Tracker | str] | None = None,
    callbacks: Sequence[Callback] = (),
    run: str | Path | None = None,
    resume: str | Path | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> TrainResult:
    """Train a model, and return its metrics, its evaluation and the trained model itself.

    Args:
        config: a `Config`, dict, file or recipe. Default: the recipe `arithmetic` if no dataset.
        model: a folder, a hub name, a GGUF file, "smollm2" or "embedded".
        dataset: a list of dicts, a `datasets.Dataset` or a JSON Lines file, with `prompt` (text or
            messages), optionally `target`, and columns that reward functions get by name.
        held_out: rows for evaluations. Default: a tenth of the dataset. []: no evaluations.
        rewards: TRL-style functions, `f(completions, **columns)`: one, a list (summed), or a dict
            that maps functions to weights; or a reward object.
        environment: an environment class, with Covey's protocol or in TRL's style.
        trackers: names, such as "wandb", and objects. Without objects: the console, unless `quiet`.
        callbacks: called with the metrics of each step; a returned text ends the run.
        run: the run folder to create. Default: the next free `runs/NAME-N`.
        resume: a run folder to resume with its own settings and `overrides`; pass dataset and
            rewards again.
        quiet: print nothing. **overrides: settings by dotted key.
    """
    task, reward = _objects(dataset, held_out, rewards)
    shown, named = _split(trackers)
    overrides = {**_unmeasured(task), **overrides, **named}
    names = {"task": task, "reward": reward, "environment": _factory(environment)}
    passed = {where for where, value in names.items() if value is not None}
    if resume is not None:
        if any(given is not None for given in (config, model, run)):
            raise ConfigError("resume=RUN uses the run's settings; leave out config, model and run")
        folder = RunFolder.open(Path(resume))
        check_resumed(folder, passed, reward)
        return _train(overrides, folder, names, shown, callbacks, quiet)
    if run is not None:
        check_new_run(Path(run), f"pass another run=..., or resume={str(run)!r}")
    source = "arithmetic" if config is None and dataset is None else config
    chosen = _with_objects(source, passed, model, overrides)
    return _train(chosen, None if run is None else Path(run), names, shown, callbacks, quiet)


def evaluate(
    model: str | Path,
    config: Source = None,
    *,
    dataset: Dataset | None = None,
    rewards: Any = None,
    samples: int = 0,
    **overrides: Any,
) -> Evaluation:
    """Evaluate a model on held-out prompts: greedy accuracy and, with `samples`, pass@k.

    With a dataset, all of its rows are evaluated. If `model` is a run folder, its newest checkpoint
    is evaluated, by default with the run's own settings.
    """
    from covey.training.model_evaluation import evaluate_model
    from covey.training.resolve import resolve

    model, source = _evaluated(model_name(model), config)
    task, reward = _objects(dataset, dataset, rewards)
    passed = {where for where, value in {"task": task, "reward": reward}.items() if value}
    source = "arithmetic" if source is None and dataset is None else source
    settings = {**overrides, "evaluate.samples": samples}
    unresolved = _with_objects(source, passed, model, settings)
    check_evaluated(unresolved, passed)
    chosen = resolve(unresolved, passed=passed)
    return evaluate_model(chosen, task, reward)


def _evaluated(model: str, config: Source) -> tuple[str, Source]:
    """Return the path of the model to evaluate, and the configuration to use.

    For a run folder, return its newest checkpoint and, by default, the run's settings. If `model`
    is the path of a checkpoint, the settings of its run are not used.
    """
    from covey.cli.checkpoint_choice import run_around, weights_of

    folder = Path(model)
    if run_around(folder) != folder:
        return model, config
    chosen = str(weights_of(folder, "covey.evaluate('{}', ...)"))
    return chosen, folder / "config.toml" if config is None else config


def compare(
    config: str | Path = "arithmetic",
    *,
    algorithms: Sequence[str] = (),
    arms: Sequence[str] = (),
    seeds: int = 3,
    folder: str | Path | None = None,
    parallel: int | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Train the arms of a comparison under equal conditions, and return the report as plain data.

    The comparison's folder (`report["folder"]`) also contains the report as a page and tables.
    """
    from covey.cli.main import run as run_command

    words = ["compare", str(config), "--seeds", str(seeds)]
    words += ["--algorithms", ",".join(algorithms)] if algorithms else []
    words += [word for arm in arms for word in ("--arm", arm)]
    words += ["--parallel", str(parallel)] if parallel else []
    for key, value in overrides.items():
        words += ["--set", f"{key}={toml_value(value)}"]
    parent = Path("comparisons")
    where = Path(folder) if folder is not None else next_run_path(parent, Path(str(config)).stem)
    code = run_command([*words, "--folder", str(where)])
    if not (where / "report.json").is_file():
        raise ConfigError(
            f"compare: the comparison failed with exit code {code}; the printed output gives the "
            "reason"
        )
    report: dict[str, Any] = json.loads((where / "report.json").read_text(encoding="utf-8"))
    return {**report, "folder": str(where)}


def _split(
    trackers: Sequence[Tracker | str] | None,
) -> tuple[list[Tracker] | None, dict[str, list[str]]]:
    """Split `trackers` into tracker objects and a setting that lists tracker names.

    None in place of the tracker objects means the console. Tracker names replace the trackers in
    the settings, and an empty list removes all trackers. If only tracker objects are passed, the
    trackers in the settings stay.
    """
    named = [tracker for tracker in trackers or () if isinstance(tracker, str)]
    sinks = [tracker for tracker in trackers or () if not isinstance(tracker, str)]
    shown = None if trackers is None or (named and not sinks) else sinks
    return shown, {} if trackers is None or (sinks and not named) else {"trackers": named}


def _objects(
    dataset: Dataset | None, held_out: Dataset | None, rewards: Any
) -> tuple[DatasetTask | None, Reward | None]:
    """Make a task from the passed dataset, and a reward from the passed functions."""
    from covey.rewards.user import function_reward
    from covey.tasks.dataset import dataset_task

    task = None if dataset is None else dataset_task(dataset, held_out)
    if rewards is None:
        return task, None
    return task, function_reward(rewards, conversational=bool(task and task.conversational))


def _unmeasured(task: DatasetTask | None) -> dict[str, int]:
    """If `held_out` is empty, return the setting that turns evaluations off."""
    return {"evaluate.every": 0} if task and task.evaluation == [] else {}


def _factory(environment: Any) -> Any:
    from covey.environments import environment_factory

    return None if environment is None else environment_factory(environment)


def _with_objects(
    source: Source, passed: set[str], model: str | Path | None, overrides: Mapping[str, Any]
) -> Config:
    """Return the configuration, with placeholder names for objects passed from Python."""
    from covey.environments.registry import PASSED
    from covey.rewards.user import FUNCTIONS
    from covey.tasks.dataset import NAME as DATASET
    from covey.tasks.dataset import SHARE

    names = {"task": DATASET, "reward": FUNCTIONS, "environment": PASSED}
    given = {f"{where}.name": names[where] for where in sorted(passed)}
    if model is not None:
        given["model.path"] = model_name(model)
    config = load_config(source, **{**given, **overrides})
    if "task" in passed and not config.evaluate.every and SHARE not in config.task.options:
        # In the settings, so that a resumed run has the same prompts even if it evaluates.
        return load_config(config, **{f"task.{SHARE}": 0.0})
    return config


def _train(
    source: Config | Mapping[str, Any],
    target: RunFolder | Path | None,
    objects: Mapping[str, Any],
    trackers: Sequence[Tracker] | None,
    callbacks: Sequence[Callback],
    quiet: bool,
) -> TrainResult:
    from covey.tasks.dataset import with_share
    from covey.training.build import assemble
    from covey.training.loop import train as run_loop
    from covey.training.parallel.join import joined_world
    from covey.training.resolve import resolve
    from covey.training.run_start import check_length, locked_by_main, record_changes
    from covey.training.run_start import resumed_config as resumed

    passed = {where for where, value in objects.items() if value is not None}
    if isinstance(target, RunFolder):
        assert isinstance(source, Mapping), "a run that is resumed takes overrides"
        config, changed = resumed(target, _settings(source), passed=passed)
    else:
        config, changed = resolve(load_config(source), passed=passed), {}
    with joined_world(config) as world:
        task = with_share(objects["task"], config.task.options)
        parts = assemble(config, objects["reward"], task, world, objects["environment"])
        with closing(parts):
            folder, begins = _folder(parts, target)
            with locked_by_main(folder, world), _signals() as stop:
                start = Start() if begins else _start_of(folder, config, world)
                check_length(config, start.step)
                if world.is_main:
                    record_changes(folder, parts.config, start.step, changed)
                shown = _shown(folder, trackers, quiet or not world.is_main, parts, start)
                follow = [*shown, _Callbacks(callbacks, stop)]
                done = run_loop(parts, folder, follow, stop, start)
    evaluations = folder.evaluations()
    return TrainResult(
        folder=folder.path,
        step=done,
        metrics=folder.steps(),
        evaluation=evaluations[-1] if evaluations else None,
        model=parts.policy.model.model,
        tokenizer=parts.policy.model.tokenizer,
        interrupted=stop.by_signal,
        stopped=None if stop.by_signal else stop.received,
        best=best_checkpoint(folder),
    )


def _folder(parts: Parts, target: RunFolder | Path | None) -> tuple[RunFolder, bool]:
    """Return the run folder, and whether this call created it."""
    from covey.training.run_start import created_run

    if isinstance(target, RunFolder):
        return target, False
    config = parts.config
    name = f"{config.task.name}-{config.objective.name}".replace(":", ".")
    about = {"reference": parts.learner.reference.identity if parts.learner.reference else None}
    return created_run(parts, target or next_run_path(Path("runs"), name), about), True


def _start_of(folder: RunFolder, config: Config, world: World) -> Start:
    return world.from_main(lambda: start_of(folder, save_every=config.save.every))


def _shown(
    folder: RunFolder,
    trackers: Sequence[Tracker] | None,
    quiet: bool,
    parts: Parts,
    start: Start,
) -> list[Tracker]:
    """Return the given trackers; by default, create a console and print startup notes on it."""
    if trackers is not None or quiet:
        return list(trackers or ())
    from covey.cli.screen import Screen
    from covey.cli.startup import tell_notes, tell_start
    from covey.run.trackers.console import console_tracker

    console = console_tracker(folder, Screen(soft_wrap=True))
    tell_notes(console, folder, parts)
    tell_start(console, parts, new=start.checkpoint is None)
    return [console]


def _signals() -> Any:
    """Save a checkpoint on Ctrl-C; this works only in the main thread."""
    if threading.current_thread() is threading.main_thread():
        return stop_signal()
    return nullcontext(StopSignal())
