from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from covey.accel.packing import pack
from covey.accel.sizes import LIVE_COPIES
from covey.config import Config, load_config
from covey.config.resolve import resolve, sampling_of
from covey.embedded import CHECKPOINT
from covey.engines.native.backend import EagerBackend
from covey.engines.native.engine import NativeEngine
from covey.errors import ConfigError, ModelError
from covey.lab.plan import forecast as forecasts
from covey.lab.plan import model_shape
from covey.lab.plan.forecast import ALWAYS, MICRO_BATCH_STEP, Device, Forecast, Part
from covey.lab.plan.memory import MARGIN, changed, forecast, memory_findings, settings_that_fit
from covey.lab.plan.model_shape import Pass, measure, shape_of
from covey.lab.plan.task_facts import ASSUMED_PROMPT, TaskFacts, task_facts
from covey.models.adapter import add_adapter, save_adapter
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model, wrap
from covey.models.logp import batch_logp
from covey.parallel.passes import micro_batches
from covey.rollout.episode import EncodedPrompt
from covey.types import Batch, HostRows, Prompt
from tests.conftest import build, rollouts_of
from tests.models.test_gguf import tiny, write_gguf

ROOT = Path(__file__).parents[3]
CPU = Device(kind="cpu", memory=2**34, name="a laptop")
GPU = Device(kind="cuda", memory=80 * 2**30, name="a GPU")


def config_of(*overrides: str) -> Config:
    return load_config(None, overrides)


def llama(
    layers: int,
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    kind: str = "llama",
    prepare: Callable[[nn.Module], None] | None = None,
) -> LanguageModel:
    """Return a small model with Llama layers; `prepare` changes its backbone before the adapter."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(
            kind, vocab_size=262, hidden_size=48, num_hidden_layers=layers, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, intermediate_size=100, tie_word_embeddings=True,
            max_position_embeddings=1024, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    wrapped = wrap(model.to(dtype), tokenizer)
    if prepare is not None:
        prepare(wrapped.backbone)
    wrapped = add_adapter(wrapped, rank=rank) if rank else wrapped
    wrapped.model.train()
    return wrapped


def equal_rows(groups: int, group_size: int, prompt: int, completion: int) -> Batch:
    """Return a batch of prompts of one length and completions of one length: the worst case."""
    rows = groups * group_size
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(6, 260, (groups, prompt), generator=generator)
    return Batch(
        prompt_tokens=prompts.repeat_interleave(group_size, 0),
        prompt_lengths=torch.full((rows,), prompt),
        tokens=torch.randint(6, 260, (rows, completion), generator=generator),
        lengths=torch.full((rows,), completion),
        mask=torch.ones(rows, completion, dtype=torch.bool),
        sampler_logp=torch.zeros(rows, completion),
        rewards=torch.zeros(rows, dtype=torch.float64),
        success=torch.zeros(rows, dtype=torch.bool),
        group=torch.arange(groups).repeat_interleave(group_size),
        truncated=torch.zeros(rows, dtype=torch.bool),
    )


def saved_bytes(model: LanguageModel, batch: Batch) -> int:
    """Return the bytes autograd keeps of a batch's forward pass."""
    return kept_bytes(model, lambda: batch_logp(model, batch))


def kept_bytes(model: LanguageModel, forward: Callable[[], object]) -> int:
    """Return the bytes autograd keeps, without weights and integers."""
    weights = {p.untyped_storage().data_ptr() for p in model.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights and tensor.is_floating_point():
            kept[address] = tensor  # so that the address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("completion", [60, 260])  # attention as two products, and fused
def test_a_layer_keeps_what_autograd_saves(completion: int, dtype: torch.dtype, rank: int) -> None:
    batch = equal_rows(2, 3, prompt=20, completion=completion)
    one, two = llama(1, dtype, rank), llama(2, dtype, rank)
    packed = pack(HostRows.of(batch), torch.device("cpu"), varlen=False)
    shape = replace(measure(llama(2).model), rank=rank, adapted=14 if rank else 0)
    rows, columns = packed.packing.rows.shape
    tokens = len(packed.input_ids)
    count = Pass(rows=rows, columns=columns, tokens=tokens, chosen=6 * completion, packed=True)
    got = model_shape.layer_bytes(shape, dtype.itemsize, count, model_shape.EAGER, "cpu")
    # A number for each token and norm is not worth a term.
    assert saved_bytes(two, batch) - saved_bytes(one, batch) == pytest.approx(got, rel=0.01)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma3"])
@pytest.mark.parametrize("rank", [0, 5])
def test_parameters_are_those_of_the_model(name: str, rank: int) -> None:
    model = build(name)
    shape = measure(model.model, rank)
    before = sum(p.numel() for p in model.model.parameters())
    if rank:
        model = add_adapter(model, rank=rank)
    parameters = list(model.model.parameters())
    assert shape.parameters == before
    assert shape.parameters + shape.added == sum(p.numel() for p in parameters)
    assert shape.trained == sum(p.numel() for p in parameters if p.requires_grad)
    assert shape.head_trained == model.head.linear.weight.requires_grad


def test_an_adapter_with_targets_and_fully_trained_modules() -> None:
    targets, copies = ("q_proj", "down_proj"), ("lm_head",)
    shape = measure(build("llama").model, 3, targets, copies)
    model = add_adapter(build("llama"), rank=3, targets=targets, also_train=copies)
    assert shape.trained == sum(p.numel() for p in model.model.parameters() if p.requires_grad)
    assert shape.head_trained
    with pytest.raises(ConfigError, match=r"adapter.targets.*nothing"):
        measure(build("llama").model, 3, ("nothing",))


def test_no_weights_are_needed(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, tmp_path)
    path = f"model.path={tmp_path}"
    assert forecast(config_of(path), CPU).parts == forecast(config_of(), CPU).parts
    with pytest.raises(ModelError, match="nowhere"):
        shape_of(config_of("model.path=./nowhere"))


def test_the_shape_of_a_gguf_file_comes_from_its_header(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    config = config_of(f"model.path={path}")
    assert shape_of(config) == measure(tiny())
    assert task_facts(config).measured == 64


def test_the_shape_of_a_saved_adapter(tmp_path: Path) -> None:
    model = load_language_model("embedded", device="cpu")
    model = add_adapter(model, rank=6, targets=("v_proj",), base="embedded")
    trained = {n: p for n, p in model.model.named_parameters() if p.requires_grad}
    save_adapter(model, trained, tmp_path)
    shape = shape_of(config_of(f"model.path={tmp_path}"))
    assert (shape.rank, shape.trained) == (6, sum(p.numel() for p in trained.values()))
    # The weights under it are not the initial ones: the reference is a copy.
    assert bytes_of(forecast(config_of(f"model.path={tmp_path}"), CPU), "reference") > 0


def part_of(found: Forecast, name: str) -> Part:
    (part,) = [p for p in found.parts if p.name == name]
    return part


def bytes_of(found: Forecast, name: str) -> int:
    return part_of(found, name).bytes


@pytest.mark.parametrize("budget", [1, 300, 1000, 100_000])
def test_micro_batches_are_those_of_training(budget: int) -> None:
    overrides = ("rollout.prompts_per_step=3", "rollout.group_size=4", "rollout.max_tokens=40")
    found = forecast(config_of(*overrides, f"train.micro_batch_tokens={budget}"), CPU)
    prompt = task_facts(resolve(config_of())).longest_prompt
    assert prompt is not None
    batch = equal_rows(3, 4, prompt=prompt, completion=40)
    rows = next(micro_batches(batch, budget))
    tokens = len(pack(HostRows.of(batch.rows(rows)), torch.device("cpu"), varlen=False).input_ids)
    (part,) = [p for p in found.parts if p.name == "activations"]
    assert part.why == f"{tokens:,} tokens packed, in {len(rows)} rows"
    # Gradients are kept during a pass only if an earlier one accumulated them.
    (gradients,) = [p for p in found.parts if p.name == "gradients"]
    assert ("update" in gradients.phases) == (len(rows) < 12)


def test_the_kv_cache_is_that_of_the_engine(embedded: LanguageModel) -> None:
    config = resolve(
        config_of("rollout.prompts_per_step=3", "rollout.group_size=4", "evaluate.every=0")
    )
    found = forecast(config, CPU)
    longest = task_facts(config).longest_prompt or 0
    prompts = [Prompt(id=str(n), task="", target="", messages=()) for n in range(3)]
    questions = [EncodedPrompt(prompt=p, tokens=(7,) * longest) for p in prompts]
    sampler = NativeEngine(embedded)
    rollouts_of(sampler, questions, step=0, sampling=sampling_of(config))
    assert isinstance(sampler.backend, EagerBackend)
    assert sampler.backend.spare is not None
    beside = 12 * config.rollout.max_tokens * 16  # uniforms, tokens and log-probs
    assert bytes_of(found, "KV cache") == sampler.backend.spare.bytes + beside


def test_the_float8_copies_are_those_of_the_decoder(embedded: LanguageModel) -> None:
    pytest.importorskip("triton")
    from covey.engines.native.decode_graph import Float8Decoder

    products = [
        product.weight
        for layer in Float8Decoder(embedded).products
        for product in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    found = forecast(config_of("engine.dtype=float8"), GPU)
    expected = sum(w.values.nbytes + w.exponents.nbytes for w in products)
    assert bytes_of(found, "float8 weights") == expected
    plain = forecast(config_of(), GPU)
    assert not [part for part in plain.parts if "float8" in part.name]
    cache = forecast(config_of("engine.kv_dtype=float8"), GPU)
    assert 2 * bytes_of(cache, "prompt KV cache") == bytes_of(plain, "prompt KV cache")
    assert bytes_of(cache, "KV cache") < bytes_of(plain, "KV cache")


def test_a_prefill_graph_is_kept_if_the_pass_is_small() -> None:
    shape = shape_of(config_of())
    small, large = (
        forecast(config_of("evaluate.every=0"), GPU, shape=replace(shape, layers=layers))
        for layers in (2, 200_000)
    )
    part = part_of(small, "prefill graph")
    tokens = int(part.why.split()[-3].replace(",", ""))
    assert tokens % 256 == 0
    # Per token: two float32 and four 16-bit streams, the queries, gate, up and their product.
    per_token = (2 * 4 + 4 * 2) * 128 + (128 + 3 * 384) * 2
    assert (part.bytes, part.phases) == (tokens * per_token, ALWAYS)
    assert bytes_of(large, "prefill graph") == 0
    assert bytes_of(forecast(config_of("model.dtype=float32"), GPU), "prefill graph") == 0


@pytest.mark.parametrize(
    ("overrides", "weights", "phases"),
    [
        (("reference.kind=frozen",), 1, ALWAYS),
        (("reference.kind=offloaded",), 1, ("prepare",)),
        (("reference.kind=moving",), 3, ALWAYS),  # bfloat16, and float32 to move in
        (("reference.kind=renewed",), 3, ALWAYS),
        (("reference.kind=server", "reference.url=http://127.0.0.1:1"), 0, ALWAYS),
        (("objective.beta=0.0",), 0, ALWAYS),
        (("adapter.rank=4",), 0, ALWAYS),
        (("adapter.rank=4", "reference.kind=adapter_off"), 0, ALWAYS),
    ],
)
def test_the_memory_of_each_kind_of_reference(
    overrides: tuple[str, ...], weights: int, phases: tuple[str, ...]
) -> None:
    found = forecast(config_of("objective.beta=0.04", *overrides), GPU)
    (part,) = [p for p in found.parts if p.name == "reference"]
    assert part.bytes == weights * bytes_of(forecast(config_of(), GPU), "weights")
    assert part.phases == phases


def test_old_logp_takes_a_no_grad_pass() -> None:
    once = ("model.dtype=bfloat16", "train.mini_batches=1", "objective.beta=0")
    for options in (("objective.correction=token_truncate",), ("train.epochs=2",)):
        assert bytes_of(forecast(config_of(*once, *options), CPU), "no-grad pass") > 0
    assert bytes_of(forecast(config_of(*once), CPU), "no-grad pass") == 0


def test_the_optimizer_of_a_model_in_bfloat16() -> None:
    parameters = shape_of(config_of()).parameters
    on_gpu, on_cpu = forecast(config_of(), GPU), forecast(config_of(), CPU)
    names = ("weights", "master weights", "moments", "gradients")
    assert [bytes_of(on_gpu, n) for n in names] == [n * parameters for n in (2, 4, 8, 4)]
    assert [bytes_of(on_cpu, n) for n in names] == [n * parameters for n in (4, 0, 8, 4)]
    compact = [forecast(config_of("optimizer.state=compact"), d) for d in (GPU, CPU)]
    assert [bytes_of(compact[0], n) for n in names] == [n * parameters for n in (2, 2, 4, 4)]
    assert [bytes_of(compact[1], n) for n in names] == [n * parameters for n in (4, 0, 4, 4)]
    trained = shape_of(config_of("adapter.rank=4")).trained
    adapter = forecast(config_of("adapter.rank=4"), GPU)
    assert [bytes_of(adapter, n) for n in names[1:]] == [n * trained for n in (4, 8, 4)]
    assert bytes_of(adapter, "head gradient") == 0


def test_the_peak_is_that_of_the_fullest_phase() -> None:
    found = forecast(
        config_of("model.gradient_checkpointing=true", "engine.max_concurrent=1000"), GPU
    )
    assert found.peak == max(found.row()["phases"].values()) == found.during(found.peak_phase)
    assert found.tensors == found.peak - forecasts.FRAMEWORK["cuda"][0]
    assert (
        json.loads(json.dumps(found.row()))["suggested_micro_batch_tokens"]
        == found.suggested_micro_batch_tokens
    )
    assert found.text().startswith("memory: ")
    tight = replace(found, device=replace(GPU, memory=found.peak - 1))
    assert (found.fits, tight.fits) == (True, False)
    assert "DOES NOT FIT" in tight.text()


def test_checkpointing_and_smaller_chunks_take_less() -> None:
    long = ("rollout.max_tokens=400", "train.logits_megabytes=1")
    plain, again = (
        forecast(config_of(*long, f"model.gradient_checkpointing={on}"), GPU)
        for on in ("false", "true")
    )
    # Of two layers one is kept whole, and the other's input.
    assert 0.5 < bytes_of(again, "activations") / bytes_of(plain, "activations") < 0.75
    rows = 2**20 // (262 * 6)  # logits, and their gradient in bfloat16
    assert bytes_of(plain, "logits") == rows // 128 * 128 * 262 * 6
    on_cpu = forecast(config_of(*long, "model.dtype=bfloat16"), CPU)
    rows = 2**20 // (262 * 4 * LIVE_COPIES)
    assert bytes_of(on_cpu, "logits") == rows * 262 * 4 * LIVE_COPIES


def test_offloaded_layer_inputs_are_not_on_the_gpu() -> None:
    long = ("model.gradient_checkpointing=true", "rollout.max_tokens=400")
    device, plain = (
        forecast(config_of(*long, f"model.offload_activations={on}"), GPU, shape=deep)
        for on in ("true", "false")
        for deep in [replace(shape_of(config_of()), layers=30)]
    )
    tokens = int(part_of(plain, "activations").why.split()[0].replace(",", ""))
    stream = 4 * tokens * shape_of(config_of()).hidden  # float32
    assert bytes_of(plain, "activations") - bytes_of(device, "activations") == 28 * stream
    assert "main memory" in part_of(device, "activations").why
    on_cpu = [
        bytes_of(forecast(config_of(*long, f"model.offload_activations={on}"), CPU), "activations")
        for on in ("true", "false")
    ]
    assert on_cpu[0] == on_cpu[1]


@pytest.mark.parametrize(("tokens", "phases"), [(2028, ALWAYS), (2029, ("update",))])
def test_long_rows_train_without_a_graph_that_keeps_their_activations(
    tokens: int, phases: tuple[str, ...]
) -> None:
    facts = TaskFacts(longest_prompt=20, measured=1, held_out=1)
    shape = shape_of(config_of())
    found = forecast(config_of(f"rollout.max_tokens={tokens}"), GPU, facts, shape)
    assert part_of(found, "activations").phases == phases


def test_the_suggested_micro_batch_is_the_largest_that_leaves_a_tenth() -> None:
    overrides = ("rollout.prompts_per_step=64", "rollout.max_tokens=200")
    small = replace(CPU, memory=2**30)
    budget = forecast(config_of(*overrides), small).suggested_micro_batch_tokens
    assert budget is not None
    assert budget % MICRO_BATCH_STEP == 0
    peaks = [
        forecast(config_of(*overrides, f"train.micro_batch_tokens={b}"), small).peak
        for b in (budget, budget + MICRO_BATCH_STEP)
    ]
    assert peaks[0] <= (1 - MARGIN) * small.memory < peaks[1]
    nothing = forecast(config_of(*overrides), replace(CPU, memory=2**28))
    assert nothing.suggested_micro_batch_tokens is None
    # If one micro-batch holds a whole step, there is nothing to suggest.
    assert (
        forecast(config_of(), CPU).suggested_micro_batch_tokens
        == config_of().train.micro_batch_tokens
    )


SEVEN_BILLION = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("gibibytes", "settings"),
    [
        (280, None),
        (140, {"engine.max_concurrent", "optimizer.state", "train.micro_batch_tokens"}),
        (100, {"adapter.rank"}),
        (40, {"model.gradient_checkpointing", "engine.max_concurrent", "adapter.rank"}),
        (24, {"model.path"}),  # nothing helps: the finding says how much memory it takes
    ],
)
def test_a_run_that_does_not_fit_gets_settings_that_do(
    gibibytes: float, settings: set[str] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_BILLION))
    rollout = ("prompts_per_step=64", "group_size=8", "max_tokens=1024")
    config = resolve(config_of(f"model.path={tmp_path}", *(f"rollout.{r}" for r in rollout)))
    facts, shape = TaskFacts(longest_prompt=256, held_out=256, measured=1), shape_of(config)
    assert shape.parameters == 7_615_616_512
    device = Device.gpu(gibibytes)
    found = forecast(config, device, facts, shape)
    assert found.fits == (settings is None)
    findings = list(memory_findings(config, found, facts, shape))
    assert [set(finding.settings) for finding in findings] == [settings] * (not found.fits)
    for finding in findings:
        assert finding.title == f"the run needs 196.8 GiB, but one GPU has {gibibytes}.0 GiB"
    changes = settings_that_fit(config, device, facts, shape)
    assert (changes is None) == (gibibytes == 24)
    if changes is not None:
        peak = forecast(changed(config, changes), device, facts).peak
        assert peak <= (1 - MARGIN) * device.memory


def test_prompts_that_cannot_be_measured_are_assumed(tmp_path: Path) -> None:
    files = [f"task.{name}_file={tmp_path}/none.jsonl" for name in ("train", "held_out")]
    config = resolve(config_of("task.name=jsonl", *files))
    facts = task_facts(config)
    assert facts.longest_prompt is None
    assert "none.jsonl" in facts.problem
    (note,) = forecast(config, CPU).notes
    assert f"prompts of {ASSUMED_PROMPT} tokens, which could not be measured" in note
    assert "none.jsonl" in note


def test_main_memory_is_what_a_container_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(forecasts, "CGROUP_LIMIT", limit)
    whole = forecasts.main_memory()
    limit.write_text("max\n")
    assert forecasts.main_memory() == whole
    limit.write_text("12345\n")
    assert forecasts.main_memory() == 12345
    assert Device.here("cpu").memory == 12345


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The benchmark in this process; on a CPU it measures in a process of its own."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import memory

    def measure(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["memory.py", *arguments])
        memory.main()

    return measure


@pytest.mark.slow
def test_a_run_takes_what_was_forecast(tmp_path: Path, measured: Callable[..., None]) -> None:
    measured("--only", "embedded", "--output", str(tmp_path / "cpu.json"))
    ratio = json.loads((tmp_path / "cpu.json").read_text())["settings"]["embedded"]["ratio"]
    assert abs(ratio - 1) <= 0.25


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_takes_what_was_forecast_on_a_gpu(tmp_path: Path) -> None:
    words = ["--device", "cuda", "--only", "smollm2-lora", "--output", str(tmp_path / "gpu.json")]
    command = [sys.executable, str(ROOT / "benchmarks/memory.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
