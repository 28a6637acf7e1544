"""Helpers for tensors that may be sharded: gather, shard, and access this rank's rows.

A sharded tensor is a DTensor of FSDP2, whose rows (dimension 0) are divided among the ranks along
the last dimension of the device mesh. Every function of this module also accepts ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor; all ranks must call this function, because it gathers the shards."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def whole_tensors(tensors: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Gather full tensors, and copy them to CPU memory.

    Tensors are gathered one at a time, because a device may not have enough memory for all of them.
    A rank with `keep=False` takes part in the gathering, but returns an empty dict.
    """
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        whole = whole_tensor(value.detach())
        if keep:
            found[name] = whole.cpu()
    return found


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor as a view; return other tensors unchanged."""
    gather = getattr(value, "to_local", None)
    return value if gather is None else gather()


def first_element(value: torch.Tensor) -> int:
    """Return the flat index of this rank's first element in a tensor; 0 if it is not sharded."""
    if not hasattr(value, "full_tensor"):
        return 0
    mesh: Any = value.device_mesh  # type: ignore[attr-defined]
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    rows = -(-len(value) // ranks)  # the last ranks may have fewer
    return int(min(rank * rows, len(value)) * (value.numel() // len(value)))


@torch.no_grad()
def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of several tensors; for sharded tensors, all ranks must call `total_norm`."""
    norm = torch.nn.utils.get_total_norm([local_part(tensor) for tensor in tensors])
    if not tensors or not hasattr(tensors[0], "full_tensor"):
        return norm
    mesh: Any = tensors[0].device_mesh  # type: ignore[attr-defined]
    square = norm.square()
    torch.distributed.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    return square.sqrt()


def sharded_like(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like `like`, with the rows `part` on this rank."""
    if not hasattr(like, "full_tensor"):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip


def placed_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a full tensor in the same way as `like`, if `like` is sharded."""
    if not hasattr(like, "full_tensor") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    here = value.to(like.device, like.dtype)
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)
