"""`covey eval`: evaluate a model on held-out prompts, alone or against another model."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from covey.cli.checkpoint_choice import run_around, weights_of
from covey.cli.screen import Screen
from covey.cli.startup import STARTING, AsJson, Smoke, Trust, loaded, tell_edited, waiting
from covey.config import Config, toml_value
from covey.errors import ConfigError, DataError, RewardError
from covey.models.model_path import check_model_path
from covey.run.folder import RunFolder
from covey.training.passed_objects import check_evaluated

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        help="What to evaluate: a run folder, a checkpoint, a model folder, or 'embedded', the "
        "built-in model.",
    ),
]
Source = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="CONFIG",
        help="Configuration that defines the task and the reward. Default: the configuration of "
        "the run; for a model that belongs to no run, the recipe 'arithmetic'.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")
]
Samples = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Number of completions to sample per prompt, for mean@k and pass@k. "
        "Default: evaluate.samples.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="RUN|MODEL",
        help="Also evaluate this model, and compare the two models prompt by prompt.",
    ),
]
By = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Also report results for each category of prompts. A prompt's category is the value "
        "of KEY in its `info` field, or its task if KEY is 'task'.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write every prompt with its completions to this JSON Lines file."
    ),
]


def eval_command(
    target: Target,
    source: Source = None,
    overrides: Overrides = None,
    samples: Samples = None,
    against: Against = None,
    by: By = None,
    out: Out = None,
    smoke: Smoke = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out prompts, with 95 % confidence intervals.

    The command reports greedy accuracy and, with --samples, also mean@k and pass@k. If a run folder
    is given, the newest checkpoint of the run is evaluated on the task of the run. With --against,
    a second model is evaluated on the same prompts.
    """
    settings = list(overrides or [])
    if samples is not None:
        settings.append(f"evaluate.samples={samples}")
    config = _config(target, source, settings, smoke)
    check_evaluated(config)
    models = [config.model.path, *([_model(against)] if against is not None else [])]
    for path in models:
        check_model_path(path)
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist")
    evaluations = _evaluations(config, models, by, show=not as_json)
    if out is not None:
        _write_items(out, models, evaluations)
    for path, evaluation in zip(models, evaluations, strict=True):
        _check_scored(path, evaluation)

    from covey.cli.eval_output import measured, show_measured  # imports torch

    if as_json:
        typer.echo(json.dumps(measured(models, evaluations, by)))
    else:
        show_measured(models, evaluations, by, Screen(soft_wrap=True))


def _config(target: str, source: str | None, settings: list[str], smoke: bool) -> Config:
    """Return the settings for an evaluation, with model.path set to the model to evaluate."""
    run = run_around(Path(target))
    if run is not None:
        tell_edited(RunFolder(run))
        source = source or str(run / "config.toml")
    model = f"model.path={toml_value(_model(target))}"
    return loaded(source or "arithmetic", [*settings, model], smoke=smoke)


def _model(target: str) -> str:
    """Return the path of the model to load; for a run, the path of its newest checkpoint."""
    path = Path(target)
    return str(weights_of(path, "covey eval {}")) if run_around(path) else target


def _evaluations(config: Config, models: list[str], by: str | None, show: bool) -> list[Evaluation]:
    """Evaluate one model after the other on the same prompts, with the same scorer."""
    with waiting(STARTING):
        from covey.engines.native.engine import NativeEngine
        from covey.evaluation import check_category
        from covey.training.model_evaluation import evaluate_engine
        from covey.training.models import load_model
        from covey.training.prompt_limit import fitting_prompts
        from covey.training.resolve import evaluation_config, held_out_of, resolve, task_of
        from covey.training.scorers import baselines_of, scorer_of

        config = evaluation_config(resolve(config))
        prompts = held_out_of(config, task_of(config))
        if by is not None:
            check_category(prompts, by)
    found: list[Evaluation] = []
    with closing(scorer_of(config)) as scorer:
        known = baselines_of(config, scorer, prompts)
        for path in models:
            named = config.model.model_copy(update={"path": path})
            with waiting(f"loading {path}"):
                model = load_model(config.model_copy(update={"model": named}))
                fitting, notes = fitting_prompts(config, model, prompts, "held-out")
                if found and len(fitting) < len(prompts):
                    raise DataError(
                        f"{path}: this model cannot use all prompts of the first model "
                        f"({notes[0]}); set rollout.max_prompt_tokens to a length that fits both "
                        "models"
                    )
                prompts = fitting
                engine = NativeEngine(model)
            with Progress(console=Screen(stderr=True), disable=not show) as progress:
                if show:
                    for note in (f"sampling: {engine.info.backend}", *notes):
                        progress.console.print(note)
                completions = len(prompts) * (1 + config.evaluate.samples)
                task = progress.add_task("completions", total=completions)
                advance = partial(progress.advance, task)
                found.append(evaluate_engine(config, engine, prompts, scorer, known, advance))
    return found


def _check_scored(model: str, evaluation: Evaluation) -> None:
    """Raise an error if no completion has a score, instead of reporting an accuracy of 0 %."""
    completions = sum(1 + len(item.samples) for item in evaluation.items)
    if evaluation.unscored == completions:
        raise RewardError(
            f"{model}: none of the {completions} completions could be scored; the first error: "
            f"{evaluation.first_failure}"
        )


def _write_items(path: Path, models: list[str], evaluations: list[Evaluation]) -> None:
    from covey.run.files import write_text

    rows: list[dict[str, Any]] = [
        {"model": model, **item.row()}
        for model, evaluation in zip(models, evaluations, strict=True)
        for item in evaluation.items
    ]
    write_text(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))
