"""The data of a comparison that statistics and reports read: arms, runs and evaluations.

This module does not import torch, so a report can be written on a machine without torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from covey.config import parse_config, to_toml, toml_lines, toml_value
from covey.errors import RunError
from covey.notices import notice
from covey.records.files import write_text
from covey.records.folder import RunFolder
from covey.records.records import Shape, is_missing, read_object, read_text

State = Literal["done", "failed", "unfinished"]
BudgetKind = Literal["steps", "tokens", "updates"]
Metric = Literal["success", "reward"]
"""The metric that compares the arms: the fraction of correct completions, or the mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm of a comparison: its name, and the common settings that it overrides."""

    name: str
    settings: tuple[str, ...] = ()
    seed_offset: int = 0
    """A number added to every seed of this arm, so that the arm gets different prompts and
    completions than the other arms."""
    differences: Mapping[str, Any] = field(default_factory=dict)
    """Maps each setting that differs from the common configuration to the arm's value, or to None
    if the arm's algorithm does not have the setting. The module design.py fills in `differences`.
    """

    @property
    def text(self) -> str:
        """The arm in the format of the `--arm` option."""
        moved = [f"seed+={self.seed_offset}"] if self.seed_offset else []
        return f"{self.name}: {', '.join([*self.settings, *moved])}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation of a run on the held-out prompts."""

    step: int
    tokens: int
    """The number of tokens that the run has sampled for training so far."""
    updates: int
    seconds: float
    """The training time so far, without evaluations and without the first step, which includes
    compilation and other work that is done once."""
    correct: Mapping[str, bool]
    """Maps each prompt id to whether the prompt's greedy completion is correct. All runs are
    evaluated on the same prompts in the same order.
    """
    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Maps each prompt id to the reward and the reward components (`parts/NAME`) of its greedy
    completion. `rewards` omits prompts whose completion could not be scored."""
    distinct_answers: int | None = None
    by: Metric = "success"

    @property
    def accuracy(self) -> float:
        return sum(self.correct.values()) / len(self.correct)

    @property
    def values(self) -> tuple[float, ...]:
        """The success (1 or 0) or the reward of each prompt's completion, depending on `by`.

        A completion without a score gets the lowest reward of the evaluation.
        """
        if self.by == "success":
            return tuple(map(float, self.correct.values()))
        lowest = min(row["reward"] for row in self.rewards.values())
        return tuple(self.rewards.get(name, {"reward": lowest})["reward"] for name in self.correct)

    @property
    def value(self) -> float:
        return sum(self.values) / len(self.correct)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run, as outcome.json stores it."""

    key: str
    """Digests of all inputs that determine the run's result and of the code, as `Job.key`."""
    state: State
    error: str = ""
    weights: str = ""
    """The digest of the final weights; equal digests mean that the weights are bit-identical."""
    memory_gib: float = 0.0
    """The peak memory of the tensors on the GPU or, without a GPU, of the process; 0 if unknown."""
    cpu_seconds: float = 0.0
    """The CPU time of the run's process, including evaluations; 0 if unknown. For a resumed run,
    `memory_gib` and `cpu_seconds` cover only the last process.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(RunOutcome):
    """One run of a comparison: its arm, seed, outcome and evaluations."""

    arm: str
    seed: int
    key: str = ""
    points: tuple[Point, ...] = ()
    unreadable: tuple[int, ...] = ()
    """The steps whose evaluations are damaged or missing."""
    folder: str = ""
    """The path of the run folder, relative to the comparison's folder."""

    @property
    def finished(self) -> bool:
        """Whether the run reached its end, and has its first and its last evaluation."""
        if self.state != "done" or not self.points:
            return False
        first, last = self.points[0].step, self.points[-1].step
        return all(first < step < last for step in self.unreadable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The settings, arms, seeds and budget of a comparison, as comparison.toml stores them."""

    command: str
    given: Mapping[str, Any] = field(default_factory=dict)
    """The common settings as the user gave them, from which the arms are built."""
    common: Mapping[str, Any] = field(default_factory=dict)
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: BudgetKind
    amount: int
    """The budget of each run, in the unit that `budget` names."""
    threads: int = 0
    """The number of threads of each run. It never changes within a comparison, because it affects
    the rounding of sums on a CPU."""
    findings: tuple[Mapping[str, str], ...] = ()
    """Possible problems that were found before training, in the format of `Finding.row()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Design):
    """A design with its runs and their evaluations, from which Covey writes the report."""

    name: str
    runs: tuple[RunResult, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    config_toml: str = ""
    best_constant: float | None = None
    """The best accuracy of a policy that gives every held-out prompt the same answer, or None if
    unknown."""

    @property
    def by(self) -> Metric:
        points = (point for run in self.runs for point in run.points)
        return next((point.by for point in points), "success")

    def runs_of(self, arm: str) -> tuple[RunResult, ...]:
        """Return the runs of an arm, ordered by seed."""
        return tuple(sorted((r for r in self.runs if r.arm == arm), key=lambda run: run.seed))

    def finished_runs(self) -> dict[str, tuple[RunResult, ...]]:
        return {
            arm.name: tuple(run for run in self.runs_of(arm.name) if run.finished)
            for arm in self.arms
        }


def compared_by(runs: Iterable[RunResult]) -> Metric:
    """Choose the metric that compares the arms of a comparison."""
    points = [point for run in runs for point in run.points]
    if any(any(point.correct.values()) for point in points):
        return "success"
    rewards = {row["reward"] for point in points for row in point.rewards.values()}
    scored = all(point.rewards for point in points)
    return "reward" if len(rewards) > 1 and scored else "success"


def with_metric(run: RunResult, by: Metric) -> RunResult:
    return replace(run, points=tuple(replace(point, by=by) for point in run.points))


# The files in the folder of a comparison.


DESIGN_FILE, OUTCOME_FILE = "comparison.toml", "outcome.json"


OUTCOME: Shape = TypeAdapter(RunOutcome)


def run_path(folder: Path, arm: str, seed: int) -> Path:
    return folder / "runs" / arm / f"seed-{seed}"


def log_path(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def write_outcome(run: Path, outcome: RunOutcome) -> None:
    write_text(run / OUTCOME_FILE, json.dumps(asdict(outcome), indent=2) + "\n")


def read_outcome(run: Path) -> RunOutcome | None:
    """Return the outcome of a run, or None if the run has not ended."""
    file = run / OUTCOME_FILE
    if is_missing(file):
        return None
    try:
        row = read_object(file, OUTCOME)
    except RunError as error:
        notice(f"{error}; the run counts as unfinished")
        return None
    outcome: RunOutcome = OUTCOME.validate_python(row)
    return outcome


def write_design(folder: Path, design: Design) -> None:
    lines = [
        f"command = {toml_value(design.command)}",
        f"seeds = {toml_value(design.seeds)}",
        f"budget = {toml_value(design.budget)}",
        f"amount = {design.amount}",
        f"threads = {design.threads}",
    ]
    for arm in design.arms:
        present = {key: value for key, value in arm.differences.items() if value is not None}
        lines += [
            "\n[[arms]]",
            f"name = {toml_value(arm.name)}",
            f"settings = {toml_value(arm.settings)}",
            f"seed_offset = {arm.seed_offset}",
            f"differences = {toml_value(present)}",
            f"without = {toml_value([k for k in arm.differences if k not in present])}",
        ]
    for finding in design.findings:
        lines += ["\n[[findings]]", *(f"{k} = {toml_value(str(v))}" for k, v in finding.items())]
    for name, settings in (("given", design.given), ("common", design.common)):
        top = {k: v for k, v in settings.items() if not isinstance(v, Mapping)}
        lines += [f"\n[{name}]", *toml_lines(top)]
        for section, values in settings.items():
            if isinstance(values, Mapping):
                lines += [f"\n[{name}.{section}]", *toml_lines(values)]
    write_text(folder / DESIGN_FILE, "\n".join(lines) + "\n")


def read_design(folder: Path) -> Design:
    file = folder / DESIGN_FILE
    if not file.is_file():
        raise RunError(
            f"{folder} is not a comparison folder, because it has no file {DESIGN_FILE}; give "
            "another folder"
        )
    try:
        data = tomllib.loads(read_text(file))
        arms = tuple(
            Arm(
                name=row["name"],
                settings=tuple(row["settings"]),
                seed_offset=row["seed_offset"],
                differences={**row["differences"], **dict.fromkeys(row["without"])},
            )
            for row in data.pop("arms")
        )
        seeds, findings = tuple(data.pop("seeds")), tuple(data.pop("findings", []))
        return Design(**data, arms=arms, seeds=seeds, findings=findings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} cannot be read: {error!r}; repair the file, or start a comparison in another "
            "folder"
        ) from None


def load_comparison(folder: Path) -> Comparison:
    design = read_design(folder)
    environment = folder / "environment.json"
    runs = [_load_run(folder, arm.name, seed) for arm in design.arms for seed in design.seeds]
    logs = (RunFolder(folder / run.folder).evaluations(note=lambda text: None) for run in runs)
    constant = next((row.get("best_constant") for rows in logs for row in rows), None)
    by = compared_by(runs)
    return Comparison(
        **{item.name: getattr(design, item.name) for item in fields(Design)},
        name=folder.resolve().name,
        runs=tuple(with_metric(run, by) for run in runs),
        best_constant=None if constant is None else float(constant),
        environment=RunFolder(folder).environment() if environment.exists() else {},
        config_toml=to_toml(parse_config(design.common)),
    )


def _load_run(folder: Path, arm: str, seed: int) -> RunResult:
    path = run_path(folder, arm, seed)
    ended = read_outcome(path) or RunOutcome(key="", state="unfinished")
    run, where = RunFolder(path), str(path.relative_to(folder))
    points = _points(run)
    # Each run starts with an evaluation, and writes the rows of an evaluation before its summary.
    known = {0, *(step for step, _ in run.numbered("evaluations", ".jsonl"))}
    known |= {row["step"] for row in run.evaluations(lambda text: None)}
    lost = sorted(known - {point.step for point in points}) if ended.state == "done" else ()
    return RunResult(
        arm=arm, seed=seed, points=points, unreadable=tuple(lost), folder=where, **asdict(ended)
    )


def _points(run: RunFolder) -> tuple[Point, ...]:
    """Return the evaluations that cover all prompts; incomplete evaluations cannot be compared."""
    steps = run.steps()
    points = []
    for row in run.evaluations():
        items = run.items(row["step"])
        read = len({item["prompt_id"] for item in items})
        if row["step"] > 0 and not steps:
            why = "steps.jsonl is missing or damaged"
        elif read != row["prompts"]:
            why = f"only {read} of its {row['prompts']} prompts can be read"
        else:
            points.append(_point(row, steps, items))
            continue
        notice(f"{run.path}: the evaluation of step {row['step']} is left out, because {why}")
    return tuple(points)


def _point(
    evaluation: Mapping[str, Any], steps: list[dict[str, Any]], items: list[dict[str, Any]]
) -> Point:
    step = evaluation["step"]
    done = [row for row in steps if row["step"] <= step]
    newest = done[-1] if done else {}
    return Point(
        step=step,
        tokens=newest.get("tokens") or 0,
        updates=newest.get("updates") or 0,
        seconds=sum(row.get("time/total") or 0.0 for row in done if row["step"] > 1),
        # A completion that could not be scored counts as incorrect.
        correct={row["prompt_id"]: bool(row["success"]) for row in items},
        rewards={
            row["prompt_id"]: {
                "reward": row["reward"],
                **{f"parts/{name}": value for name, value in row.get("parts", {}).items()},
            }
            for row in items
            if row.get("reward") is not None
        },
        distinct_answers=evaluation.get("distinct_answers"),
    )
