"""Estimates a run's time from a cost model, from one timed layer, or from measured steps."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey.config import Config, parse_config, to_toml
from covey.environments.registry import NONE
from covey.lab.exact_logp import expected_exact_logp
from covey.lab.plan.cost_model import (
    Workload,
    rollout_seconds,
    size_of,
    update_seconds,
    workload,
)
from covey.lab.plan.fit import changed
from covey.lab.plan.forecast import ANY_GPU, Device
from covey.lab.plan.model_shape import Shape
from covey.lab.plan.summary import least_steps, most_evaluations
from covey.lab.plan.task_facts import TaskFacts, usable_prompt
from covey.records.folder import RunFolder
from covey.records.resume import Start
from covey.stopping import StopSignal
from covey.training.resolve import objective_of, old_logp_from_sampler

SMALLEST = 1e8
"""The smallest model for which the cost model is used, in parameters. The cost model was fitted to
models of 135M to 7.6B parameters."""
MEASURE = "`covey plan --measure` runs three steps here"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """Estimated time of a run, in seconds, if every completion has the maximum length."""

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
    """Return the estimated time of a resolved run on a device, or why the time is unknown."""
    if config.environment.name != NONE:
        return f"time: unknown, the environment decides how long a rollout is; {MEASURE}."
    if device.kind == "cuda" and shape.parameters < SMALLEST:
        return f"time: unknown for a model below 100M parameters on a GPU; {MEASURE}."
    if device.kind == "cpu" and ranks > 1:
        return "time: unknown for several ranks on CPUs."
    objective = objective_of(config)
    exact = device.kind == "cpu" and expected_exact_logp(config)
    if old_logp_from_sampler(config, objective, exact_logp=exact):
        config = changed(config, {"train.old_logp": "sampler"})
    prompt, lengths = usable_prompt(config, facts), facts.prompt_tokens
    if prompt is not None and lengths:  # use the median, because few long prompts cost little time
        prompt = min(prompt, lengths[len(lengths) // 2])
    work = workload(config, prompt, reference="reference" in objective.needs)
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


def _source(device: Device, ranks: int) -> dict[str, str]:
    """Return the text fields `device`, `uncertainty` and `basis` of a `RunTime`."""
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
    """Return the seconds of rollout, update and evaluation if all GPUs both generate and train."""
    model = size_of(shape)
    samples = 1 + config.evaluate.samples
    asked = Workload(rows=evaluated, group=samples, prompt=work.prompt, completion=work.completion)
    rollout, evaluation = (
        rollout_seconds(model, each, engines=min(ranks, each.rows)) for each in (work, asked)
    )
    return rollout, update_seconds(model, work, trainers=ranks), evaluation


# Time forecast of a run, from a few of its training steps measured on this machine.

WARM_UP, MEASURED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeForecast:
    """Forecast of a run's time in seconds, from a few measured training steps."""

    rollout: float
    score: float
    update: float
    step: float
    """The seconds of a whole training step."""
    steps: int
    evaluation: float
    """The seconds of one evaluation, estimated from the speed of rollouts."""
    evaluations: int
    tokens_per_second: float

    @property
    def run(self) -> float:
        """The seconds of all steps and evaluations of the run."""
        return self.steps * self.step + self.evaluations * self.evaluation

    def row(self) -> dict[str, Any]:
        """Return the forecast as plain data."""
        return {**asdict(self), "run": self.run}

    def text(self) -> str:
        """Return the forecast in a paragraph."""
        parts = f"rollout {self.rollout:.2f}, scoring {self.score:.2f}, update {self.update:.2f}"
        return (
            f"time: {self.step:.2f} s a step ({parts}), {self.tokens_per_second:,.0f} sampled "
            f"tokens a second. {self.steps} steps and {self.evaluations} evaluations of about "
            f"{self.evaluation:.1f} s: {duration(self.run)}. Measured over {MEASURED} steps here."
        )


def duration(seconds: float) -> str:
    """Return a duration as text.

    >>> duration(95), duration(7300)
    ('1 min 35 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"


def measure_time(config: Config) -> TimeForecast:
    """Measure a few training steps in a temporary folder, and forecast the time of the run."""
    from covey.loop import train
    from covey.run import Run

    short = shortened(config)
    run = Run.build(short)
    with closing(run.scorer), tempfile.TemporaryDirectory(prefix="covey-plan-") as folder:
        target = RunFolder.create(Path(folder) / "run", to_toml(short), {})
        train(run, target, [], StopSignal(), Start())
        rows = target.steps()[WARM_UP:]
    return forecast_time(config, rows, len(run.held_out))


def shortened(config: Config) -> Config:
    """Return the run's settings with only a few steps, and no evaluations or checkpoints."""
    data = config.model_dump()
    data["train"] |= {"steps": WARM_UP + MEASURED, "stop_after": {}}
    data["evaluate"]["every"] = 0
    data["save"] |= {"every": 0, "rollouts": False, "samples_every": 0}
    return parse_config(data)


def forecast_time(config: Config, rows: list[dict[str, Any]], held_out: int) -> TimeForecast:
    """Compute the forecast from the metrics of the measured steps."""

    def typical(name: str) -> float:
        return statistics.median(float(row[name]) for row in rows)

    rollout = typical("time/rollout")
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    evaluated = held_out * (1 + config.evaluate.samples)
    return TimeForecast(
        rollout=rollout,
        score=typical("time/score"),
        update=typical("time/update"),
        step=typical("time/total"),
        steps=least_steps(config),
        evaluation=rollout * evaluated / completions,
        evaluations=most_evaluations(config),
        tokens_per_second=typical("time/tokens_per_second"),
    )


# Seconds of a training step on a CPU, estimated from one decoder layer.
#
# The layer has the model's size and arbitrary weights. Two operations are timed: decoding one token
# of each completion, and a forward pass over a few tokens. A backward pass takes about twice as
# long as a forward pass, and the layer's time is multiplied by the number of layers. A slice of the
# output layer is timed in the same way. The operations use numpy, so that a plan need not import
# torch.

TRAIN_FLOPS = 1e10
"""FLOPs of the small timed training batch, which takes less than a second on any CPU."""
FEWEST_TOKENS, MOST_TOKENS = 16, 512
"""Smallest and largest number of tokens in the small training batch that is timed."""
DECODE_FLOPS, FEWEST_ROWS = 2e9, 16
"""The timed decode step has at most DECODE_FLOPS operations, unless FEWEST_ROWS completions need
more operations."""
KEY_NUMBERS = 2e7
"""Maximum number of elements in the key tensor of the timed decode step."""
HEAD_ROWS = 2048
"""Number of vocabulary entries in the slice of the output layer that is timed."""
REPEATS = 3
"""The number of times that each operation is timed; the shortest time counts."""
WITH_BACKWARD = 3
"""The time of a forward and backward pass, as a multiple of the forward pass alone."""
Array = np.ndarray[Any, np.dtype[np.float32]]


class _Layer:
    """A decoder layer: attention and a gated MLP, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        self.shape, hidden = shape, shape.hidden
        self.qkv = _weights(hidden, shape.query + 2 * shape.key)
        self.out = _weights(shape.query, hidden)
        self.up = _weights(hidden, 2 * shape.inner)
        self.down = _weights(shape.inner, hidden)

    @property
    def numbers(self) -> int:
        """Number of weights."""
        return sum(weight.size for weight in (self.qkv, self.out, self.up, self.down))

    def __call__(self, x: Array, past: Array | None = None) -> Array:
        """Return the layer's output [B, T, hidden]; with `past`, tokens attend only to `past`."""
        shape = self.shape
        query, key, value = np.split(
            _norm(x) @ self.qkv, [shape.query, shape.query + shape.key], axis=-1
        )
        if past is None:
            keys, values = _heads(key, shape), _heads(value, shape)
        else:
            keys = values = past  # an engine writes the new key into its cache, without a copy
        asked = _heads(query, shape)
        asked = asked.reshape(len(x), shape.key_value_heads, -1, shape.head_size)
        scores = np.exp(asked @ keys.swapaxes(-1, -2))
        seen = (scores / scores.sum(-1, keepdims=True)) @ values
        x = x + seen.reshape(*x.shape[:2], shape.query) @ self.out
        gate, up = np.split(_norm(x) @ self.up, 2, axis=-1)
        changed: Array = x + (gate / (1 + np.exp(-gate)) * up) @ self.down
        return changed


def _norm(x: Array) -> Array:
    normed: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True))
    return normed


def _heads(x: Array, shape: Shape) -> Array:
    """Reshape [B, T, heads * head size] to [B, heads, T, head size]."""
    return x.reshape(*x.shape[:2], -1, shape.head_size).swapaxes(1, 2)


def cpu_seconds(
    config: Config, shape: Shape, work: Workload, evaluated: int, ranks: int = 1
) -> tuple[float, float, float]:
    """Return the seconds of a step's rollout, of its update, and of one evaluation."""
    layer = _Layer(shape)
    head = _filled(shape.hidden, min(HEAD_ROWS, shape.vocabulary))
    parts = shape.vocabulary / head.shape[1]

    def rollout(rows: int) -> float:
        at_once = min(rows, config.engine.max_concurrent)
        decode = _decode(layer, head, parts, at_once, work)
        return math.ceil(rows / at_once) * work.completion * decode

    token = _train_token(layer, head, parts, work)
    passes = work.updates + work.forwards / WITH_BACKWARD
    return rollout(work.rows), work.tokens * passes * token, rollout(evaluated)


def _decode(layer: _Layer, head: Array, parts: float, rows: int, work: Workload) -> float:
    """Return the seconds to decode one token for each of `rows` completions.

    If the measured decode step has fewer than `rows` completions, the measured time is scaled up.
    """
    shape, context = layer.shape, work.prompt + work.completion // 2
    few = max(FEWEST_ROWS, int(DECODE_FLOPS / (2 * layer.numbers)))
    some = max(1, min(rows, few, int(KEY_NUMBERS / (context * shape.key))))
    x = _filled(some, 1, shape.hidden)
    past = _filled(some, shape.key_value_heads, context, shape.head_size)

    def choose() -> Any:
        return np.exp(x @ head).cumsum(-1)

    step = shape.layers * _shortest(lambda: layer(x, past)) + parts * _shortest(choose)
    return step * rows / some


def _train_token(layer: _Layer, head: Array, parts: float, work: Workload) -> float:
    """Return the seconds per token of a forward plus a backward pass."""
    most = min(MOST_TOKENS, int(TRAIN_FLOPS / (6 * layer.numbers)))
    length = min(work.context, max(FEWEST_TOKENS, most))
    rows = max(1, most // length)
    x = _filled(rows, length, layer.shape.hidden)
    whole = layer.shape.layers * _shortest(lambda: layer(x))
    logits = parts * _shortest(lambda: np.log(np.exp(x @ head).sum(-1)))
    return WITH_BACKWARD * (whole + logits) / (rows * length)


def _shortest(work: Callable[[], Any]) -> float:
    """Call `work` once for warm-up and then several times, and return the shortest time."""
    work()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _weights(inputs: int, outputs: int) -> Array:
    """Return a constant weight matrix.

    Each output is a tenth of the mean input, so activations stay small.
    """
    return np.full((inputs, outputs), 0.1 / inputs, dtype=np.float32)


def _filled(*sizes: int) -> Array:
    """Return an array filled with a constant, which is faster than drawing random numbers."""
    return np.full(sizes, 0.01, dtype=np.float32)
