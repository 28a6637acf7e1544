"""Switch a model between training and evaluation mode, several times per step."""

from __future__ import annotations

from torch import nn


def set_training(model: nn.Module, training: bool) -> None:
    """Switch all modules of a model to training or evaluation mode.

    This function avoids the overhead of `nn.Module.train`, which takes 5 ms for 30 layers.
    """
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None:
            vars(module)["training"] = training
            left += module._modules.values()
