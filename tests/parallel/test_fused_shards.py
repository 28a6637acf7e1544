"""The fused forward pass inside sharded blocks gives the gradients of the plain model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from covey.accel import fused_forward as fused
from covey.accel.activation_offload import checkpoint_layers
from covey.accel.fused_parameters import (
    GradHolder,
    attach_grad_sinks,
    fuse_parameters,
    grad_holder,
)
from covey.config import load_config
from covey.config.schema import Parallel
from covey.models.adapter import add_adapter
from covey.models.language_model import LanguageModel
from covey.models.logp import batch_logp
from covey.parallel.join import joined_world
from covey.parallel.shard import (
    GatheredSteps,
    gathered_steps,
    local_part,
    shard_model,
    whole_tensor,
)
from covey.types import Batch
from tests.accel.test_fused_forward import per_row, shared_batch
from tests.conftest import build
from tests.parallel.ranks import run_ranks

CONFIG = load_config("arithmetic", ["model.device=cpu", "parallel.strategy=fsdp"])
CASES = ["llama", "qwen2", "qwen2 checkpointed", "llama adapter"]


def model_of(case: str) -> LanguageModel:
    model = build(case.split()[0])
    if "adapter" in case:
        model = add_adapter(model, rank=2, targets=["q_proj", "down_proj"], also_train=["norm"])
    if "checkpointed" in case:
        checkpoint_layers(model.model, offload=False)
    model.model.train()
    return replace(model, packs=True, flash=True, fused=True)


def gradients(
    model: LanguageModel, passes: list[tuple[Batch, float]], sums: GatheredSteps | None = None
) -> dict[str, torch.Tensor]:
    """Run some passes without gradient, then those of one optimizer step."""
    trained = {n: p for n, p in model.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        batch_logp(model, passes[0][0])
    for number, (batch, weight) in enumerate(passes, start=1):
        if sums is not None and number == len(passes):
            sums.expect()
        logp, entropy = batch_logp(model, batch)
        (weight * (logp.sum() + 0.1 * entropy.sum())).backward()
    if sums is not None:
        assert all(p.grad is None for p in trained.values())
        sums.finish()
    assert all(p.grad is not None for p in trained.values())
    return {n: whole_tensor(p.grad).detach().clone() for n, p in trained.items()}


def halves(batch: Batch) -> list[Batch]:
    return [batch.rows(torch.arange(0, 3)), batch.rows(torch.arange(3, 6))]


@pytest.fixture(scope="module")
def wanted() -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of the plain models."""
    first, second = halves(shared_batch())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "flash_attention", per_row)
        return {c: gradients(model_of(c), [(first, 1.0), (second, 2.0)]) for c in CASES}


@pytest.mark.parametrize(("size", "shards"), [(1, 1), (2, 2), (2, 1)])
def test_gradients_are_those_of_the_plain_model(
    size: int, shards: int, wanted: dict[str, dict[str, torch.Tensor]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fused, "flash_attention", per_row)
    first, second = halves(shared_batch())

    def work(rank: int) -> dict[str, float]:
        off = {}
        with joined_world(CONFIG) as world:
            for case in CASES:
                parallel = Parallel(strategy="fsdp", shard_ranks=shards)
                model = shard_model(model_of(case), parallel, world)
                sums = gathered_steps(model, world)
                assert (sums is not None) == (shards == 1)
                # Each of two ranks has one of the passes.
                passes = [(first, 1.0), (second, 2.0)][rank::size]
                found = gradients(model, passes, sums)
                assert found.keys() == wanted[case].keys()
                most = max(float(g.abs().max()) for g in wanted[case].values())
                off[case] = max(
                    float((found[n] - g).abs().max()) / most for n, g in wanted[case].items()
                )
        return off

    for off in run_ranks(size, work, tmp_path):
        assert max(off.values()) < 1e-6, off


def bfloat16() -> LanguageModel:
    return replace(build("llama", torch.bfloat16), packs=True, flash=True, fused=True)


Sums = list[dict[str, torch.Tensor]]


def plain_sums(passes: list[Batch]) -> Sums:
    """Return the float32 gradient sums of a model, then those with weights 1 % larger."""
    model, found = bfloat16(), []
    fuse_parameters(model.backbone)
    attach_grad_sinks((p, GradHolder(p)) for p in model.model.parameters())
    for _ in range(2):
        for batch in passes:
            batch_logp(model, batch).logp.sum().backward()
        found.append({n: grad_holder(p).grad.clone() for n, p in model.model.named_parameters()})
        for parameter in model.model.parameters():
            grad_holder(parameter).grad = None
            parameter.data.copy_(parameter.data.float() * 1.01)
    return found


def sharded_sums(model: LanguageModel, steps: GatheredSteps, passes: list[Batch]) -> Sums:
    """Return the same from a sharded model."""
    shards, found = dict(steps.shards), []
    for _ in range(2):
        for batch in passes:
            batch_logp(model, batch).logp.sum().backward()
        steps.finish()
        found.append({n: whole_tensor(p.grad).clone() for n, p in shards.items()})
        for shard in shards.values():
            shard.grad = None
            local_part(shard.detach()).mul_(1.01)
    return found


def test_gradients_of_bfloat16_weights_are_float32_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "flash_attention", per_row)
    passes = halves(shared_batch())

    def work(rank: int) -> Sums:
        with joined_world(CONFIG) as world:
            model = shard_model(bfloat16(), Parallel(strategy="fsdp"), world)
            steps = gathered_steps(model, world)
            assert steps is not None
            return sharded_sums(model, steps, passes)

    (found,) = run_ranks(1, work, tmp_path)
    for mine, theirs in zip(found, plain_sums(passes), strict=True):
        assert {grad.dtype for grad in mine.values()} == {torch.float32}
        assert mine.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
