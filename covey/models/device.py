"""Find devices by name (auto, cpu, cuda, cuda:1), and make torch deterministic."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic as settings

from covey.errors import ModelError

DEVICE = r"auto|cpu|cuda(:[0-9]{1,4})?"


def device_of(name: str) -> torch.device:
    """Return the device with this name, and check that it exists.

    `auto` means a GPU if there is one, and otherwise the CPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(
            f"model: torch finds no CUDA device, so the device {name!r} cannot be used"
        )
    if not re.fullmatch(DEVICE, name):
        raise ModelError(
            f"model: unknown device {name!r}; use auto, cpu, cuda, cuda:0, cuda:1, ..."
        )
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ModelError(
            f"model: the device {name!r} does not exist; torch finds {count} CUDA devices"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton kernels and CUDA graphs use the current device
    return device


# Deterministic mode: bit-identical results in every run.
#
# A CPU adds in a fixed order as long as the number of threads is the same. A GPU does not always
# add in a fixed order: atomic additions happen in any order, and cuBLAS may use any free
# workspace. Covey's own kernels always add partial sums in a fixed order, without atomic additions.
# For the following operations of torch, deterministic mode turns on the deterministic versions:
#
#   index_add      the embedding's gradient, sums over groups
#   index_select   the gradient: a prompt's last token predicts the first token of every completion
#   attention      the gradient of flash and of memory-efficient attention
#   cuBLAS         with a workspace of fixed size
#
# Torch raises an error for operations without a deterministic version. Training passes do not use
# CUDA graphs in deterministic mode, because a CUDA graph needs padded micro-batches, and whether a
# graph exists for a micro-batch depends on earlier micro-batches.

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which matrix products are deterministic."""


def make_deterministic() -> None:
    """Make torch use only deterministic algorithms in this process from now on."""
    if os.environ.get(WORKSPACE) not in FIXED:
        if torch.cuda.is_initialized():  # cuBLAS may have read the variable already
            raise ModelError(
                "model: model.deterministic = true has no effect now, because this process has "
                f"already used CUDA; set the environment variable {WORKSPACE}={FIXED[0]} before "
                "the process starts"
            )
        os.environ[WORKSPACE] = FIXED[0]
    torch.set_float32_matmul_precision("highest")  # no TF32
    # Not warn_only: then torch would still run attention with a varying order of additions.
    torch.use_deterministic_algorithms(True, warn_only=False)
    # Code that skips torch's check of operations sees from this flag that the process is
    # deterministic.
    torch.backends.cudnn.deterministic = True
    # No code here reads uninitialized memory, and filling it would cost time.
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def skip_determinism_check() -> Iterator[None]:
    """Allow deterministic operations that torch's determinism check refuses.

    For example, torch refuses a cumulative sum over each row, although the sum adds in a fixed
    order. A CUDA graph cannot capture the kernels that write to indexed elements in deterministic
    mode.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
