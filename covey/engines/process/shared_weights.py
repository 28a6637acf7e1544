"""Weights shared by two processes on one machine: in CPU memory, or in GPU memory by CUDA IPC.

The trainer writes its weights into one block of memory, and the engine's process copies them into
its own model. The block belongs to the trainer: it outlives the engine's process, and is freed when
the trainer's process ends, even after a crash.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_tensor

ALIGNMENT = 256
"""Alignment of weights in bytes; vector instructions and GPUs read aligned memory fastest."""


class Piece(NamedTuple):
    """Describes one weight in the shared memory block: name, shape, dtype and byte offset."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def stop(self) -> int:
        """The byte offset at which this weight ends in the shared memory block."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class Handle(NamedTuple):
    """The data with which another process can open the shared memory block of weights."""

    pieces: tuple[Piece, ...]
    size: int
    descriptor: int = -1
    """File descriptor of the memory, inherited by the engine's process; -1 for GPU memory."""
    cuda: tuple[Callable[..., torch.Tensor], tuple[Any, ...]] | None = None
    """A function and its arguments; calling it in another process opens the GPU tensor there."""


@dataclass(slots=True)
class SharedWeights:
    """A memory block with all weights, which the trainer shares with the engine's process."""

    handle: Handle
    flat: torch.Tensor
    """All bytes of the shared memory block, as one flat tensor."""
    memory: Any = field(default=None, repr=False)

    @staticmethod
    def allocate(weights: Iterable[tuple[str, torch.Tensor]], *, on_gpu: bool) -> SharedWeights:
        """Allocate a shared memory block for weights; if `on_gpu` is true, on the weights' GPU."""
        pieces, size, device = [], 0, torch.device("cpu")
        for name, weight in weights:
            pieces.append(Piece(name, tuple(weight.shape), weight.dtype, size))
            size = -(-pieces[-1].stop // ALIGNMENT) * ALIGNMENT
            device = weight.device
        if on_gpu:
            flat = torch.empty(size, dtype=torch.uint8, device=device)
            return SharedWeights(Handle(tuple(pieces), size, cuda=reduce_tensor(flat)), flat)
        handle = Handle(tuple(pieces), size, descriptor=_anonymous_file(size))
        return SharedWeights.open(handle)

    @staticmethod
    def open(handle: Handle) -> SharedWeights:
        """Open the shared memory block that a handle describes."""
        if handle.cuda is not None:
            rebuild, arguments = handle.cuda
            return SharedWeights(handle, rebuild(*arguments))
        memory = mmap.mmap(handle.descriptor, handle.size)
        return SharedWeights(handle, torch.frombuffer(memory, dtype=torch.uint8), memory)

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the name and tensor of each weight; the tensors are views of shared memory."""
        for piece in self.handle.pieces:
            part = self.flat[piece.start : piece.stop]
            yield piece.name, part.view(piece.dtype).view(piece.shape)

    @torch.no_grad()
    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy all weights into the shared memory, and wait until the copy is complete."""
        new = dict(weights)
        for name, place in self.weights():
            place.copy_(new[name])
        if self.flat.is_cuda:
            torch.cuda.synchronize(self.flat.device)


def _anonymous_file(size: int) -> int:
    """Return the descriptor of an unnamed file, which is freed when all processes using it end."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("covey-weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, max(1, size))
    return descriptor
