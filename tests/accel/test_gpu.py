"""GPU only: compiled kernels, flash attention, and bfloat16 numbers."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from covey.accel import activation_offload, attention_kernels
from covey.accel.activation_offload import checkpoint_layers
from covey.accel.attention_kernels import (
    CUDNN,
    FLASH,
    KERNELS,
    Inputs,
    ShapeClass,
    attend,
    measured,
)
from covey.accel.head import Head, token_logp
from covey.accel.packing import host_rows, pack, prompt_numbers
from covey.embedded import CHECKPOINT
from covey.models.adapter import add_adapter, perturbed_adapter
from covey.models.language_model import LanguageModel, packed_forward
from covey.models.load_model import wrap
from covey.models.logp import batch_logp
from covey.objective import ALGORITHMS, policy_loss, with_advantage, with_weight
from covey.parallel.passes import micro_batches
from covey.policy.optimizer import CompactAdamW, MasterAdamW
from covey.policy.policy import Policy
from covey.run import Run
from covey.step import StepSettings, optimize
from covey.types import Batch
from tests.accel.test_fused_forward import per_row
from tests.conftest import make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = {
    "vocab_size": 262, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256,
    "head_dim": 16,
}  # fmt: skip
KINDS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SHAPE, sliding_window=5)
    ),
}
SETTINGS = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1e9}


def build(kind: str, dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
    torch.manual_seed(len(kind))
    model = KINDS[kind]().to("cuda", dtype)
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    return wrap(model, transformers.AutoTokenizer.from_pretrained(CHECKPOINT), kind)


def shared_batch(rows: int = 8, longest: int = 40) -> Batch:
    batch = make_batch(rows=rows, longest=longest, seed=3)
    which = torch.tensor([0, 3, 0, 5, 0, 3, 0, 0])[:rows]
    return replace(
        batch,
        prompt_tokens=batch.prompt_tokens[which],
        prompt_lengths=batch.prompt_lengths[which],
        group=which,
    ).to("cuda")


def gradients(model: LanguageModel, batch: Batch) -> dict[str, torch.Tensor]:
    objective = ALGORITHMS["grpo"](beta=0.0)
    batch = with_weight(objective, with_advantage(objective, batch))
    model.model.zero_grad()
    policy_loss(objective, batch, batch_logp(model, batch).logp).loss.backward()
    return {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative distance of all gradients together."""
    assert found.keys() == expected.keys()
    difference = torch.stack([(found[n].double() - g.double()).norm() for n, g in expected.items()])
    return float(
        difference.norm() / torch.stack([g.double().norm() for g in expected.values()]).norm()
    )


def test_models_take_the_fast_path() -> None:
    for kind, fused in (("llama", True), ("qwen2", True), ("qwen3", True), ("mistral", False)):
        model = build(kind)
        assert (kind, model.packs, model.flash, model.fused) == (kind, True, True, fused)
        exact = build(kind, torch.float32)
        assert (kind, exact.packs, exact.flash, exact.fused) == (kind, True, False, fused)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_padded_gradients_are_equal_in_float32(kind: str) -> None:
    model, batch = build(kind, torch.float32), shared_batch()
    padded = gradients(replace(model, packs=False), batch)
    packed = gradients(model, batch)
    scale = max(float(g.abs().max()) for g in padded.values())
    for name, grad in padded.items():
        assert float((packed[name] - grad).abs().max()) <= 1e-5 * scale, name


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gradients_are_close_to_float32(kind: str) -> None:
    model, exact, batch = build(kind), build(kind, torch.float32), shared_batch()
    with torch.no_grad():
        for one, other in zip(exact.model.parameters(), model.model.parameters(), strict=True):
            one.copy_(other)
    expected = gradients(replace(exact, packs=False), batch)
    fast, own = gradients(model, batch), gradients(replace(model, packs=False), batch)
    assert apart(fast, expected) < max(0.03, 1.2 * apart(own, expected))


def test_flash_attention_equals_padded_attention() -> None:
    model, batch = build("mistral"), shared_batch()
    outputs = []
    for flash in (True, False):
        packed = pack(host_rows(batch), model.device, varlen=flash)
        with torch.no_grad():
            outputs.append(packed_forward(model.backbone, packed)[packed.predictor].float())
    assert float((outputs[0] - outputs[1]).norm() / outputs[1].norm()) < 0.02


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 64), ((12, 2), 128)])
def test_attention_kernels_agree_where_rows_share_prompts(
    name: str, heads: tuple[int, int], size: int
) -> None:
    spans = pack(host_rows(shared_batch()), torch.device("cuda"), varlen=True).packing
    assert spans.shared is not None
    torch.manual_seed(1)
    counts = (len(spans.shared.position), len(spans.shared.tokens), len(spans.shared.tokens))
    exact = [
        torch.randn(n, h, size, device="cuda", dtype=torch.float64).bfloat16().double()
        for n, h in zip(counts, (*heads, heads[1]), strict=True)
    ]
    exact = [tensor.requires_grad_() for tensor in exact]
    right = per_row(*exact, spans, size**-0.5)
    pull = torch.randn_like(right)
    expected = [right, *torch.autograd.grad(right, exact, pull)]
    tensors = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    attended = attend(KERNELS[name], *tensors, Inputs(spans, size**-0.5))
    found = [attended, *torch.autograd.grad(attended, tensors, pull.bfloat16())]
    for ours, other in zip(found, expected, strict=True):
        far = (ours.detach().double() - other.detach()).norm() / other.detach().norm()
        assert float(far) < 0.01


def test_the_fastest_attention_kernel_is_chosen() -> None:
    shape = ShapeClass(torch.device("cuda", 0), torch.bfloat16, 4, 2, 64, 4096)
    choice = measured(shape)
    assert FLASH in choice.seconds
    assert choice.name == min(choice.seconds, key=choice.seconds.__getitem__)


def test_long_rows_run_eagerly_with_the_fastest_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows here are those of at least 16 tokens."""
    model, batch = build("qwen2"), shared_batch()
    policy = policy_of(model, graphs=True)
    expected, values = collected(policy, [batch])
    monkeypatch.setattr(attention_kernels, "LONG", 16)
    monkeypatch.setattr(attention_kernels, "chosen", lambda *_: CUDNN)
    for _ in range(4):
        found, said = collected(policy, [batch])
        assert apart(found, expected) < 0.02
        torch.testing.assert_close(said, values, atol=0.05, rtol=0.02)
    assert not policy.passes.captured()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_head_matches_float64_logits(dtype: torch.dtype, softcap: float | None) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 5000, dtype=dtype, device="cuda")
    head = Head(linear=linear, scale=3.0, softcap=softcap)
    hidden = torch.randn(700, 64, device="cuda").to(dtype).requires_grad_()
    tokens = torch.randint(0, 5000, (700,), device="cuda")
    pulls = torch.randn(2, 700, device="cuda")
    found = token_logp(head, hidden, tokens, temperature=0.8, megabytes=8)
    assert found[0].dtype == torch.float32
    (found[0] * pulls[0] + found[1] * pulls[1]).sum().backward()
    parts = [hidden, *linear.parameters()]
    exact = [p.detach().double().requires_grad_() for p in parts]
    z = (exact[0] @ exact[1].t() + exact[2]) * 3.0
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    whole = (z / 0.8).log_softmax(-1)
    logp, entropy = whole.gather(-1, tokens[:, None])[:, 0], -(whole.exp() * whole).sum(-1)
    (logp * pulls[0] + entropy * pulls[1]).sum().backward()
    # Logits are not rounded, so even in bfloat16 values are exact.
    torch.testing.assert_close(found[0].double(), logp, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(found[1].double(), entropy, atol=2e-4, rtol=1e-5)
    limit = 1e-4 if dtype == torch.float32 else 1e-2
    for one, other in zip(parts, exact, strict=True):
        assert float((one.grad.double() - other.grad).norm() / other.grad.norm()) < limit


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointing_changes_nothing(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST", 0)
    model, batch = build("llama"), shared_batch()
    model.model.train()
    plain = gradients(model, batch)
    checkpoint_layers(model.model, offload=offload)
    for _ in range(2):
        assert apart(gradients(model, batch), plain) < 5e-3


def test_an_adapter_takes_the_fast_path() -> None:
    model, exact = (
        add_adapter(build("llama", dtype), rank=4) for dtype in (torch.bfloat16, torch.float32)
    )
    assert model.fused
    batch = shared_batch()
    with perturbed_adapter(model), perturbed_adapter(exact):
        with torch.no_grad():
            for one, other in zip(exact.model.parameters(), model.model.parameters(), strict=True):
                one.copy_(other)
        expected = gradients(replace(exact, packs=False), batch)
        fast, own = gradients(model, batch), gradients(replace(model, packs=False), batch)
    assert fast
    assert apart(fast, expected) < max(0.03, 1.2 * apart(own, expected))


def test_gradient_sinks_equal_autograd() -> None:
    model, batch = build("qwen2"), shared_batch()
    plain = gradients(model, batch)
    optimizer = MasterAdamW(model.model.named_parameters(), **SETTINGS)
    assert gradients(model, batch) == {}
    once = {n: m.grad.clone() for n, m in optimizer.masters.items()}
    assert apart(once, plain) < 1e-2
    gradients(model, batch)
    twice = {n: m.grad / 2 for n, m in optimizer.masters.items()}
    assert apart(twice, once) < 1e-5 + 1e-2  # flash attention adds in any order
    assert not optimizer.step(1e-3).skipped
    for name, parameter in optimizer.parameters.items():
        assert torch.equal(parameter, optimizer.masters[name].bfloat16())


def test_micro_batches_count_packed_tokens_and_keep_groups_together() -> None:
    batch = shared_batch()
    host = host_rows(batch)
    numbers = prompt_numbers(host)
    for budget in (1, 60, 120, 10_000):
        parts = list(micro_batches(batch, budget))
        assert sorted(torch.cat(parts).tolist()) == list(range(len(batch)))
        for part in parts:
            micro = batch.rows(part)
            assert torch.equal(micro.host.tokens, micro.tokens.cpu())
            packed = pack(micro.host, batch.tokens.device, varlen=True)
            assert len(part) == 1 or len(packed.input_ids) <= budget
    whole = list(micro_batches(batch, 10_000))
    assert len(whole) == 1
    assert len(numbers.unique()) == 3


def test_an_update_learns_and_measures() -> None:
    model = build("llama")
    optimizer = MasterAdamW(model.model.named_parameters(), **SETTINGS)
    policy = Policy(model=model, optimizer=optimizer, temperature=1.0, logits_megabytes=8.0)
    objective = ALGORITHMS["grpo"](beta=0.0)
    settings = StepSettings(
        mini_batches=1, epochs=1, micro_batch_tokens=100, old_logp_from_sampler=True,
        learning_rate=lambda *_: 1e-3, seed=0,
    )  # fmt: skip
    batch = with_advantage(objective, shared_batch())
    before = batch_logp(model, batch).logp.detach()
    metrics = optimize(Run(policy=policy, objective=objective, settings=settings), batch, step=0)
    after = batch_logp(model, batch).logp.detach()
    gain = ((after - before) * batch.advantage).where(batch.mask, 0.0).sum()
    assert float(gain) > 0
    assert metrics["optim/grad_norm"] > 0
    assert metrics["optim/skipped"] == 0


def test_a_gradient_that_is_not_finite_skips_the_step_on_the_device() -> None:
    optimizers, weights = [], []
    for broken in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 64, device="cuda").bfloat16())
        optimizer = MasterAdamW([("w", weight)], **SETTINGS)
        for step in range(3):
            if broken and step == 1:
                (weight.float() * torch.inf).sum().backward()
                before = weight.detach().clone()
                assert optimizer.step(0.1).skipped
                assert torch.equal(weight, before)
            (weight.float() ** 2).sum().backward()
            assert not optimizer.step(0.1).skipped
        optimizers.append(optimizer)
        weights.append(weight.detach())
    assert torch.equal(*weights)
    states = [optimizer.state() for optimizer in optimizers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def policy_of(model: LanguageModel, *, graphs: bool) -> Policy:
    optimizer = MasterAdamW(model.model.named_parameters(), **SETTINGS)
    return Policy(
        model=model, optimizer=optimizer, temperature=0.8, logits_megabytes=1.0, graphs=graphs
    )


def collected(policy: Policy, parts: list[Batch]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the gradients of an optimizer step over parts, and the log-probabilities of its
    tokens.
    """
    said = []
    for micro in parts:
        now = policy.logp(micro)
        (now.logp * torch.cos(micro.tokens) + 0.1 * now.entropy).sum().backward()
        said += [now.logp.detach()[micro.mask], now.entropy.detach()[micro.mask]]
        del now
    found = {n: m.grad.clone() for n, m in policy.optimizer.masters.items()}
    policy.optimizer.adamw.zero_grad()
    return found, torch.cat(said)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "adapter", "offloaded"])
def test_captured_passes_equal_eager_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST", 0)
    model = build("llama" if kind in ("adapter", "offloaded") else kind)
    model = add_adapter(model, rank=4) if kind == "adapter" else model
    if kind == "offloaded":
        checkpoint_layers(model.model, offload=True)
        model.model.train()
    batch = shared_batch()
    parts = [batch.rows(torch.tensor(rows)) for rows in ([0, 2, 4], [1, 3, 5, 6], [7, 1])]
    with perturbed_adapter(model):
        policy = policy_of(model, graphs=False)
        expected, values = collected(policy, parts)
        policy.graphs = True
        for step in range(4):
            found, said = collected(policy, parts)
            assert apart(found, expected) < 0.02, step  # flash attention adds in any order
            torch.testing.assert_close(said, values, atol=0.05, rtol=0.02)
        assert policy.passes is not None
        assert not policy.passes.failed
        assert len(policy.passes.captured()) == 1
        with torch.no_grad():
            for _ in range(4):
                again = torch.cat([
                    value[micro.mask] for micro in parts for value in policy.logp(micro)
                ])  # fmt: skip
                torch.testing.assert_close(again, values, atol=0.05, rtol=0.02)
        assert len(policy.passes.captured()) == 2


def test_captured_passes_use_current_weights() -> None:
    batch, ends = shared_batch(), []
    for graphs in (False, True):
        policy = policy_of(build("llama"), graphs=graphs)
        for _ in range(6):
            now = policy.logp(batch)
            (-now.logp).sum().backward()
            del now
            policy.step(1e-3)
        ends.append(policy.plain_logp(batch).logp.detach().sum())
        assert not graphs or policy.passes.captured()
    assert float(ends[0]) == pytest.approx(float(ends[1]), rel=0.02)


def test_passes_are_captured_again_after_all_were_dropped() -> None:
    batch = shared_batch()
    policy = policy_of(build("llama"), graphs=True)
    for _ in range(3):
        for _ in range(4):
            (-policy.logp(batch).logp).sum().backward()
        assert len(policy.passes.captured()) == 1
        torch.cuda.synchronize()
        policy.passes.buckets.clear()
    assert policy.passes.failures == 0


def compact_policy(model: LanguageModel) -> Policy:
    optimizer = CompactAdamW(model.model.named_parameters(), **SETTINGS, seed=0)
    return Policy(model=model, optimizer=optimizer, temperature=0.8, logits_megabytes=1.0)


def test_a_compact_state_with_cuda_graphs_learns_what_master_weights_learn() -> None:
    batch, moves = shared_batch(), []
    for policy in (policy_of(build("qwen2"), graphs=True), compact_policy(build("qwen2"))):
        before = {n: m.detach().clone() for n, m in policy.optimizer.masters.items()}
        for _ in range(30):
            now = policy.logp(batch)
            (-now.logp).sum().backward()
            del now
            assert not policy.step(1e-4).skipped
        assert policy.passes.captured()
        after = policy.optimizer.masters
        moves.append(torch.cat([(after[n] - b).detach().flatten() for n, b in before.items()]))
        for name, parameter in policy.optimizer.parameters.items():
            matches = parameter.float() - after[name]
            assert bool(
                (matches.abs() <= (after[name].bfloat16().float() - after[name]).abs()).all()
            )
    # Flash attention adds in any order, so two runs differ by rounding.
    assert float(torch.nn.functional.cosine_similarity(*moves, dim=0)) > 0.98


def eagerly_stepped(model: LanguageModel, batch: Batch) -> Policy:
    policy = compact_policy(model)
    policy.graphs = False
    for _ in range(2):
        (-policy.logp(batch).logp).sum().backward()
        policy.step(1e-4)
    return policy


def test_a_compact_state_takes_ten_bytes_per_parameter() -> None:
    model, batch = build("qwen2"), shared_batch()
    # The same work on another model compiles kernels, and allocates cuBLAS workspaces.
    eagerly_stepped(build("qwen2"), batch)
    gc.collect()  # models and CUDA graphs of earlier tests may be in cycles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    policy = eagerly_stepped(model, batch)
    parameters = list(policy.optimizer.parameters.values())
    expected = 10 * sum(p.numel() for p in parameters)
    # Each tensor is rounded up to 512 bytes; a storage keeps four of them.
    room = 512 * 4 * len(parameters)
    assert expected <= torch.cuda.memory_allocated() - before <= expected + room
