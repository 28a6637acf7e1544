"""Offload the inputs of checkpointed layers to CPU memory until the backward pass.

Gradient checkpointing stores the input of every layer. For a long sequence, the layer inputs take
most of the activation memory. With offloading, a second CUDA stream copies each layer's input to
pinned CPU memory while the layer runs. In the backward pass, the second stream copies the input of
the next layer back to the device while the current layer runs. At any time, only about three layer
inputs are on the device, whatever the number of layers. The copies in CPU memory are exact, so
offloading does not change gradients.

All copies run on one stream, in the order in which they were started. Because copies run in order,
a CPU buffer can be reused as soon as Python has freed the activation in the buffer. A CUDA graph
can contain the copies between device and CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

SMALLEST = 2**20
"""Minimum size in bytes of a tensor that is offloaded; smaller tensors stay on the device."""


class _Kept:
    """An activation that is stored in CPU memory and may have a copy on the device."""

    def __init__(self, values: torch.Tensor, buffer: torch.Tensor, before: _Kept | None) -> None:
        self.values: torch.Tensor | None = values
        """The activation on the device; None while the activation is only in CPU
        memory."""
        self.host = buffer[: values.nbytes].view(values.dtype).view(values.shape)
        self.device = values.device
        self.saved: torch.cuda.Event | None = None
        """CUDA event that marks the end of the copy to CPU memory."""
        self.loaded: torch.cuda.Event | None = None
        """CUDA event that marks the end of the copy back to the device."""
        self.before: Callable[[], _Kept | None] = (
            _nothing if before is None else weakref.ref(before)
        )


def _nothing() -> None:
    """Return None, as a weak reference does after its object was freed."""


class ActivationOffload:
    """Runs layers with gradient checkpointing, and stores the layer inputs in CPU memory."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        """Buffers in CPU memory that are free for reuse."""
        self._last: Callable[[], _Kept | None] = _nothing
        """Weak reference to the activation that was offloaded last."""
        self._stream: torch.cuda.Stream | None = None

    def __deepcopy__(self, memo: Any) -> ActivationOffload:
        """Return a new ActivationOffload, because a copy of the model has its own activations."""
        return ActivationOffload()

    def checkpoint(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a function with gradient checkpointing; offload its tensor arguments."""
        with saved_tensors_hooks(self._pack, self._unpack):
            return checkpoint(function, *arguments, **options)

    def join(self) -> None:
        """Make the GPU wait for the last offload copy, so that CUDA graph capture can end."""
        last = self._last()
        if last is not None and last.values is not None:  # else the backward pass took it
            _wait(last.device, last.saved)

    def _pack(self, values: torch.Tensor) -> _Kept | torch.Tensor:
        if not values.is_floating_point() or values.nbytes < SMALLEST:
            return values
        last = self._last()
        if last is not None and last.values is not None:
            self.join()
            last.values = None
        values = values.detach().contiguous()
        buffer = self._buffer(values)
        kept = _Kept(values, buffer, last)
        weakref.finalize(kept, self._free.append, buffer)
        kept.saved = self._copy(values, kept.host, values.device)
        self._last = weakref.ref(kept)
        return kept

    def _unpack(self, kept: _Kept | torch.Tensor) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        values = self._load(kept)
        _wait(kept.device, kept.loaded)
        kept.values = kept.loaded = None
        before = kept.before()
        if before is not None:
            self._load(before)  # while the layer whose input is returned here runs
        return values

    def _load(self, kept: _Kept) -> torch.Tensor:
        """Return the activation's copy on the device; start copying if there is no copy yet.

        The copy is complete once the CUDA event `loaded` has occurred.
        """
        if kept.values is None:
            kept.values = torch.empty_like(kept.host, device=kept.device, pin_memory=False)
            kept.loaded = self._copy(kept.host, kept.values, kept.device)
        return kept.values

    def _buffer(self, values: torch.Tensor) -> torch.Tensor:
        """Return the smallest free buffer that is large enough, or a new buffer."""
        sizes = [(free.nbytes, at) for at, free in enumerate(self._free)]
        fitting = [(size, at) for size, at in sizes if size >= values.nbytes]
        if fitting:
            return self._free.pop(min(fitting)[1])
        return torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=values.is_cuda)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, device: torch.device
    ) -> torch.cuda.Event | None:
        """Queue a copy after all pending GPU work; return a CUDA event for the end of the copy."""
        if device.type != "cuda":
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return copied


def _wait(device: torch.device, event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def checkpoint_layers(model: Any, *, offload: bool) -> None:
    """Turn on gradient checkpointing; if `offload` is true, store layer inputs in CPU memory."""
    renamed = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
    (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if not offload:
        return
    offloaded = ActivationOffload()
    for module in model.modules():  # the backbone and its layers
        if getattr(module, "gradient_checkpointing", False):
            module.activation_offload = offloaded
            module._gradient_checkpointing_func = partial(offloaded.checkpoint, use_reentrant=False)
