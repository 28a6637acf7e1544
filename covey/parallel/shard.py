"""Sharded models: parameters, gradients and optimizer state divided among ranks (FSDP2).

FSDP2 gathers the weights of a transformer block when a pass reaches the block. In the backward
pass, FSDP2 sums the gradients of each block over ranks, and shards the sums. The sharded parameters
are the optimizer's float32 masters, even if the model computes in bfloat16.

Embedding, head and final norm belong to the root module. FSDP2 gathers the weights of the root
module when one of its methods is called, and keeps them until the method ends. Each pass is
therefore a single method call, which runs `batch_logp`. If each rank has a complete copy of the
model, `GatheredSteps` gathers the weights for passes with fused kernels only once per optimizer
step.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from covey.accel.fused_parameters import (
    GradHolder,
    attach_grad_sinks,
    fuse_parameters,
    grad_holder,
)
from covey.config.schema import Parallel
from covey.errors import ModelError
from covey.models.language_model import LanguageModel
from covey.models.logp import ENTRY, LogProbs, batch_logp, entry_method
from covey.parallel.world import World
from covey.types import Batch


def shard_model(
    model: LanguageModel, settings: Parallel, world: World, *, offload: bool = False
) -> LanguageModel:
    """Return a sharded copy of a model; the original model keeps its full tensors.

    If `offload` is true, the shards stay in CPU memory until a pass needs them.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    # A copy of the modules, which shares the tensors of the original.
    shared = [*model.model.parameters(), *model.model.buffers()]
    root: Any = copy.deepcopy(model.model, {id(tensor): tensor for tensor in shared})
    dtype = model.head.linear.weight.dtype
    rounds = dtype not in (torch.float32, torch.float64)
    mesh = device_mesh(settings, world, model.device.type)
    options: dict[str, Any] = {"mesh": mesh}
    if rounds:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    masters: dict[int, nn.Parameter] = {}
    for module in [*_blocks(root), root]:
        _make_masters(module, masters)
        fully_shard(module, **options)
    for part in _sharded_parts(root) if world.size > 1 else ():
        part.set_gradient_divide_factor(1.0)  # gradients are summed over ranks, not averaged
        if model.device.type == "cpu":  # gloo has no operation that scales and sums
            part.set_force_sum_reduction_for_comms(True)
    linear = next(n for n, each in model.model.named_modules() if each is model.head.linear)
    head = replace(model.head, linear=root.get_submodule(linear))
    found = replace(model, model=root, head=head, sharded=True)
    if not _stays_gathered(found):
        _add_entries(found)
    return found


def _add_entries(model: LanguageModel) -> None:
    """Add methods to the model and to its blocks; the methods gather the weights before a pass."""
    root = model.model
    _add_entry(root, ENTRY, entry_method)
    enter = getattr(root, ENTRY)

    def logp(*arguments: Any) -> LogProbs:
        found: LogProbs = enter(*arguments)
        if not torch.is_grad_enabled():  # otherwise the backward pass reshards
            root.reshard()
        return found

    setattr(root, ENTRY, logp)
    if model.fused:
        from covey.accel.fused_forward import LAYER_ENTRY, fused_layer  # needs Triton

        for layer in _blocks(root):
            _add_entry(layer, LAYER_ENTRY, fused_layer)


def _add_entry(module: Any, name: str, method: Callable[..., Any]) -> None:
    """Give a sharded module a method that first gathers its weights, as `forward` does."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    setattr(module, name, types.MethodType(method, module))
    register_fsdp_forward_method(module, name)


def _stays_gathered(model: LanguageModel) -> bool:
    """Return whether the weights of a trained model stay gathered for a whole optimizer step.

    The weights stay gathered if each rank has a complete copy of the model (a single shard). With a
    single shard, the gradients of gathered weights take no more memory than sharded gradients, so
    only the gathered weights need additional memory.
    """
    parameters = list(model.model.parameters())
    mesh = parameters[0].device_mesh
    trained = any(parameter.requires_grad for parameter in parameters)
    return model.fused and trained and mesh.size(mesh.ndim - 1) == 1


class GatheredSteps:
    """Gathers the weights and sums the gradients once per optimizer step, not once per pass.

    Passes run on the gathered weights without FSDP2's hooks, and add the gradients of bfloat16
    weights to float32 sums, as in an unsharded model.
    """

    def __init__(self, model: LanguageModel, world: World) -> None:
        self.model, self.world = model, world
        self.parts = _sharded_parts(model.model)
        self.shards = {n: p for n, p in model.model.named_parameters() if p.requires_grad}
        self.whole: dict[str, nn.Parameter] = {}
        """The gathered weights by name; empty before the first pass."""
        self.fused: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of tensors (fused, gathered). FSDP2 fills the gathered tensor, which is then copied
        into the fused tensor.
        """
        self.sums: dict[str, torch.Tensor] = {}
        """Sharded gradients by name; they share memory with the float32 gradient sums."""
        setattr(model.model, ENTRY, self.logp)

    def logp(self, model: LanguageModel, batch: Batch, options: Mapping[str, Any]) -> LogProbs:
        if hasattr(self.model.head.linear.weight, "full_tensor"):
            with torch.no_grad():
                for part in self.parts:
                    part.unshard()
                if not self.whole:
                    self._prepare()
                if self.fused:
                    new, old = zip(*self.fused, strict=True)
                    torch._foreach_copy_(new, old)
        return batch_logp(replace(model, sharded=False), batch, **options)

    def _prepare(self) -> None:
        """Before the first pass, fuse the gathered weights and prepare their gradient sums."""
        every = dict(self.model.model.named_parameters())
        before = {name: parameter.data for name, parameter in every.items()}
        fuse_parameters(self.model.backbone)
        moved = [n for n, p in every.items() if p.data_ptr() != before[n].data_ptr()]
        self.fused = [(every[name].data, before[name]) for name in moved]
        self.whole = {name: every[name] for name in self.shards}
        rounded = [p for p in self.whole.values() if p.dtype == torch.bfloat16]
        attach_grad_sinks((parameter, GradHolder(parameter)) for parameter in rounded)

    def expect(self) -> None:
        """Do nothing, because gradients are summed after the last pass."""

    def finish(self) -> None:
        """Sum the gradients over ranks, and free the gathered weights."""
        for name, parameter in self.whole.items():
            holder = grad_holder(parameter)
            if holder.grad is not None:
                if self.world.size > 1:
                    self.world.sum_in_place(holder.grad)
                grad = self.sums.get(name)
                if grad is None:
                    grad = sharded_like(holder.grad, self.shards[name])
                if isinstance(holder, GradHolder):
                    self.sums[name] = grad  # shares the memory of the float32 sum
                    assert local_part(grad).data_ptr() == holder.grad.data_ptr()
                self.shards[name].grad = grad
            holder.grad = None
        for part in self.parts:
            part.reshard()


def _sharded_parts(root: Any) -> list[Any]:
    """Return the blocks of a sharded model, and the model itself."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in root.modules() if isinstance(part, FSDPModule)]


def gathered_steps(model: LanguageModel, world: World) -> GatheredSteps | None:
    return GatheredSteps(model, world) if _stays_gathered(model) else None


def device_mesh(settings: Parallel, world: World, device: str) -> Any:
    """Return the device mesh of a sharded model.

    Each copy of the model is divided among `shard_ranks` ranks. If `shard_ranks` is 0 or exceeds
    the number of ranks, each copy is divided among all ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    size = min(settings.shard_ranks or world.size, world.size)
    if size == world.size:
        return init_device_mesh(device, (world.size,), mesh_dim_names=("shard",))
    shape = (world.size // size, size)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def _blocks(root: Any) -> list[nn.Module]:
    """Return the transformer blocks of a model: its largest list of modules of the same class."""
    lists = [m for m in root.base_model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    alike = [m for m in lists if len({type(block) for block in m}) == 1]
    if not alike:
        raise ModelError(
            "model: parallel.strategy = 'fsdp' needs a model with a list of identical blocks, but "
            "this model has no such list; set parallel.strategy = 'ddp'"
        )
    largest: nn.ModuleList = max(alike, key=lambda m: sum(p.numel() for p in m.parameters()))
    return list(largest)


def _make_masters(module: nn.Module, made: dict[int, nn.Parameter]) -> None:
    """Convert trained 16-bit parameters to float32; tied parameters stay tied."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None or parameter.dtype in (torch.float32, torch.float64):
                continue
            if not parameter.requires_grad or hasattr(parameter, "full_tensor"):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach().float())
            part._parameters[name] = made[id(parameter)]


# Helpers for tensors that may be sharded: gather, shard, and access this rank's rows.
#
# A sharded tensor is a DTensor of FSDP2, whose rows (dimension 0) are divided among the ranks
# along the last dimension of the device mesh. Every function of this module also accepts
# ordinary tensors.


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
