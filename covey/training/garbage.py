"""Excludes long-lived objects from Python's garbage collection, for speed.

Importing torch, transformers and Triton creates about four hundred thousand objects. A full garbage
collection visits all of them, which takes a fifth of a second, and the thousands of rollouts in a
step trigger many such collections while the GPU waits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False
"""Whether a `freeze_garbage_collector` context is active, because asking `gc.get_freeze_count()`
takes a tenth of a second.
"""


@contextmanager
def freeze_garbage_collector() -> Iterator[None]:
    """Exclude all existing objects from garbage collection; later objects are collected as usual.

    A full collection runs first, because garbage such as an old model would otherwise stay in
    memory. If objects are already excluded (`gc.freeze`), this context does nothing.
    """
    global _frozen
    if _frozen or gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    _frozen = True
    try:
        yield
    finally:
        _frozen = False
        gc.unfreeze()
