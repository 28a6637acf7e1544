"""The time of a run before it starts: on a GPU by the cost model, on a CPU by one layer."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from covey.cli.main import run as covey
from covey.config import Config, load_config
from covey.lab.plan import run_time as module
from covey.lab.plan.cost_model import PUBLISHED, Workload, rollout_seconds, update_seconds
from covey.lab.plan.forecast import Device
from covey.lab.plan.model_shape import Shape, shape_of
from covey.lab.plan.run_time import RunTime, run_time
from covey.lab.plan.task_facts import TaskFacts
from covey.training.resolve import resolve

GPU = Device.gpu(139)
OTHER = Device(kind="cuda", memory=2**37, name="NVIDIA A100")
FACTS = TaskFacts(held_out=256, longest_prompt=200, context=2048)


def config_of(*settings: str) -> Config:
    return resolve(load_config("arithmetic", ["evaluate.every=50", *settings]))


def shape_like_1_5b() -> Shape:
    """Return the embedded model's shape, with the sizes of Qwen2.5-1.5B that cost time."""
    size = PUBLISHED["1.5B"]
    heads = {"heads": 12, "key_value_heads": 2, "head_size": 128, "inner": 8960}
    return replace(
        shape_of(config_of()), parameters=int(size.parameters), layers=28, hidden=1536, **heads
    )


def test_on_a_gpu_it_is_the_cost_model_of_an_h200() -> None:
    found = run_time(config_of("rollout.max_tokens=512"), FACTS, shape_like_1_5b(), GPU)
    assert isinstance(found, RunTime)
    work = Workload(  # old log-probs are recomputed in bfloat16
        rows=128, group=8, prompt=200, completion=512, checkpointing=False, forwards=1
    )
    asked = Workload(rows=256, group=1, prompt=200, completion=512)
    step = rollout_seconds(PUBLISHED["1.5B"], work) + update_seconds(PUBLISHED["1.5B"], work)
    evaluation = rollout_seconds(PUBLISHED["1.5B"], asked)
    assert found.run == pytest.approx(100 * step + 3 * evaluation)  # at steps 0, 50 and 100
    assert "on one H200 in bfloat16, within 20 %" in found.text()
    other = run_time(config_of(), FACTS, shape_like_1_5b(), OTHER)
    assert isinstance(other, RunTime)
    assert "(this machine has NVIDIA A100)" in other.device


def test_what_no_model_covers_is_unknown() -> None:
    for known, device, words in (
        (config_of(), GPU, "below 100M"),
        (config_of("environment.name=calculator"), GPU, "environment"),
    ):
        assert words in str(run_time(known, FACTS, shape_of(config_of()), device))


def test_the_numbers_of_a_measured_layer_stay_finite() -> None:
    """Wide layers and many layers must not overflow, or a plan would print numpy's warnings."""
    shape = shape_like_1_5b()
    layer = module._Layer(shape)
    x = np.ones((1, 4, shape.hidden), dtype=np.float32)
    with np.errstate(all="raise", under="ignore"):
        for _ in range(3):
            x = layer(x)
    assert np.isfinite(x).all()


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every measured call take a second."""
    ticks = count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))


@pytest.mark.usefixtures("one_second")
def test_on_a_cpu_one_layer_counts_for_all() -> None:
    config, shape = config_of("engine.max_concurrent=64"), shape_of(config_of())
    found = run_time(config, FACTS, shape, Device.here("cpu"))
    assert isinstance(found, RunTime)
    parts = shape.vocabulary / min(module.HEAD_ROWS, shape.vocabulary)
    decode = shape.layers + parts
    assert found.rollout == pytest.approx(128 / 64 * 48 * decode)
    assert found.evaluation == pytest.approx(256 / 64 * 48 * decode)
    per_pass = (128 * 48 + 16 * 200) * decode  # a second for each measured forward pass
    context = 200 + 48
    measured = max(1, module.MOST_TOKENS // context) * context
    assert found.update == pytest.approx(module.WITH_BACKWARD * per_pass / measured)


def test_the_command_names_hours_and_their_basis(capsys: pytest.CaptureFixture[str]) -> None:
    assert covey(["plan", "--set", "model.device=cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["time"]
    assert found["device"] == "this CPU"
    assert 0 < found["step"] < found["run"]
