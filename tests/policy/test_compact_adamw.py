from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from covey.accel.fused_parameters import fuse_parameters
from covey.errors import ConfigError
from covey.models.language_model import LanguageModel
from covey.policy.checkpoint import load_policy, save_policy
from covey.policy.optimizer import (
    CompactAdamW,
    MasterAdamW,
    Optimizer,
    keys_of,
    numbers_of,
    random_bits,
    rounded,
    split,
    whole,
)
from covey.policy.optimizer import adamw as step_of
from covey.policy.policy import Policy
from covey.reference.moving import MovingReference
from tests.conftest import build, make_batch

SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0}


def make(model: LanguageModel, kind: type = CompactAdamW, **changes: object) -> Policy:
    more = {"seed": 0} if kind is CompactAdamW else {}
    optimizer = kind(model.model.named_parameters(), **{**SETTINGS, **more, **changes})
    return Policy(model=model, optimizer=optimizer, temperature=1.0, logits_megabytes=8.0)


def learn(policy: Policy, steps: int, rate: float = 1e-3, first: int = 0) -> list[float]:
    """Raise the probability of some completions; return the loss before each step."""
    losses = []
    for number in range(first, first + steps):
        batch = make_batch(rows=4, seed=number % 3)
        loss = -policy.logp(batch).logp.sum() / batch.mask.sum()
        loss.backward()
        losses.append(float(loss.detach()))
        assert not policy.step(rate).skipped
    return losses


def every_class() -> torch.Tensor:
    """Return float32 of all kinds: random bits, ties, denormals, the largest, infinities."""
    random = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int32)
    ties = (random & ~0xFFFF) | 0x8000
    denormals = random & ~0x7F800000
    ends = [0x00000000, 0x007FFFFF, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x00000001]
    edges = torch.tensor([sign | e for sign in (0, -(2**31)) for e in ends], dtype=torch.int32)
    return torch.cat([random, ties, ties - 1, denormals, edges]).view(torch.float32)


def test_two_halves_are_the_weight_and_the_upper_one_the_nearest_bfloat16() -> None:
    torch.manual_seed(0)
    values = every_class()
    upper, lower = split(values)
    assert upper.dtype == lower.dtype == torch.int16
    known = ~values.isnan()
    again = whole(upper, lower)
    assert torch.equal(again.view(torch.int32)[known], values.view(torch.int32)[known])
    near = upper.view(torch.bfloat16)
    for bits in (again[~known], near[~known]):
        assert bits.isnan().all()
    # Ties go away from 0 instead of to the even; all else is as torch has it.
    tied = (values.view(torch.int32) & 0xFFFF) == 0x8000
    same = known & ~tied
    assert torch.equal(near[same], values.bfloat16()[same])
    ties = known & tied & near.isfinite()
    off = (near.double() - values.double()).abs()[ties]
    assert torch.equal(off, (values.bfloat16().double() - values.double()).abs()[ties])


def test_rounding_at_random_is_right_on_average() -> None:
    count = 200_000
    for value in (1.0 + 1 / 1024, -3.3e-5, 7e-40, 1.0):
        values = torch.full((count,), value)
        random = random_bits(0, count, keys_of(0, 0, 1), values.device) & 0xFFFF
        found = rounded(values, random).view(torch.bfloat16).double()
        assert len(found.unique()) == (1 if value == 1.0 else 2)
        error = float(found.std()) / math.sqrt(count)
        assert abs(float(found.mean()) - float(values[0].double())) <= 4 * error
    broken = torch.tensor([math.inf, -math.inf, math.nan])
    assert rounded(broken, torch.full((3,), 0xFFFF)).view(torch.bfloat16).isfinite().sum() == 0
    strange = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert rounded(strange, torch.tensor([0xFFFF])).view(torch.bfloat16).isnan().all()


def test_random_bits_are_addressed_and_independent() -> None:
    device = torch.device("cpu")
    all_bits = random_bits(0, 100_000, (5, 6), device)
    assert torch.equal(all_bits[70_000:70_100], random_bits(70_000, 100, (5, 6), device))
    assert torch.equal(random_bits(2**32 + 3, 9, (5, 6), device), all_bits[3:12])
    addresses = [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)]
    drawn = [random_bits(0, 100_000, keys_of(*a), device) for a in addresses]
    for bit in range(32):
        ones = torch.stack([(bits >> bit) & 1 for bits in drawn]).double() - 0.5
        # Neither a bit, nor whether two of them agree, nor a bit and its neighbour's, leans.
        agreement = ones @ ones.T * 4 / 100_000
        assert (agreement - torch.eye(4)).abs().max() < 0.02
        assert ones.mean().abs() < 0.005
        assert (ones[:, 1:] * ones[:, :-1]).mean().abs() < 0.002


def test_the_second_moment_does_not_freeze() -> None:
    """Without gradient it halves in 693 steps; to the nearest, not one of them would change it."""
    first, second = (torch.zeros(4000).bfloat16().view(torch.int16) for _ in range(2))
    second.view(torch.bfloat16).fill_(0.7)
    start = float(second.view(torch.bfloat16)[0])
    assert torch.tensor(start * 0.999).bfloat16() == torch.tensor(start).bfloat16()
    settings = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
    for step in range(1, 694):
        numbers = numbers_of(settings, step=step, rate=0.0, clip=1.0)
        none = torch.zeros(4000)
        step_of(torch.zeros(4000), None, none, (first, second), numbers, keys_of(0, 0, step))
    assert float(second.view(torch.bfloat16).double().mean()) == pytest.approx(start / 2, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_moments_need_no_rounding_it_is_torchs_adamw(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = torch.randn(30, 7).to(dtype)
    parameter, exact = nn.Parameter(start.clone()), nn.Parameter(start.float())
    settings = {"betas": (0.5, 0.5), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = CompactAdamW([("w", parameter)], **settings, max_grad_norm=1e9, seed=0)
    torchs = torch.optim.AdamW([exact], lr=3e-3, **settings)
    size = 2.0 ** torch.randint(-8, 8, start.shape)
    for _ in range(7):  # of a power of two and seven halvings bfloat16 keeps every bit
        grad = size * torch.randint(0, 2, start.shape).mul(2).sub(1)
        (parameter * grad.to(dtype)).sum().backward()
        exact.grad = grad
        optimizer.step(3e-3)
        torchs.step()
    torch.testing.assert_close(optimizer.masters["w"], exact.detach(), atol=3e-7, rtol=3e-7)
    state = torchs.state[exact]
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state()[f"{key}.w"].float(), state[key])
    assert torch.equal(parameter.bfloat16(), optimizer.masters["w"].bfloat16())


def test_two_hundred_steps_go_where_a_float32_state_goes() -> None:
    moves, curves = [], []
    for kind in (MasterAdamW, CompactAdamW):
        policy = make(build("llama", torch.bfloat16), kind)
        before = {n: m.detach().clone() for n, m in policy.optimizer.masters.items()}
        curves.append(torch.tensor(learn(policy, 200, rate=1e-4)))
        after = policy.optimizer.masters
        moves.append(torch.cat([(after[n] - b).detach().flatten() for n, b in before.items()]))
    one, other = moves
    assert float(torch.nn.functional.cosine_similarity(one, other, dim=0)) > 0.999
    assert float((one - other).norm() / one.norm()) < 0.05
    assert curves[0][-1] < 0.5 * curves[0][0]
    assert (curves[0] - curves[1]).abs().max() < 0.1


def test_a_parameter_in_bfloat16_takes_twelve_bytes() -> None:
    for dtype, expected in ((torch.bfloat16, 12), (torch.float32, 12)):
        policy = make(build("llama", dtype))
        optimizer = policy.optimizer
        policy.logp(make_batch()).logp.sum().backward()
        tensors = [*optimizer.parameters.values(), *optimizer.gradients().values()]
        tensors += [t for kept in optimizer._kept.values() for t in kept.values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        count = sum(p.numel() for p in optimizer.parameters.values())
        assert sum(storages.values()) == expected * count


def test_what_is_joined_takes_one_step_together_and_is_saved_apart() -> None:
    plain, joint = make(build("qwen2", torch.bfloat16)), build("qwen2", torch.bfloat16)
    fuse_parameters(joint.backbone)
    policy = make(joint)
    assert len(policy.optimizer.stores) == len(plain.optimizer.stores) - 3 * (2 + 2 + 1)
    for each in (plain, policy):
        learn(each, 1)
    # In the first step nothing was rounded yet; then bits differ, for elements have other places.
    for name, master in plain.optimizer.masters.items():
        torch.testing.assert_close(policy.optimizer.masters[name], master, rtol=1e-6, atol=1e-7)
    assert policy.optimizer.state().keys() == plain.optimizer.state().keys()
    for name, value in policy.optimizer.state().items():
        torch.testing.assert_close(value, plain.optimizer.state()[name], rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_beside_masters(dtype: torch.dtype) -> None:
    found = []
    for kind in (MasterAdamW, CompactAdamW):
        policy = make(build("llama", dtype), kind)
        for seed in (0, 1):
            policy.logp(make_batch(seed=seed)).logp.sum().backward()
        found.append(policy.optimizer.gradients())
        policy.optimizer.zero_grad()
        assert set(policy.optimizer.gradients().values()) == {None}
    for name, gradient in found[0].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(found[1][name], gradient)


def test_clipping_bounds_the_gradient_and_the_norm_is_that_before() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = CompactAdamW([("w", parameter)], **{**SETTINGS, "max_grad_norm": 0.5}, seed=0)
    parameter.grad = torch.full((4,), 3.0)
    assert optimizer.step(1.0).grad_norm == pytest.approx(6.0)
    kept = optimizer.state()["exp_avg.w"].float()
    torch.testing.assert_close(kept, torch.full((4,), 0.1 * 0.25), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype) -> None:
    policy = make(build("llama", dtype))
    learn(policy, 1)
    optimizer = policy.optimizer
    before = [t.clone() for t in (*optimizer.masters.values(), *optimizer.state().values())]
    parameter = next(iter(optimizer.parameters.values()))
    (parameter * math.nan).sum().backward()
    assert policy.step(1.0).skipped
    after = [*optimizer.masters.values(), *optimizer.state().values()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert set(optimizer.gradients().values()) == {None}


@pytest.mark.parametrize("joined", [False, True])
def test_a_policy_is_saved_and_loaded_bit_for_bit(joined: bool, tmp_path: Path) -> None:
    policies = []
    for _ in range(2):
        model = build("qwen2", torch.bfloat16)
        if joined:
            fuse_parameters(model.backbone)
        policies.append(make(model))
    policy, again = policies
    learn(policy, 3)
    save_policy(policy, tmp_path, {})
    load_policy(again, tmp_path)
    losses = [learn(each, 3, first=3) for each in policies]
    assert losses[0] == losses[1]
    for name, master in policy.optimizer.masters.items():
        assert torch.equal(again.optimizer.masters[name], master)
    for name, value in policy.optimizer.state().items():
        assert torch.equal(again.optimizer.state()[name], value)
    assert again.version == 6


def test_either_state_goes_on_from_the_other(tmp_path: Path) -> None:
    for kind, other in ((MasterAdamW, CompactAdamW), (CompactAdamW, MasterAdamW)):
        policy, again = (make(build("llama", torch.bfloat16), k) for k in (kind, other))
        learn(policy, 3)
        (tmp_path / kind.__name__).mkdir()
        save_policy(policy, tmp_path / kind.__name__, {})
        load_policy(again, tmp_path / kind.__name__)
        assert_same_masters(policy.optimizer, again.optimizer)
        for name, value in policy.optimizer.state().items():
            found = again.optimizer.state()[name]
            assert torch.equal(found.bfloat16(), value.bfloat16())
        learn(again, 1)


def assert_same_masters(one: Optimizer, other: Optimizer) -> None:
    assert list(one.masters) == list(other.masters)
    # Of a float32 state ties are rounded to the even, of a compact one away from 0.
    assert all(torch.equal(m, other.masters[n]) for n, m in one.masters.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scalar_is_a_parameter_too(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.tensor(1.0, dtype=dtype))
    optimizer = CompactAdamW([("w", parameter)], **SETTINGS, seed=0)
    for _ in range(2):  # passes, whose gradients add up
        (2 * parameter).backward()
    assert optimizer.step(1e-2).grad_norm == 4.0
    assert optimizer.masters["w"].item() == pytest.approx(1 - 1e-2 * (1 + 0.1), rel=1e-6)


def test_a_reference_moves_towards_exact_weights() -> None:
    policy = make(build("llama", torch.bfloat16))
    reference = MovingReference(
        model=build("llama", torch.bfloat16), temperature=1.0, logits_megabytes=8.0,
        alpha=1.0, every=1,
    )  # fmt: skip
    learn(policy, 1, rate=1e-6)
    reference.after_step(policy.version, policy.optimizer.masters)
    for name, master in policy.optimizer.masters.items():
        assert torch.equal(reference.weights[name], master)
        assert not torch.equal(master, master.bfloat16().float())


def test_other_types_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"optimizer\.state",
    ):
        CompactAdamW([("w", nn.Parameter(torch.zeros(2).double()))], **SETTINGS, seed=0)


@pytest.mark.parametrize("kind", [CompactAdamW, MasterAdamW])
def test_a_later_optimizer_of_the_same_model_takes_its_gradients(kind: Any) -> None:
    layer = torch.nn.Linear(4, 3).bfloat16()
    options: dict[str, Any] = {
        "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0,
    }  # fmt: skip
    if kind is CompactAdamW:
        options["seed"] = 0
    for _ in range(2):
        optimizer = kind(layer.named_parameters(), **options)
        before = layer.weight.detach().clone()
        layer(torch.ones(2, 4).bfloat16()).sum().backward()
        assert optimizer.step(0.1).grad_norm > 1.0
        assert not torch.equal(layer.weight, before)
