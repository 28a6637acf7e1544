"""The forecast on a GPU, compared with the code that runs there and with measured memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("triton")


from covey.accel import fused_forward as fused
from covey.accel.fused_parameters import fuse_parameters
from covey.accel.packing import host_rows, pack
from covey.config import Config, load_config
from covey.config.resolve import resolve, sampling_of
from covey.engines.native import decode_graph as graph
from covey.engines.native.decode_graph import FusedDecoder
from covey.engines.native.kv_cache import KVShape
from covey.engines.protocol import Limits
from covey.lab.plan import model_shape
from covey.lab.plan.forecast import ALWAYS, Device, Forecast
from covey.lab.plan.memory import forecast, largest_micro_batch
from covey.lab.plan.model_shape import Pass, Saved, measure
from covey.lab.plan.task_facts import TaskFacts, task_facts
from covey.models.language_model import LanguageModel
from covey.parallel.passes import balanced_parts
from tests.conftest import build
from tests.lab.plan.test_memory import bytes_of, equal_rows, kept_bytes, llama

GPU = Device(kind="cuda", memory=139 * 2**30, name="an H200")
SHAPES = {
    "smollm2": transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, intermediate_size=1536, tie_word_embeddings=True,
    ),
    "qwen2.5": transformers.Qwen2Config(
        vocab_size=151936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, intermediate_size=8960, tie_word_embeddings=True,
    ),
}  # fmt: skip


class Attention(torch.autograd.Function):
    """Saves what the flash kernels save, which need a GPU, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, *keys: torch.Tensor) -> torch.Tensor:
        attended = torch.zeros_like(query)
        ctx.save_for_backward(query, *keys, attended, query.new_zeros(query.shape[1::-1]))
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise AssertionError("there is no backward pass")


def fused_bytes(model: LanguageModel, packed: Any) -> int:
    """Return the bytes autograd keeps of the fused forward pass."""
    ids, positions = packed.input_ids, packed.position_ids
    backbone = model.backbone
    return kept_bytes(model, lambda: fused.fused_backbone(backbone, ids, positions, packed.packing))


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_fused_layer_keeps_what_autograd_saves(
    name: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(query: Any, key: Any, value: Any, *_: Any, kept: Any) -> torch.Tensor:
        return Attention.apply(query, key, value)

    monkeypatch.setattr(fused, "flash_attention", attend)
    batch = equal_rows(2, 3, prompt=5, completion=8)
    packed = pack(host_rows(batch), torch.device("cpu"), varlen=True)
    one, two = (layers_of(name, layers, rank) for layers in (1, 2))
    tokens = len(packed.input_ids)
    count = Pass(rows=6, columns=12, tokens=tokens, chosen=48, packed=True)
    shape = replace(measure(llama(2, kind=name).model), rank=rank, adapted=14 if rank else 0)
    assert (tokens, shape.fuses, shape.head_norms) == (2 * 5 + 6 * 7, True, name == "qwen3")
    got = model_shape.layer_bytes(shape, 4, count, model_shape.FLASH, "cuda")
    # One number per token and norm is not worth a term.
    found = fused_bytes(two, packed) - fused_bytes(one, packed)
    heads = 4 * tokens * 8 if shape.head_norms else 0
    assert found - 2 * 4 * tokens - heads == got


def layers_of(name: str, layers: int, rank: int) -> LanguageModel:
    return llama(layers, rank=rank, kind=name, prepare=fuse_parameters)


@pytest.mark.parametrize(
    ("name", "size", "device", "kernels"),
    [
        ("llama", 2, "cuda", model_shape.FLASH),
        ("llama", 4, "cuda", model_shape.FUSED),
        ("llama", 4, "cpu", model_shape.EAGER),
        ("qwen2", 2, "cuda", model_shape.FLASH),
        ("gpt2", 2, "cuda", model_shape.EAGER),
        ("gemma3", 2, "cuda", model_shape.EAGER),
    ],
)
def test_the_kernels_of_a_model(name: str, size: int, device: str, kernels: Saved) -> None:
    assert model_shape.kernels_of(measure(build(name).model), size, device) == kernels


@pytest.mark.parametrize("budget", [1, 100, 300, 1000, 100_000])
def test_micro_batches_are_those_of_a_gpu(budget: int) -> None:
    batch = equal_rows(5, 4, prompt=30, completion=40)
    parts = balanced_parts(batch, budget)
    packed = [len(pack(host_rows(batch.rows(p)), torch.device("cpu"), varlen=True).input_ids)
              for p in parts]  # fmt: skip
    rows, prompts = largest_micro_batch(20, 4, 30, 40, budget)
    assert prompts * 30 + rows * 39 == max(packed)


@pytest.mark.parametrize("gigabytes", [0.0, 0.001])
def test_the_kv_cache_is_that_of_the_engine(embedded: LanguageModel, gigabytes: float) -> None:
    overrides = (
        f"engine.cache_gigabytes={gigabytes}",
        "rollout.prompts_per_step=9",
        "rollout.group_size=4",
        "evaluate.every=5",
        "engine.max_concurrent=100",
    )
    config = resolve(load_config(None, overrides))
    facts = task_facts(config)
    longest = facts.longest_prompt or 0
    found = forecast(config, GPU)
    keys = embedded.model.config
    shape = KVShape(
        layers=keys.num_hidden_layers, heads=keys.num_key_value_heads,
        size=keys.head_dim, dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    backend = graph.GraphBackend(embedded, FusedDecoder(embedded), shape, description="tried")
    sampling = sampling_of(config)
    for questions, samples in ((9, 4), (facts.held_out or 0, 1), (9, 4)):
        width = backend.width_for(min(sampling.max_concurrent, questions * samples))
        limits = Limits(sampling=sampling, requests=width, prompts=questions, prompt_tokens=longest)
        slots = backend.begin(limits, width)
    assert backend.cache is not None
    pool = backend.cache
    notes = (slots.uniforms, slots.tokens, slots.logps)
    mine = sum(t.nbytes for t in (*pool.layer_keys, *pool.layer_values, *notes))
    asked = sum(t.nbytes for t in (*pool.prompt_keys, *pool.prompt_values))
    assert (bytes_of(found, "KV cache"), bytes_of(found, "prompt KV cache")) == (mine, asked)
    # CUDA graphs hold the addresses: nothing is freed while the model is trained.
    kept = {part.name for part in found.parts if part.phases == ALWAYS}
    assert {"KV cache", "prompt KV cache", "decode graph", "gradients"} <= kept
    assert not {"fused weights", "embedding grad"} & {
        part.name for part in found.parts if part.bytes
    }


def update_config(shape: str, graphs: str) -> Config:
    prompts, budget, answer = {"smollm2": (16, 8192, 256), "qwen2.5": (4, 4096, 768)}[shape]
    rollout = (
        f"rollout.prompts_per_step={prompts}",
        f"rollout.max_tokens={answer}",
        "rollout.group_size=8",
    )
    train = (
        f"train.micro_batch_tokens={budget}",
        "train.logits_megabytes=512",
        "objective.beta=0.0",
    )
    return load_config(None, [*rollout, *train, "evaluate.every=0", f"train.graphs={graphs}"])


@pytest.mark.parametrize(
    ("shape", "prompt", "gibibytes"), [("smollm2", 128, 6.02), ("qwen2.5", 256, 33.94)]
)
def test_an_update_takes_what_it_took_on_an_h200(shape: str, prompt: int, gibibytes: float) -> None:
    """benchmarks/update_gpu.py: torch.cuda.max_memory_allocated, without checkpointing.

    When it was measured, the head's gradient of the step before was still there beside the new one.
    """
    found = update_forecast(shape, prompt, "off")
    # There was no engine, and torch does not count the CUDA context.
    beside = ("framework", "KV cache", "prompt KV cache", "decode graph")
    update = found.during("update") - sum(bytes_of(found, name) for name in beside)
    twice = 4 * SHAPES[shape].vocab_size * SHAPES[shape].hidden_size
    assert (update + twice) / 2**30 == pytest.approx(gibibytes, rel=0.03)


def update_forecast(shape: str, prompt: int, graphs: str) -> Forecast:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(SHAPES[shape])
    facts = TaskFacts(longest_prompt=prompt, held_out=1, measured=1)
    return forecast(update_config(shape, graphs), GPU, facts, measure(model))


def test_a_training_graph_keeps_padded_activations() -> None:
    off, auto = (update_forecast("smollm2", 128, g) for g in ("off", "auto"))
    parts = {part.name: part for part in auto.parts}
    assert parts["activations"].phases == parts["logits"].phases == ALWAYS
    assert "6,656 tokens" in parts["activations"].why
    ratio = bytes_of(auto, "activations") / bytes_of(off, "activations")
    assert 1.0 < ratio < 6_656 / 6_504 + 0.01
    assert auto.during("sample") > off.during("sample") + bytes_of(off, "activations")
