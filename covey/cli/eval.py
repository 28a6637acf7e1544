"""`covey eval`: evaluate a model on held-out prompts, alone or against another model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from covey.cli.startup import (
    STARTING,
    AsJson,
    Smoke,
    Trust,
    check_out,
    loaded,
    tell_edited,
    waiting,
)
from covey.config import Config, toml_value
from covey.errors import DataError
from covey.models.model_path import check_model_path
from covey.records.files import write_text
from covey.records.folder import RunFolder
from covey.records.metric_registry import change_text, estimate_text
from covey.records.resume import check_no_step, run_around, weights_of
from covey.records.trackers.console import evaluation_line
from covey.screen import Screen, cell

if TYPE_CHECKING:
    from covey.evaluation import Comparison
    from covey.evaluation.evaluate import Evaluation

Results = Sequence[tuple[str, "Evaluation"]]
"""Pairs of a model path and the model's evaluation, for one or two models."""
SHOWN = 5
"""The maximum number of prompt ids in the terminal output; --json and --out list all ids."""

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        help="A run folder, a checkpoint, or a model: a folder, a Hugging Face name, a GGUF file, "
        "'embedded' or 'smollm2'.",
    ),
]
Source = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="CONFIG",
        help="Configuration that defines the task and the reward. The default for a run is the "
        "configuration of the run. The default for other models is the recipe 'arithmetic'.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")
]
Step = Annotated[
    str | None,
    typer.Option(
        metavar="N|best",
        help="Evaluate the run's checkpoint of training step N, or the best one by save.best. "
        "Default: the newest.",
    ),
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
        help="Also report separate results for each value of KEY in the `info` field of prompts. "
        "If KEY is 'task', report separate results for each task.",
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
    step: Step = None,
    samples: Samples = None,
    against: Against = None,
    by: By = None,
    out: Out = None,
    smoke: Smoke = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out prompts, with 95 % confidence intervals.

    The command reports greedy accuracy and, with --samples, also mean@k and pass@k. For a run
    folder, the command evaluates a checkpoint of the run on the run's task. With --against, the
    command compares two models on the same prompts.
    """
    settings = list(overrides or [])
    if samples is not None:
        settings.append(f"evaluate.samples={samples}")
    config = _config(target, source, settings, smoke, step)

    from covey.passed_objects import check_evaluated, check_scored

    check_evaluated(config)
    models = [config.model.path, *([_model(against)] if against is not None else [])]
    for path in models:
        check_model_path(path)
    check_out(out)
    evaluations = _evaluations(config, models, by, show=not as_json)
    results = list(zip(models, evaluations, strict=True))
    if out is not None:
        rows = [{"model": path, **item.row()} for path, each in results for item in each.items]
        write_text(out, "".join(json.dumps(row, default=str) + "\n" for row in rows))
    for path, evaluation in results:
        check_scored(path, evaluation)
    if as_json:
        typer.echo(json.dumps(_data(results, by)))
    else:
        _show(results, by, Screen(soft_wrap=True))


def _config(
    target: str, source: str | None, settings: list[str], smoke: bool, step: str | None
) -> Config:
    run = run_around(Path(target))
    if run is not None:
        tell_edited(RunFolder(run))
        source = source or str(run / "config.toml")
    model = f"model.path={toml_value(_model(target, step))}"
    return loaded(source or "arithmetic", [*settings, model], smoke=smoke)


def _model(target: str, step: str | None = None) -> str:
    path = Path(target)
    if run_around(path):
        return str(weights_of(path, "covey eval {}", step))
    check_no_step(target, step)
    return target


def _evaluations(config: Config, models: list[str], by: str | None, show: bool) -> list[Evaluation]:
    with waiting(STARTING):
        from covey.baselines import baselines_of
        from covey.config.resolve import evaluation_config, held_out_of, resolve, task_of
        from covey.engines.native.engine import NativeEngine
        from covey.evaluation import check_category
        from covey.evaluation.of_model import evaluate_engine
        from covey.policy.policy import load_model
        from covey.rollout.prompt_limit import fitting_prompts
        from covey.scoring import scorer_of

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
                        f"the model {path} cannot be evaluated on all prompts that fit the first "
                        f"model ({notes[0]}); lower rollout.max_prompt_tokens to a length that "
                        "suits both models"
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


def _data(results: Results, by: str | None) -> dict[str, Any]:
    from covey.evaluation import by_category, compare, estimates

    rows = []
    for model, evaluation in results:
        row = {"model": model, **evaluation.row()}
        if by is not None:
            row["by"] = {
                name: {
                    "prompts": len(items),
                    **{n: e.row() for n, e in estimates(items, evaluation.reward_bounds).items()},
                }
                for name, items in by_category(evaluation.items, by).items()
            }
        rows.append(row)
    if len(rows) == 1:
        return rows[0]
    first, second = (evaluation.items for _, evaluation in results)
    return {**rows[0], "against": rows[1], "difference": compare(first, second).row()}


def _show(results: Results, by: str | None, console: Console) -> None:
    from covey.evaluation import compare
    from covey.evaluation.items import PART

    for model, evaluation in results:
        lead = f"{model}: " if len(results) > 1 else ""
        console.print(f"{lead}{evaluation_line(evaluation)}")
        parts = [
            f"{name.removeprefix(PART)} {estimate_text(name, estimate.row())}"
            for name, estimate in evaluation.estimates.items()
            if name.startswith(PART)
        ]
        if parts:
            console.print(f"reward parts, greedy: {'  '.join(parts)}")
        if by is not None:
            console.print(_category_table(evaluation, by))
    if len(results) > 1:
        first, second = (evaluation.items for _, evaluation in results)
        _show_difference(compare(first, second), console)


def _category_table(evaluation: Evaluation, by: str) -> Table:
    from covey.evaluation import by_category, estimates

    table = Table(Column(cell(by)), "n", "", "value, 95 % interval")
    for name, items in by_category(evaluation.items, by).items():
        labels = [cell(name), cell(len(items))]
        for number, estimate in estimates(items, evaluation.reward_bounds).items():
            table.add_row(*labels, cell(number), estimate_text(number, estimate.row()))
            labels = [cell(""), cell("")]
    return table


def _show_difference(comparison: Comparison, console: Console) -> None:
    table = Table("first - second", "difference", "95 % interval", "better", "worse", "p")
    for name, difference in comparison.differences.items():
        found = difference.estimate
        low, high = (change_text(name, v).removesuffix(" points") for v in (found.low, found.high))
        table.add_row(
            cell(name),
            change_text(name, found.value),
            "-" if found.low == found.high else f"[{low}, {high}]",
            str(difference.gained),
            str(difference.lost),
            f"{difference.p_value:.3g}",
        )
    console.print(table)
    for what, ids in (("gained", comparison.gained), ("lost", comparison.lost)):
        shown = ", ".join(ids[:SHOWN]) + (", ..." if len(ids) > SHOWN else "")
        console.print(f"{what} {len(ids)}: {shown or 'none'}")
