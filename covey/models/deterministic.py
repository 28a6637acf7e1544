"""The same bits twice: what is switched on for it, and what needs no switch.

A CPU adds in a fixed order, with the same number of threads. A GPU does not always: additions by
atomics come in any order, and products may use whatever workspace is free.

What has no order to fix here: covey's own kernels hold no atomics, and what they split they add up
in one order. What torch does otherwise and can do in order it does when it is told to:

    index_add      the embedding's gradient, sums over groups
    index_select   its gradient: a prompt's last token predicts the first of all its answers
    attention      the gradient of flash and of memory-efficient attention
    cuBLAS         with a workspace of fixed size

And what it cannot do in order it then refuses, by an error that names it. Training passes are not
recorded: which of them are graphs depends on what came before, and graphs are padded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic as settings

from covey.errors import ModelError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")
"""Its values with which products are the same every time."""


def make_deterministic() -> None:
    """Have this process do everything in a fixed order, from now until it ends."""
    if os.environ.get(WORKSPACE) not in FIXED:
        if torch.cuda.is_initialized():  # cuBLAS may have read the variable already
            raise ModelError(
                "model: deterministic = true comes too late, CUDA has been used in this process; "
                f"set the environment variable {WORKSPACE}={FIXED[0]} before it starts"
            )
        os.environ[WORKSPACE] = FIXED[0]
    torch.set_float32_matmul_precision("highest")  # no TF32
    # Errors and not warnings: torch takes the latter for leave to run attention in any order.
    torch.use_deterministic_algorithms(True, warn_only=False)
    # Nothing here reads what it has not written, and to fill it all would cost time.
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def in_order_anyway() -> Iterator[None]:
    """Run what is in a fixed order as it is, whatever torch thinks of it.

    Of a sum over each row torch cannot tell that its order is fixed, and refuses it; and to write
    each element once it takes a way that a graph cannot record.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
