"""Call autograd functions without the overhead of autograd, for passes without gradients.

Autograd takes about as long to record a function as a small kernel takes to run. Prefill calls
hundreds of autograd functions, and the GPU would wait while Python records them.
"""

from __future__ import annotations

from typing import Any

import torch


class _NoContext:
    """The `ctx` argument of an autograd function whose backward pass is never called."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Save nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing, because there are no gradients."""


def call(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply an autograd function; where gradients are disabled, run only its forward pass."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)
