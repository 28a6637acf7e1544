"""A compact optimizer state gives the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.config import load_config
from covey.config.schema import Parallel
from covey.parallel.join import joined_world
from covey.parallel.shard import device_mesh, first_element, local_part, whole_tensor
from covey.policy.checkpoint import load_state, save_state
from covey.policy.optimizer import CompactAdamW
from tests.parallel.ranks import run_ranks

CONFIG = load_config("arithmetic", ["model.device=cpu", "parallel.strategy=fsdp"])
SETTINGS: dict[str, Any] = {
    "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1e9, "seed": 3,
}  # fmt: skip
SHAPES = {"even": (8, 5), "uneven": (262, 3), "few": (2, 7), "vector": (5,)}
"""With four ranks, two have no row of "few"."""


def value(name: str, seed: int) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def optimizer_on(mesh: Any) -> CompactAdamW:
    """Return an optimizer of whole parameters, or of their shards on a mesh."""
    return CompactAdamW([(n, nn.Parameter(placed(value(n, 0), mesh))) for n in SHAPES], **SETTINGS)


def placed(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    if mesh is None:
        return tensor
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return distribute_tensor(tensor, mesh, placements)


def stepped(optimizer: CompactAdamW, first: int, mesh: Any) -> None:
    for number in range(first, first + 3):
        for name, parameter in optimizer.parameters.items():
            parameter.grad = placed(value(name, number), mesh)
        optimizer.step(1e-2)


def bits(optimizer: CompactAdamW) -> dict[str, torch.Tensor]:
    found = {**optimizer.masters, **optimizer.state()}
    return {name: whole_tensor(tensor.detach()).clone() for name, tensor in found.items()}


def test_steps_and_checkpoints_are_those_of_one_rank_bit_for_bit(tmp_path: Path) -> None:
    plain = optimizer_on(None)
    stepped(plain, 1, None)
    half = bits(plain)
    stepped(plain, 4, None)
    whole = bits(plain)

    def work(parallel: Parallel, before: Path | None, after: Path | None) -> Any:
        def as_rank(rank: int) -> list[dict[str, torch.Tensor]]:
            with joined_world(CONFIG) as world:
                mesh = device_mesh(parallel, world, "cpu")
                optimizer = optimizer_on(mesh)
                if before is None:
                    stepped(optimizer, 1, mesh)
                else:
                    load_state(optimizer, before, sharded=True)
                found = [bits(optimizer)]
                if after is not None:
                    save_state(optimizer, after)
                stepped(optimizer, 4, mesh)
                return [*found, bits(optimizer)]

        return as_rank

    saved = {size: tmp_path / f"saved on {size}" for size in (1, 2, 4)}
    for size, folder in saved.items():
        for rank in run_ranks(size, work(Parallel(), None, folder), tmp_path / f"first {size}"):
            assert_same(rank, [half, whole])
    for size, source, parallel in (
        (1, saved[4], Parallel()), (2, saved[1], Parallel()), (4, saved[2], Parallel()),
        (4, saved[1], Parallel(shard_ranks=2)),
    ):  # fmt: skip
        logs = tmp_path / f"again {size} {parallel.shard_ranks}"
        for rank in run_ranks(size, work(parallel, source, None), logs):
            assert_same(rank, [half, whole])
    again = optimizer_on(None)
    load_state(again, saved[4], sharded=False)
    stepped(again, 4, None)
    assert_same([bits(again)], [whole])


def assert_same(
    found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]
) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        assert [n for n in theirs if not torch.equal(mine[n], theirs[n])] == []


def test_shards_follow_one_another(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, tuple[int, int]]:
        with joined_world(CONFIG) as world:
            mesh = device_mesh(Parallel(), world, "cpu")
            shards = {name: placed(value(name, 0), mesh) for name in SHAPES}
            return {n: (first_element(s), local_part(s).numel()) for n, s in shards.items()}

    found = run_ranks(4, work, tmp_path)
    for name in SHAPES:
        end = 0
        for first, count in (rank[name] for rank in found):
            assert first == end
            end += count
        assert end == value(name, 0).numel()
    assert first_element(value("even", 0)) == 0
