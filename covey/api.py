"""The Python API: train, evaluate and compare from a script or a notebook.

    result = covey.train(dataset=rows, rewards=[correct, short], **{"train.steps": 10})

Every function takes a configuration. Keyword arguments with dotted keys override settings of the
configuration, as on the command line. Every error that a user can fix is a `CoveyError`. Ctrl-C
makes the run save a checkpoint and raises KeyboardInterrupt; the run can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey import notices
from covey.config import Config, parse_config, plain_value, toml_value
from covey.config.load import overridden, read_settings
from covey.errors import ConfigError
from covey.evaluation.items import PART
from covey.models.model_path import check_model_path
from covey.notebook import html_table, short_repr
from covey.passed_objects import (
    OBJECTS,
    check_evaluated,
    check_resumed,
    check_scored,
    check_types,
    model_name,
)
from covey.records.folder import RunFolder, check_new_run
from covey.records.metric_registry import estimate_text
from covey.records.trackers import Tracker
from covey.records.watch import best_checkpoint
from covey.screen import Screen
from covey.stopping import StopSignal
from covey.trust import scoped_trust

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation
    from covey.lab.compare.design import Request
    from covey.parallel.world import World
    from covey.run import Run

Source = Config | Mapping[str, Any] | str | Path | None
"""The `config` argument: a Config, a dict of settings, a TOML file, the name of a recipe, or None
for the default configuration."""
Dataset = Iterable[Mapping[str, Any]] | str | Path
Callback = Callable[[Mapping[str, Any]], str | None]
"""A function that gets the metrics of every training step. The run ends if this callback returns a
string."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
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
    """The trained transformers model, or a peft model if the run trained an adapter."""
    tokenizer: Any
    stopped: str | None = None
    """Reason why a health check, `train.patience` or a callback stopped the run early; None for any
    other run."""
    best: Path | None = None
    """The checkpoint with the best value of the metric in `save.best`."""

    def __repr__(self) -> str:
        return short_repr("TrainResult", self._summary())

    def _repr_html_(self) -> str:
        return html_table("TrainResult", self._summary())

    def _summary(self) -> dict[str, object]:
        """Return the values that a notebook shows; the metrics and the model are not among them."""
        found: dict[str, object] = {"folder": str(self.folder), "step": self.step}
        last = self.metrics[-1] if self.metrics else {}
        for name, key in (
            ("last_reward", "objective/scores"),
            ("last_success", "objective/verifiable_correct_rate"),
        ):
            if isinstance(last.get(key), int | float):
                found[name] = f"{last[key]:.3f}"
        for name, cell in (self.evaluation or {}).items():
            shown = isinstance(cell, Mapping) and {"value", "low", "high"} <= cell.keys()
            if shown and not name.startswith(PART):
                found[name] = estimate_text(name, cell)
        found |= {} if self.stopped is None else {"stopped": self.stopped}
        return found | ({} if self.best is None else {"best": str(self.best)})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompareResult:
    """The result of a comparison."""

    folder: Path
    """The comparison's folder, which also contains the report as a web page and as tables."""
    report: dict[str, Any]
    """The content of report.json, as docs/compare-report.md describes it."""

    @property
    def failed(self) -> list[str]:
        """The failed runs, such as `grpo seed 0: killed`; the report does not compare them."""
        runs = [run for run in self.report["runs"] if run["state"] == "failed"]
        return [f"{run['arm']} seed {run['seed']}: {run['error']}" for run in runs]

    def __repr__(self) -> str:
        return short_repr("CompareResult", self._summary())

    def _repr_html_(self) -> str:
        return html_table("CompareResult", self._summary())

    def _summary(self) -> dict[str, object]:
        runs = self.report["runs"]
        arms = dict.fromkeys(str(run["arm"]) for run in runs)
        return {
            "folder": str(self.folder),
            "arms": ", ".join(arms),
            "runs": len(runs),
            "failed": len(self.failed),
        }


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
    check_types(config=source)
    if isinstance(source, Config):
        settings: dict[str, Any] = source.model_dump()
    elif isinstance(source, Mapping):
        settings = {str(key): plain_value(str(key), value) for key, value in source.items()}
    else:
        settings = {} if source is None else read_settings(str(source))
    return parse_config(overridden(settings, _settings(overrides), notices.notice))


def _settings(overrides: Mapping[str, Any]) -> list[str]:
    for key, value in overrides.items():
        if value is None:
            raise ConfigError(f"config: {key} must not be None; leave the setting out")
    plain = {key: plain_value(key, value) for key, value in overrides.items()}
    return [f"{key}={toml_value(value)}" for key, value in plain.items()]


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
    allow_changed_reward: bool = False,
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
        allow_changed_reward: resume although the code of the reward has changed.
        quiet: print nothing. **overrides: settings by dotted key.

    After Ctrl-C, the run saves its current step, `train` prints how to resume the run, and raises
    KeyboardInterrupt, so that the script does not go on with a model that is not finished. After
    SIGTERM, it raises SystemExit(143).
    """
    check_types(config=config, dataset=dataset, held_out=held_out, run=run, resume=resume)
    check_types(callbacks=callbacks, trackers=trackers)
    with notices.quiet(quiet):
        objects = _objects(dataset, held_out, rewards, environment)
        shown, named = _split(trackers)
        no_prompts = "task" in objects and objects["task"].evaluation == []
        overrides = {**({"evaluate.every": 0} if no_prompts else {}), **overrides, **named}
        if resume is not None:
            folder = _resumed(Path(resume), objects, config, model, run)
            allowed = allow_changed_reward
            return _train(overrides, folder, objects, shown, callbacks, quiet, allowed)
        if allow_changed_reward:
            raise ConfigError("allow_changed_reward needs resume=RUN; leave it out for a new run")
        if run is not None:
            check_new_run(Path(run), f"pass another run=..., or resume={str(run)!r}")
        source = "arithmetic" if config is None and dataset is None else config
        chosen = _with_objects(source, objects, model, overrides)
        return _train(chosen, None if run is None else Path(run), objects, shown, callbacks, quiet)


def evaluate(
    model: str | Path,
    config: Source = None,
    *,
    dataset: Dataset | None = None,
    rewards: Any = None,
    environment: Any = None,
    samples: int = 0,
    quiet: bool = False,
    **overrides: Any,
) -> Evaluation:
    """Evaluate a model on held-out prompts: greedy accuracy and, with `samples`, pass@k.

    Given a `dataset`, Covey evaluates the model on all rows of the dataset. The arguments
    `dataset`, `rewards` and `environment` have the same meaning as in `train`. If `model` is a run
    folder, Covey evaluates the newest checkpoint of the run, by default with the settings of the
    run. If `model` is the path of a checkpoint, Covey does not use the settings of the run. Without
    `quiet`, Covey prints notes about prompts that are too long.
    """
    from covey.config.resolve import resolve
    from covey.evaluation.of_model import evaluate_model
    from covey.records.resume import run_around, weights_of

    check_types(config=config, dataset=dataset, samples=samples)
    with notices.quiet(quiet):
        model, folder = model_name(model), Path(model_name(model))
        if run_around(folder) == folder:
            model = str(weights_of(folder, "covey.evaluate('{}', ...)"))
            config = folder / "config.toml" if config is None else config
        objects = _objects(dataset, dataset, rewards, environment)
        source = "arithmetic" if config is None and dataset is None else config
        settings = {**overrides, "evaluate.samples": samples}
        unresolved = _with_objects(source, objects, model, settings)
        check_evaluated(unresolved, objects)
        check_model_path(unresolved.model.path)  # before a dataset is loaded
        chosen = resolve(unresolved, passed=objects.keys())
        passed = (objects.get(where) for where, *_ in OBJECTS)
        evaluation = evaluate_model(chosen, *passed)
        check_scored(model, evaluation)
        return evaluation


def compare(
    config: str | Path | None = None,
    *,
    model: str | Path | None = None,
    dataset: Dataset | None = None,
    held_out: Dataset | None = None,
    rewards: Any = None,
    environment: Any = None,
    algorithms: Sequence[str] = (),
    arms: Sequence[str] = (),
    seeds: int = 3,
    folder: str | Path | None = None,
    parallel: int | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> CompareResult:
    """Train the arms of a comparison under equal conditions, and return the report.

    Args:
        config: the configuration that all arms share, a TOML file or a recipe. Default: the recipe
            `arithmetic` if no dataset.
        model: the model that all arms start from. Default: the model of the configuration.
        dataset, held_out, rewards, environment: as in `train`. Each run is a process of its own,
            which imports the functions: they must be defined at the top level of a module, or of a
            script whose own code is under `if __name__ == "__main__":`. The rows are saved in the
            folder `data` beside the folder of the comparison.
        algorithms: the names of algorithms; each is an arm.
        arms: arms with their own settings, such as "frozen: optimizer.learning_rate=0".
        seeds: the number of seeds; each arm trains one run per seed.
        folder: the folder of the comparison. Default: the next free `comparisons/NAME-N`, or the
            folder of an earlier comparison with the same arguments, which resumes.
        parallel: how many runs train at the same time. Default: one on a GPU; on a CPU, as many as
            its cores allow.
        quiet: print nothing. **overrides: settings of all arms, by dotted key.

    After Ctrl-C, each run saves its current step, and `compare` raises KeyboardInterrupt. To resume
    the comparison, call `compare` again with the same arguments.
    """
    from covey.lab.compare.design import PARENT, checked, prepare
    from covey.lab.compare.launch import run_comparison, show_design

    check_types(recipe=config, folder=folder, seeds=seeds, parallel=parallel)
    check_types(dataset=dataset, held_out=held_out)
    if parallel is not None and parallel < 1:
        raise ConfigError(f"parallel = {parallel} must be at least 1")
    settings = {} if model is None else {"model.path": model_name(model)}
    chosen = None if folder is None else Path(folder)
    with notices.quiet(quiet), scoped_trust(), _own_path():
        named = _by_name(dataset, held_out, rewards, environment, (chosen or PARENT / "_").parent)
        source = config or ("arithmetic" if dataset is None else "")
        given = {**settings, **named, **overrides}
        request = _request(source, given, algorithms, arms, seeds)
        console = Screen(soft_wrap=True, quiet=quiet)
        prepared = checked(prepare(request, chosen))
        show_design(prepared, console)
        if run_comparison(prepared, parallel, console).stopping:
            raise KeyboardInterrupt
    text = (prepared.folder / "report.json").read_text(encoding="utf-8")
    return CompareResult(folder=prepared.folder, report=json.loads(text))


def _by_name(
    dataset: Dataset | None, held_out: Dataset | None, rewards: Any, environment: Any, folder: Path
) -> dict[str, Any]:
    """Return settings that name the objects of `compare`, so that other processes find them.

    The modules of the functions are trusted, because the caller passed the functions.
    """
    from covey.environments.adapters import environment_factory
    from covey.rewards.user import function_reward, weighted
    from covey.trust import import_path, trust

    given: dict[str, Any] = {}
    if held_out is not None and dataset is None:
        raise ConfigError("held_out needs dataset=...; the task of a configuration has its own")
    if dataset is not None:
        given |= {"task.name": "jsonl", "task.optional_target": True}
        given["task.train_file"] = _saved_rows(dataset, folder / "data")
        if held_out is not None:
            given["task.held_out_file"] = _saved_rows(held_out, folder / "data")
    if rewards is not None:
        function_reward(rewards)  # raises an error for an object that is not a reward
        pairs = weighted(rewards)
        paths = [import_path(function, "rewards") for function, _ in pairs]
        given |= {"reward.name": "sum", "reward.functions": paths}
        given["reward.weights"] = [float(weight) for _, weight in pairs]
        trust(path.partition(":")[0] for path in paths)
    if environment is not None:
        environment_factory(environment)
        given["environment.name"] = import_path(environment, "environment")
        trust([given["environment.name"].partition(":")[0]])
    return given


def _saved_rows(rows: Dataset, folder: Path) -> str:
    """Save rows as a file whose name is their digest, and return its path."""
    from covey.tasks.rows import write_rows

    if isinstance(rows, str | Path):
        return str(rows)
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{uuid.uuid4().hex}.partial"
    write_rows(new, rows)
    digest = hashlib.sha256(new.read_bytes()).hexdigest()[:16]
    return str(new.rename(folder / f"{digest}.jsonl"))


COMPARING = "COVEY_COMPARING"
"""The environment variable that marks a comparison's process and the processes of its runs."""


@contextmanager
def _own_path() -> Iterator[None]:
    """Let processes that start in this context import modules from where this process does."""
    if os.environ.get(COMPARING):
        raise ConfigError(
            "compare: this script starts a comparison while a comparison imports it for its "
            "functions; put the call of covey.compare under `if __name__ == '__main__':`"
        )
    before = dict(os.environ)
    path = os.pathsep.join(filter(None, [*sys.path, before.get("PYTHONPATH")]))
    os.environ |= {"PYTHONPATH": path, COMPARING: "1"}
    try:
        yield
    finally:
        for name in ("PYTHONPATH", COMPARING):
            os.environ.pop(name)
            os.environ |= {name: before[name]} if name in before else {}


def _request(
    config: str | Path,
    settings: Mapping[str, Any],
    algorithms: Sequence[str],
    arms: Sequence[str],
    seeds: int,
) -> Request:
    """Return the comparison that the arguments of `compare` request."""
    from covey.lab.compare.design import Request, parse_arm

    for name, given in (("algorithms", algorithms), ("arms", arms)):
        if isinstance(given, str):
            raise ConfigError(f"{name} must be a list, such as {name}=[{given!r}], not a string")
    check_types(algorithms=algorithms, arms=arms)
    if seeds < 1:
        raise ConfigError(f"seeds = {seeds} must be at least 1")
    return Request(
        source=str(config),
        overrides=tuple(_settings(settings)),
        algorithms=tuple(algorithms),
        arms=tuple(map(parse_arm, arms)),
        seeds=int(seeds),
    )


def _resumed(path: Path, objects: Mapping[str, Any], *of_new_runs: object) -> RunFolder:
    """Open the folder of the run that is resumed, and check the arguments against the run."""
    if any(given is not None for given in of_new_runs):
        raise ConfigError("resume=RUN uses the run's settings; leave out config, model and run")
    folder = RunFolder.open(path)
    check_resumed(folder, objects.keys(), objects.get("reward"))
    return folder


def _split(
    trackers: Sequence[Tracker | str] | None,
) -> tuple[list[Tracker] | None, dict[str, list[str]]]:
    """Split `trackers` into tracker objects and tracker names; return the names as a setting.

    If the function returns None instead of tracker objects, the run reports to the console. The
    names in `trackers` replace the trackers in the settings, and an empty list removes all
    trackers. If `trackers` contains objects but no names, the trackers in the settings are kept.
    """
    named = [tracker for tracker in trackers or () if isinstance(tracker, str)]
    sinks = [tracker for tracker in trackers or () if not isinstance(tracker, str)]
    shown = None if trackers is None or (named and not sinks) else sinks
    return shown, {} if trackers is None or (sinks and not named) else {"trackers": named}


def _objects(
    dataset: Dataset | None, held_out: Dataset | None, rewards: Any, environment: Any = None
) -> dict[str, Any]:
    """Make a task, a reward and an environment from the arguments of `train` or `evaluate`."""
    from covey.environments.adapters import environment_factory
    from covey.rewards.user import function_reward
    from covey.tasks.rows import dataset_task

    found: dict[str, Any] = {}
    if dataset is not None:
        found["task"] = dataset_task(dataset, held_out)
    if rewards is not None:
        conversational = "task" in found and found["task"].conversational
        found["reward"] = function_reward(rewards, conversational=conversational)
    if environment is not None:
        found["environment"] = environment_factory(environment)
    return found


def _with_objects(
    source: Source, passed: Collection[str], model: str | Path | None, overrides: Mapping[str, Any]
) -> Config:
    """Return the configuration, with placeholder names for objects passed from Python."""
    from covey.tasks.rows import SHARE

    given = {f"{where}.name": name for where, _, name in OBJECTS if where in passed}
    if model is not None:
        given["model.path"] = model_name(model)
    config = load_config(source, **{**given, **overrides})
    if "task" in passed and not config.evaluate.every and SHARE not in config.task.options:
        # The share is a setting, so that a resumed run has the same prompts even if it evaluates.
        return load_config(config, **{f"task.{SHARE}": 0.0})
    return config


def _train(
    source: Config | Mapping[str, Any],
    target: RunFolder | Path | None,
    objects: Mapping[str, Any],
    trackers: Sequence[Tracker] | None,
    callbacks: Sequence[Callback],
    quiet: bool,
    allow_changed_reward: bool = False,
) -> TrainResult:
    from covey.config.resolve import resolve
    from covey.lab.start_notes import console_with_notes
    from covey.loop import train as train_run
    from covey.run import Run
    from covey.start import opened_run, resume_hint
    from covey.start import resumed_config as resumed
    from covey.tasks.rows import with_share

    passed = objects.keys()
    if isinstance(target, RunFolder):
        assert isinstance(source, Mapping), "a run that is resumed takes overrides"
        target.check_kind(sft=False)
        config, changed = resumed(target, _settings(source), passed=passed)
    else:
        config, changed = resolve(load_config(source), passed=passed), {}
        check_model_path(config.model.path)  # before a dataset is loaded
    name = f"{config.task.name}-{config.objective.name}".replace(":", ".")

    def build(config: Config, world: World) -> Run:
        task = with_share(objects.get("task"), config.task.options)
        reward, environment = objects.get("reward"), objects.get("environment")
        return Run.build(config, reward, task, world, environment)

    allowed = allow_changed_reward
    ready = opened_run(config, build, target or name, changed=changed, allow_changed_reward=allowed)
    with ready as opened:
        run, stop = opened.run, opened.stop
        if trackers is None and not quiet and run.world.is_main:
            trackers = [console_with_notes(opened)]
        follow = [*(trackers or ()), _Callbacks(callbacks, stop)]
        done = train_run(run, run.folder, follow, stop, opened.start)
    if stop.by_signal:
        steps = run.config.train.steps
        saved = f"saved step {done} of {steps}" if done else "no step has ended, none is saved"
        line = f"{stop.received}: {saved}; resume with: {resume_hint(run.folder, config)}"
        if run.world.is_main and not quiet:
            Screen(soft_wrap=True).print(line, markup=False, highlight=False)
        raise stop.exception(line)
    evaluations = run.folder.evaluations()
    return TrainResult(
        folder=run.folder.path,
        step=done,
        metrics=run.folder.steps(),
        evaluation=evaluations[-1] if evaluations else None,
        model=run.policy.model.model,
        tokenizer=run.policy.model.tokenizer,
        stopped=stop.received,
        best=best_checkpoint(run.folder),
    )
