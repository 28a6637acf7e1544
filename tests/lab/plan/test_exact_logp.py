"""What commands that run without an engine know about the exactness of its log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.engines.make import native_copy
from covey.engines.vllm.client import Client
from covey.engines.vllm.engine import Replica, VllmEngine
from covey.engines.vllm.sync import FileSync
from covey.lab.plan.equivalence import expected_exact_logp
from covey.models.load_model import load_language_model
from covey.run import Run


def config_of(*settings: str) -> Config:
    return resolve(load_config("arithmetic", ["model.device=cpu", *settings]))


@pytest.mark.parametrize(
    ("dtype", "exact"), [("auto", True), ("float32", True), ("bfloat16", False)]
)
def test_native_engines_declare_what_is_expected(dtype: str, exact: bool) -> None:
    config = config_of(f"model.dtype={dtype}")
    engines = [Run.build(config).engine, native_copy(config.model_dump())]
    assert [engine.info.exact_logp for engine in engines] == [exact, exact]
    assert expected_exact_logp(config) is exact


def test_a_vllm_engine_declares_what_is_expected(tmp_path: Path) -> None:
    model = load_language_model("embedded", device="cpu", dtype="float32")
    client = Client("http://127.0.0.1:9", 1.0)
    engine = VllmEngine(
        model=model, replicas=[Replica(client)], sync=FileSync(model, tmp_path),
        release=lambda: None, vllm_version="", restarts=0, patience=1.0,
    )  # fmt: skip
    assert not engine.info.exact_logp
    assert not expected_exact_logp(config_of("engine.kind=vllm", "model.dtype=float32"))


def test_float8_and_a_copy_in_bfloat16_are_not_exact() -> None:
    assert not expected_exact_logp(config_of("engine.dtype=float8"))
    copy = config_of("engine.kind=process", "overlap.mode=copy", "overlap.staleness=1")
    assert expected_exact_logp(copy)
    engine = copy.engine.model_copy(update={"device": "cuda"})  # "auto" is bfloat16 there
    assert not expected_exact_logp(copy.model_copy(update={"engine": engine}))
