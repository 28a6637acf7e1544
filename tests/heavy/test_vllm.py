"""Training through real vLLM servers, on a CPU. Run it with `make test-heavy`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-heavy")

import torch
import transformers

from covey.config import load_config
from covey.config.resolve import resolve, task_of
from covey.embedded import CHECKPOINT
from covey.engines.draw import Distribution
from covey.engines.protocol import Sampling
from covey.engines.vllm.build import vllm_engine
from covey.engines.vllm.client import Client
from covey.engines.vllm.engine import Replica, VllmEngine
from covey.engines.vllm.server import ServerProcess, ServerSettings
from covey.engines.vllm.sync import FileSync, write_model
from covey.errors import EngineError
from covey.models.adapter import add_adapter
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.records.folder import RunFolder
from covey.rollout.episode import encode_prompts, generate
from covey.types import Rollout
from tests.heavy.runs import Run, check_run

pytestmark = pytest.mark.slow
SETTINGS = ['engine.kind="vllm"', "engine.vllm.memory=1", "engine.max_concurrent=128"]


def test_training_through_a_server_that_is_killed_once(tmp_path: Path, native: Run) -> None:
    run = Run(tmp_path / "run", engine__kind='"vllm"', engine__vllm__memory=1)
    run.wait_for_step(3)
    run.kill("covey.engines.vllm.serve")
    check_run(run, native)
    assert "it was restarted" in run.text()
    assert run.processes("covey.engines.vllm.serve") == [], "servers end with the run"


def test_training_through_vllm_in_the_trainers_process(tmp_path: Path, native: Run) -> None:
    settings = {
        "engine__vllm__memory": 1, "engine__vllm__colocated": "true", "save__rollouts": "true",
    }  # fmt: skip
    run = Run(tmp_path / "run", engine__kind='"vllm"', **settings)
    check_run(run, native, restarts=0)
    updates = [0, *(step["updates"] for step in run.steps())]
    for step, version in enumerate(updates[:-1], start=1):
        rows = RunFolder.open(run.folder).rollouts(step)
        assert {row["policy_version"] for row in rows} == {version}, "the weights before the step"


def documented(folder: Path, port: int) -> str:
    """The command for an external server on a CPU in docs/vllm.md, with a model of ours."""
    text = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    (command,) = re.findall(r"^(VLLM_SERVER_DEV_MODE=1 VLLM_CPU.*?)\n```", text, re.M | re.S)
    return command.replace("Qwen/Qwen2.5-1.5B-Instruct", str(folder)).replace("8000", str(port))


def test_the_documented_server_of_a_cpu_trains(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = documented(tmp_path / "model", port).replace("KVCACHE_SPACE=4", "KVCACHE_SPACE=1")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"], env={**os.environ, "PATH": path},
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        client = Client(f"http://127.0.0.1:{port}", 10.0)
        limit = time.monotonic() + 600
        while not client.healthy():
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < limit
            time.sleep(1)
        settings = {
            "engine__kind": '"vllm"', "engine__vllm__urls": f'["{client.url}"]', "train__steps": 2,
            "evaluate__every": 0, "rollout__prompts_per_step": 2, "rollout__group_size": 2,
            "rollout__max_tokens": 8,
        }  # fmt: skip
        run = Run(tmp_path / "run", "--model", str(tmp_path / "model"), **settings)
        assert run.end() == 0, run.text()
        assert max(step["debug/sampler_logp_diff_max"] for step in run.steps()) < 1e-4
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    """A server with a LoRA adapter of the embedded model, which tests change."""
    bare = load_language_model("embedded", device="cpu")
    model = add_adapter(bare, rank=4, alpha=8)
    made = vllm_engine(load_config(overrides=SETTINGS), model, cuda=False)
    yield made
    made.close()


def change(model: LanguageModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def trained(model: LanguageModel) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in model.model.named_parameters() if p.requires_grad]


def rollouts(engine: VllmEngine, sampling: Sampling) -> list[Rollout]:
    task = task_of(resolve(load_config("arithmetic")))
    prompts = encode_prompts(engine.model, task.train()[:4])
    groups = generate(prompts, engine=engine, model=engine.model, sampling=sampling, step=1)
    return [rollout for group in groups for rollout in group.rollouts]


def test_an_adapter_is_exact_after_each_sync(engine: VllmEngine) -> None:
    sampling = Sampling(group_size=2, max_tokens=16)
    seen = []
    for version in range(4):
        engine.load_weights(lambda: trained(engine.model), version)
        assert engine.gap < 1e-4
        found = rollouts(engine, sampling)
        assert {span.version for r in found for s in r.segments for span in s.versions} == {version}
        assert found == rollouts(engine, sampling), "seeds repeat"
        seen.append([r.segments[0].tokens for r in found])
        change(engine.model, version)
    assert len({str(one) for one in seen}) == 4, "each version samples otherwise"


def test_sampling_settings_mean_what_they_mean_natively(engine: VllmEngine) -> None:
    engine.load_weights(lambda: trained(engine.model), 10)
    greedy = Sampling(max_tokens=32, distribution=Distribution(temperature=0.0))
    one = Sampling(max_tokens=32, distribution=Distribution(top_k=1))
    texts = [r.text for r in rollouts(engine, greedy)]
    assert [r.text for r in rollouts(engine, one)] == texts
    assert all(p == 0.0 for r in rollouts(engine, one) for p in r.segments[0].sampler_logp)
    stopped = rollouts(engine, Sampling(max_tokens=32, stop_strings=("=",), group_size=4))
    for rollout in stopped:
        assert rollout.text.count("=") <= 1
        assert rollout.finish == "length" or rollout.text.endswith("=") or "=" not in rollout.text


def test_other_weights_on_a_server_end_the_run(engine: VllmEngine) -> None:
    stale = [(name, p.detach().clone()) for name, p in trained(engine.model)]
    change(engine.model, 99)
    calls = iter([stale, trained(engine.model)])  # sent, and compared with
    with pytest.raises(EngineError, match=r"does not have the trainer's weights: the log-probs"):
        engine.load_weights(lambda: next(calls), 11)


def test_a_server_with_another_model_ends_the_run_with_one_line(tmp_path: Path) -> None:
    model = load_language_model("embedded", device="cpu")
    write_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = ServerSettings(dtype="float32", cuda=False, context=512, max_concurrent=8)
    server = ServerProcess(settings=settings, model=tmp_path, log=tmp_path / "log")
    server.start()
    client = Client(server.url, 300.0)
    made = VllmEngine(
        model=model, replicas=[Replica(client)], sync=FileSync(model, tmp_path),
        release=server.stop, vllm_version="", restarts=1, patience=60.0,
    )  # fmt: skip
    try:
        server.wait(client, 600.0)
        with pytest.raises(EngineError, match=r"does it serve this model\?$"):
            made.load_weights(model.model.named_parameters, 0)
    finally:
        made.close()
