"""The fused forward pass with kernels interpreted on the CPU; test_gpu.py uses a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from covey.accel import activation_offload
from covey.accel import fused_forward as fused
from covey.accel.activation_offload import checkpoint_layers
from covey.accel.attention_kernels import VarlenRows
from covey.accel.fused_forward import adapted, fused_backbone, is_llama_like
from covey.accel.fused_parameters import fuse_adapters, fuse_parameters, fused_view
from covey.accel.packing import pack, pack_prompts
from covey.models.adapter import adapter_off, add_adapter, perturbed_adapter, set_dropout
from covey.models.language_model import LanguageModel, packed_forward
from covey.policy.checkpoint import save_policy
from covey.policy.optimizer import MasterAdamW
from covey.policy.policy import Policy
from covey.types import Batch, HostRows
from tests.conftest import ARCHITECTURES, build, make_batch

ARCHITECTURES["qwen3"] = lambda: transformers.Qwen3ForCausalLM(
    transformers.Qwen3Config(
        vocab_size=262, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=64, max_position_embeddings=256,
    )
)  # fmt: skip
CPU = torch.device("cpu")
SETTINGS = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1e9}


def shared_batch() -> Batch:
    """Three rows with one prompt, two with another, one alone; one has a completion of one token."""
    batch = make_batch(rows=6, longest=3, seed=3)
    rows = [0, 4, 0, 3, 4, 0]
    lengths = batch.lengths.clone()
    lengths[2] = 1
    kept = torch.arange(batch.mask.shape[1]) < lengths[:, None]
    return replace(
        batch,
        prompt_tokens=batch.prompt_tokens[rows, :4],  # kernels are interpreted token by token
        prompt_lengths=batch.prompt_lengths[rows].clamp(max=4),
        lengths=lengths,
        mask=batch.mask & kept,
    )


def per_row(
    query, key, value, spans: VarlenRows, scale: float, window=None, kept=None
) -> torch.Tensor:
    """Flash attention's result, for devices without it."""
    shared = query.shape[1] // key.shape[1]
    results = []
    bounds = list(zip(spans.query_starts.tolist(), spans.key_starts.tolist(), strict=True))
    for (q0, k0), (q1, k1) in itertools.pairwise(bounds):
        q = query[q0:q1].transpose(0, 1)
        k, v = (t[k0:k1].transpose(0, 1).repeat_interleave(shared, 0) for t in (key, value))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q.device)
        seen = seen.tril(k1 - k0 - (q1 - q0))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        results.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(results)


def both_ways(
    model: LanguageModel, batch: Batch, *, flash: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    host = HostRows.of(batch)
    packed = pack(host, CPU, varlen=flash)
    ours = fused_backbone(model.backbone, packed.input_ids, packed.position_ids, packed.packing)[
        packed.predictor
    ]
    plain = pack(host, CPU, varlen=False)
    return ours, packed_forward(model.backbone, plain)[plain.predictor]


def gradients(model: LanguageModel, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    model.model.zero_grad()
    pull = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    (hidden * pull).sum().backward()
    return {n: p.grad for n, p in model.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("architecture", "joint", "flash"),
    [
        ("llama", False, False),
        ("llama", True, True),
        ("qwen2", True, False),
        ("qwen2", False, True),
        ("qwen3", True, True),
    ],
)
def test_hidden_states_and_gradients_are_as_exact_as_the_models_own(
    architecture: str, joint: bool, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "flash_attention", per_row)
    model, exact = build(architecture), build(architecture, torch.float64)
    assert is_llama_like(model.model)
    if joint:
        fuse_parameters(model.backbone)
    batch = shared_batch()
    ours, own = both_ways(model, batch, flash=flash)
    packed = pack(HostRows.of(batch), CPU, varlen=False)
    right = packed_forward(exact.backbone, packed)[packed.predictor]
    results = [{"": t.detach(), **gradients(model, t)} for t in (ours, own)]
    expected = {"": right.detach(), **gradients(exact, right)}
    assert expected.keys() == results[0].keys() == results[1].keys()
    scale = max(float(g.abs().max()) for name, g in expected.items() if name)
    for name, value in expected.items():
        errors = [float((result[name] - value).abs().max()) for result in results]
        limit = 1e-5 * (scale if name else float(value.abs().max()))
        assert errors[0] < max(limit, 2 * errors[1]), name


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert set(found) == set(expected)
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, grad in expected.items():
        assert float((found[name] - grad).abs().max()) < tolerance * scale, name


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("targets", "side_by_side"),
    [(("q_proj", "down_proj"), False), (("all-linear",), False), (("all-linear",), True)],
)
def test_adapters_give_the_gradients_of_pefts_own_layers(
    architecture: str, targets: tuple[str, ...], side_by_side: bool
) -> None:
    plain = build(architecture)
    fuse_parameters(plain.backbone)
    model = add_adapter(plain, rank=3, alpha=4, targets=targets, also_train=["norm"])
    if side_by_side:
        fuse_adapters(model.backbone, "default")
    with perturbed_adapter(model):
        ours, own = both_ways(model, shared_batch(), flash=False)
        expected, found = gradients(model, own), gradients(model, ours)
    assert_same_gradients(found, expected)
    assert float((ours - own).detach().abs().max()) < 1e-5 * float(own.detach().abs().max())


def test_an_adapter_that_is_turned_off_changes_nothing() -> None:
    plain = build("llama")
    fuse_parameters(plain.backbone)
    batch = shared_batch()
    before = both_ways(plain, batch, flash=False)[0].detach()
    model = add_adapter(plain, rank=2)
    with perturbed_adapter(model), adapter_off(model) as off:
        assert torch.equal(both_ways(off, batch, flash=False)[0], before)


def test_frozen_weights_cost_no_gradient_products() -> None:
    """A pass with an adapter takes the two products of each frozen weight, not three."""
    model = build("llama")
    fuse_parameters(model.backbone)
    batch = shared_batch()

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            hidden = both_ways(model, batch, flash=False)[0]
            gradients(model, hidden)
        counts = counter.get_flop_counts()["Global"]
        return sum(n for op, n in counts.items() if "mm" in str(op))

    full = flops()
    model = add_adapter(model, rank=1)
    assert flops() < 0.8 * full


def test_an_adapter_with_dropout_runs_pefts_own_layers() -> None:
    model = add_adapter(build("llama"), rank=2)
    layer = model.backbone.layers[0].mlp.down_proj
    found = adapted(layer)
    assert found is not None
    assert found.low_rank is not None
    set_dropout(model, 0.1)
    assert adapted(layer) is None


def test_the_fused_forward_supports_fully_trained_modules() -> None:
    plain = build("llama")
    fuse_parameters(plain.backbone)
    also_train = ["q_proj", "k_proj", "v_proj"]
    model = add_adapter(plain, rank=2, targets=["o_proj"], also_train=also_train)
    with perturbed_adapter(model):
        ours, own = both_ways(model, shared_batch(), flash=False)
        torch.testing.assert_close(ours, own, atol=1e-4, rtol=1e-5)
        expected, found = gradients(model, own), gradients(model, ours)
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointing_recomputes_and_changes_nothing(
    offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST", 0)
    model = build("llama")
    model.model.train()
    batch = shared_batch()
    plain = gradients(model, both_ways(model, batch, flash=False)[0])
    checkpoint_layers(model.model, offload=offload)
    calls = []
    original = fused._layer

    def counted(*arguments):
        calls.append(1)
        return original(*arguments)

    fused._layer = counted
    try:
        again = gradients(model, both_ways(model, batch, flash=False)[0])
    finally:
        fused._layer = original
    assert len(calls) == 2 * len(model.backbone.layers)
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, atol=1e-6, rtol=1e-6)


def test_collected_keys_and_values_equal_the_models_cache() -> None:
    model = build("qwen2")
    prompts = [(5, 6, 7, 8), (9, 10), (11, 12, 13)]
    packed = pack_prompts(prompts, CPU)
    collected: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        monkey = pytest.MonkeyPatch()
        monkey.setattr(fused, "flash_attention", per_row)
        hidden = fused_backbone(
            model.backbone, packed.input_ids, packed.position_ids, packed.packing, collected.append
        )
        monkey.undo()
        start = 0
        for number, prompt in enumerate(prompts):
            cache = transformers.DynamicCache()
            out = model.backbone(
                torch.tensor([prompt]), past_key_values=cache, use_cache=True
            ).last_hidden_state
            torch.testing.assert_close(
                hidden[packed.predictor[number]], out[0, -1], atol=1e-5, rtol=0
            )
            for (key, value), layer in zip(collected, cache.layers, strict=True):
                part = slice(start, start + len(prompt))
                for ours, own in ((key, layer.keys), (value, layer.values)):
                    torch.testing.assert_close(
                        ours[part].transpose(0, 1), own[0], atol=1e-5, rtol=0
                    )
            start += len(prompt)


def test_shared_prompts_are_collected_once() -> None:
    model, batch = build("llama"), shared_batch()
    monkey = pytest.MonkeyPatch()
    monkey.setattr(fused, "flash_attention", per_row)
    packed = pack(HostRows.of(batch), CPU, varlen=True)
    assert packed.packing.shared is not None
    collected: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        fused_backbone(
            model.backbone, packed.input_ids, packed.position_ids, packed.packing, collected.append
        )
        first = model.backbone.layers[0]
        normed = first.input_layernorm(model.backbone.embed_tokens(packed.input_ids))
        value = first.self_attn.v_proj(normed)
    monkey.undo()
    torch.testing.assert_close(collected[0][1].flatten(1), value, atol=1e-5, rtol=0)


def test_fused_weights_are_one_tensor_and_stay_parameters() -> None:
    model = build("qwen2")
    before = {n: p.detach().clone() for n, p in model.model.named_parameters()}
    fuse_parameters(model.backbone)
    attention = model.backbone.layers[1].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    whole = fused_view(parts)
    assert whole is not None
    assert torch.equal(whole, torch.cat([p.detach() for p in parts]))
    assert fused_view([attention.q_proj.weight, attention.v_proj.weight]) is None
    with torch.no_grad():
        parts[1].fill_(7.0)
    assert bool((whole[len(parts[0]) : len(parts[0]) + len(parts[1])] == 7.0).all())
    with torch.no_grad():
        parts[1].copy_(before["model.layers.1.self_attn.k_proj.weight"])
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.is_leaf


def test_gradients_of_bfloat16_weights_add_up_in_float32_sinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two halves of a batch, once with gradient sinks and once with autograd and its rounding."""
    monkeypatch.setattr(fused, "flash_attention", per_row)
    exact = build("qwen2")
    model = build("qwen2", torch.bfloat16)
    with torch.no_grad():
        for one, other in zip(exact.model.parameters(), model.model.parameters(), strict=True):
            one.copy_(other)
    fuse_parameters(model.backbone)
    optimizer = MasterAdamW(model.model.named_parameters(), **SETTINGS)
    from covey.accel.fused_parameters import attach_grad_sinks

    for parameter in model.model.parameters():
        parameter._post_accumulate_grad_hooks.clear()  # those for a CPU
    attach_grad_sinks(optimizer._rounded())
    attention = model.backbone.layers[0].self_attn
    assert attention.q_proj.weight.grad_sink is attention.v_proj.weight.grad_sink
    batch = shared_batch()
    for rows in ([0, 1, 2], [3, 4, 5]):
        for each in (model, exact):
            hidden = both_ways(each, batch.rows(torch.tensor(rows)), flash=True)[0]
            pull = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
            (hidden.float() * pull).sum().backward()
    assert all(p.grad is None for p in model.model.parameters())
    for name, parameter in exact.model.named_parameters():
        if name in optimizer.masters:
            found, expected = optimizer.masters[name].grad, parameter.grad
            apart = float((found - expected).norm() / expected.norm().clamp(min=1e-3))
            assert found.dtype == torch.float32
            assert apart < 0.1, name
    norms = [m.grad.norm() for m in optimizer.masters.values()]
    total = float(torch.stack(norms).norm())
    assert optimizer.step(1e-3).grad_norm == pytest.approx(total, rel=1e-5)
    assert all(m.grad is None for m in optimizer.masters.values())


def test_a_model_with_fused_weights_is_saved_normally(tmp_path: Path) -> None:
    model = build("qwen2", torch.bfloat16)
    fuse_parameters(model.backbone)
    model.model.save_pretrained(tmp_path / "plain")
    optimizer = MasterAdamW(model.model.named_parameters(), **SETTINGS)
    policy = Policy(model=model, optimizer=optimizer, temperature=1.0, logits_megabytes=1.0)
    (tmp_path / "policy").mkdir()
    save_policy(policy, tmp_path / "policy", {})
    for folder in ("plain", "policy"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        for name, value in model.model.state_dict().items():
            assert torch.equal(again[name].bfloat16(), value), (folder, name)
