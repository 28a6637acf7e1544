"""Every script of benchmarks/ and docs/images can start, and calls of the package that were wrong."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PARTS = ("cluster_model", "described", "own_process")
"""Files without a command."""


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.py")), ids=lambda file: file.stem)
def test_a_benchmark_says_how_to_call_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if file.stem.startswith("decode_"):
        pytest.importorskip("triton")
    with mock.patch.dict(os.environ):  # some scripts choose threads when they are imported
        script = importlib.import_module(file.stem)
    if not hasattr(script, "main"):
        assert file.stem in PARTS or file.stem.startswith("speed_")
        return
    monkeypatch.setattr(sys, "argv", [file.name, "--help"])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    assert f"usage: {file.name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docs" / "images").glob("*.py")), ids=lambda file: file.stem
)
def test_a_script_of_the_pictures_finds_what_it_imports(file: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"picture_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_policy_that_learns_nothing_has_the_same_answers_correct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import aa_study

    small = {"train.steps": 1, "evaluate.every": 1, "evaluate.prompts": 32}
    small |= {"rollout.prompts_per_step": 2, "train.mini_batches": 1}
    monkeypatch.setattr(aa_study, "SETTINGS", {**aa_study.SETTINGS, **small})
    first, last = aa_study.train_one("frozen", seed=0)["points"]
    assert (first["step"], last["step"], last["updates"]) == (0, 1, 1)
    assert first["correct"] == last["correct"]
    assert 0 < sum(last["correct"].values()) < len(last["correct"]) == 32


def test_a_cache_for_half_of_the_completions_generates_all_of_them() -> None:
    from speed_long import sampler_long
    from speed_report import Report
    from speed_sizes import sizes_for

    sizes, report = sizes_for("cpu"), Report(None, {"copy_bytes_per_s": 1e12}, {})
    with report.section("sampler_long"):
        sampler_long(sizes, report)
    *steps, half = report.sections["sampler_long"]["rows"]
    assert [row["length"] for row in steps] == [16, 48]
    for row in steps:
        assert row["tokens_per_s"] == pytest.approx(8 / (row["step_ms"] / 1e3))
        assert row["forecast_gib"] > 0
    assert (half["length"], half["preemptions"]) == (32, 0)  # a CPU's backend has no pages


def test_each_staleness_trains_as_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import overlap

    out = tmp_path / "shape.json"
    words = ["shape", "--steps", "4", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["overlap.py", *words])
    overlap.main()
    arms = json.loads(out.read_text())["arms"]
    assert [arm["arm"] for arm in arms] == ["staleness 0", "staleness 1", "staleness 3"]
    for arm in arms:
        assert arm["steps_per_second"] == pytest.approx(4 / sum(arm["seconds"]))
        assert arm["speedup"] == arm["steps_per_second"] / arms[0]["steps_per_second"]
