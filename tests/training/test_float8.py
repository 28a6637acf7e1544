"""Settings of float8 engines: which correction is on, what is refused, and what a run says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config import load_config
from covey.config.resolve import resolve
from covey.engines.make import check_float8
from covey.errors import ConfigError
from covey.lab.checks.numerics import measure
from covey.loop import lost_note, train
from covey.records.folder import RunFolder
from covey.run import Run
from covey.stopping import StopSignal
from tests.conftest import build
from tests.trackers import Notes

FLOAT8 = "engine.dtype=float8"


def test_float8_turns_a_correction_on() -> None:
    def options(*settings: str) -> dict[str, Any]:
        return resolve(load_config("arithmetic", [FLOAT8, *settings])).objective.options

    assert options()["correction"] == "token_truncate"
    assert options("objective.correction=token_mask")["correction"] == "token_mask"
    assert options("train.old_logp=sampler")["correction"] == "none"
    for more in ((), ("objective.veto=1e-4",)):  # a veto drops completions, but weighs none
        with pytest.raises(ConfigError, match=r"with engine.dtype = 'float8', .*set objective"):
            options("objective.correction=none", *more)


def refused(*settings: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_float8(resolve(load_config("arithmetic", [FLOAT8, *settings])))
    assert "\n" not in str(error.value)
    return str(error.value)


class Gpu:
    """Stands for the functions of torch.cuda, on a machine with one GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")


def test_devices_and_settings_without_float8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs an NVIDIA GPU, but the engine's device is cpu" in refused("model.device=cpu")
    for setting, said in (("engine.kind=vllm", "not with vLLM"), ("adapter.rank=8", "rank = 8")):
        with pytest.raises(ConfigError, match=said):
            resolve(load_config("arithmetic", [FLOAT8, setting]))
    Gpu(monkeypatch, (8, 0))
    assert (
        "compute capability 8.9 (Ada), 9.0 (Hopper) or higher, but NVIDIA A100 has 8.0" in refused()
    )
    assert "engine's device is cpu" in refused("engine.kind=process", "engine.device=cpu")


def test_other_architectures_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Gpu(monkeypatch, (9, 0))
    check_float8(resolve(load_config("arithmetic", [FLOAT8])))
    build("gpt2").model.config.save_pretrained(tmp_path)  # only config.json
    said = refused(f"model.path={tmp_path}")
    assert said.endswith("needs a model with Llama's architecture, but "
                         f"{tmp_path} is a gpt2 model")  # fmt: skip


def test_a_run_says_what_was_lost() -> None:
    config = resolve(load_config("arithmetic", [FLOAT8]))
    metrics = {"debug/sampler_logp_diff_mean": 0.0312, "debug/sampler_chi2": 0.25}
    said = lost_note(config, metrics)
    assert "mean |logp - sampler_logp| 0.031, effective sample size 80.0%" in said
    assert "objective.correction = 'token_truncate'" in said
    sampler = resolve(load_config("arithmetic", [FLOAT8, "train.old_logp=sampler"]))
    assert "the ratio to the engine's log-probs corrects" in lost_note(sampler, metrics)


SMALL = [
    FLOAT8, "train.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2",
    "rollout.max_tokens=4", "evaluate.every=0", "train.mini_batches=1", "engine.max_concurrent=4",
    "task.train_size=9",
]  # fmt: skip


@pytest.fixture
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine run in Triton's interpreter, which a run would refuse."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        monkeypatch.setattr("covey.engines.make.check_float8", lambda config: None)


@pytest.mark.slow
@pytest.mark.usefixtures("_anywhere")
def test_a_run_measures_and_corrects_what_float8_rounds(tmp_path: Path) -> None:
    parts, notes = Run.build(resolve(load_config("arithmetic", SMALL))), Notes()
    assert not parts.engine.info.exact_logp
    assert not parts.settings.old_logp_from_sampler
    report = measure(parts, notes, updates=0, alone=1)
    gaps = {cause.name: cause.gap.mean for cause in report.causes}
    assert list(gaps).index("float8") == list(gaps).index("slots") + 1
    assert gaps["kernel"] < 1e-5
    assert 0.1 > gaps["float8"] > 20 * max(gaps["kernel"], gaps["slots"])
    folder = RunFolder.create(tmp_path / "run", "", {})
    train(parts, folder, [notes], StopSignal())
    (row,) = folder.steps()
    assert 3e-5 < row["debug/sampler_logp_diff_mean"] < 0.1
    assert 0.9 < row["policy/correction_ess"] < 1
    assert sum("mean |logp - sampler_logp|" in note for note in notes.notes) == 1
