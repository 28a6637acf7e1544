"""Time of a run, estimated without training: by the cost model, or by timing one layer on a CPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from covey.analysis.plan.cluster_table import size_of, workload
from covey.analysis.plan.cost_model import Workload, rollout_seconds, update_seconds
from covey.analysis.plan.fit import changed
from covey.analysis.plan.forecast import ANY_GPU, Device
from covey.analysis.plan.layer_time import cpu_seconds
from covey.analysis.plan.model_shape import Shape
from covey.analysis.plan.run_length import least_steps, most_evaluations
from covey.analysis.plan.task_facts import TaskFacts, usable_prompt
from covey.analysis.plan.time_forecast import duration
from covey.config import Config
from covey.environments.registry import NONE
from covey.training.resolve import objective_of

SMALLEST = 1e8
"""The fewest parameters for which the cost model holds; it was fitted to models of 135M to 7.6B."""
MEASURE = "`covey plan --measure` runs three steps here"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """Estimated seconds of a run whose completions all have the maximum length."""

    rollout: float
    update: float
    steps: int
    evaluation: float
    """The seconds of one evaluation."""
    evaluations: int
    device: str
    uncertainty: str
    basis: str

    @property
    def step(self) -> float:
        """The seconds of a training step, without scoring."""
        return self.rollout + self.update

    @property
    def run(self) -> float:
        """The seconds of all steps and evaluations."""
        return self.steps * self.step + self.evaluations * self.evaluation

    def row(self) -> dict[str, Any]:
        """Return the estimate as plain data."""
        return {**asdict(self), "step": self.step, "run": self.run}

    def text(self) -> str:
        """Return the estimate in a sentence or two."""
        parts = f"rollout {self.rollout:.2g}, update {self.update:.2g}"
        return (
            f"time: about {duration(self.run)} on {self.device}, {self.uncertainty}, if every "
            f"completion has the maximum length: {self.step:.2g} s a step ({parts}), scoring "
            f"excluded. Estimated from {self.basis}; {MEASURE}."
        )


def run_time(
    config: Config, facts: TaskFacts, shape: Shape, device: Device, ranks: int = 1
) -> RunTime | str:
    """Return the time of a resolved run on a device, or a sentence that says why it is unknown."""
    if config.environment.name != NONE:
        return f"time: unknown, the environment decides how long a rollout is; {MEASURE}."
    if device.kind == "cuda" and shape.parameters < SMALLEST:
        return f"time: unknown for a model below 100M parameters on a GPU; {MEASURE}."
    if device.kind == "cpu" and ranks > 1:
        return "time: unknown for several ranks on CPUs."
    if device.kind == "cpu" and config.train.old_logp == "auto":  # the engine's are exact there
        config = changed(config, {"train.old_logp": "sampler"})
    needs_reference = "reference" in objective_of(config).needs
    work = workload(config, _typical_prompt(config, facts), reference=needs_reference)
    asked = (facts.held_out or 0) * (1 + config.evaluate.samples)
    evaluations = most_evaluations(config) if asked else 0
    seconds = _gpu_seconds if device.kind == "cuda" else cpu_seconds
    rollout, update, evaluation = seconds(config, shape, work, max(1, asked), ranks)
    return RunTime(
        rollout=rollout,
        update=update,
        steps=least_steps(config),
        evaluation=evaluation,
        evaluations=evaluations,
        **_source(device, ranks),
    )


def _typical_prompt(config: Config, facts: TaskFacts) -> int | None:
    """Return the median token count, because a few long prompts do not slow a run down."""
    usable, lengths = usable_prompt(config, facts), facts.prompt_tokens
    return usable if usable is None or not lengths else min(usable, lengths[len(lengths) // 2])


def _source(device: Device, ranks: int) -> dict[str, str]:
    """Return texts about the device, the uncertainty and the basis of an estimate."""
    if device.kind == "cpu":
        basis = "the time of one layer of the same size on this machine"
        return {"device": "this CPU", "uncertainty": "a rough estimate", "basis": basis}
    uncertainty = "within 20 %" if ranks == 1 else "never measured on several GPUs"
    other = device.name != ANY_GPU and "H200" not in device.name
    here = f" (this machine has {device.name})" if other else ""
    name = "one H200" if ranks == 1 else f"{ranks} H200s"
    return {
        "device": f"{name} in bfloat16{here}",
        "uncertainty": uncertainty,
        "basis": "the cost model of docs/scale.md",
    }


def _gpu_seconds(
    config: Config, shape: Shape, work: Workload, evaluated: int, ranks: int
) -> tuple[float, float, float]:
    """Return the seconds of rollout, update and evaluation if GPUs generate and train in turn."""
    model = size_of(shape)
    samples = 1 + config.evaluate.samples
    asked = Workload(rows=evaluated, group=samples, prompt=work.prompt, completion=work.completion)
    rollout, evaluation = (
        rollout_seconds(model, each, engines=min(ranks, each.rows)) for each in (work, asked)
    )
    return rollout, update_seconds(model, work, trainers=ranks), evaluation
