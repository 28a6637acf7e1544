"""Python's garbage collector, kept off what will never be garbage.

Torch, transformers and Triton make some four hundred thousand objects when they are imported, and
a full collection looks at every one of them: a fifth of a second. The thousands of answers of a
step bring such collections about, one after the other, while a GPU waits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_garbage_collector() -> Iterator[None]:
    """Leave what exists by now out of all collections; what is made from now on is collected.

    What is garbage already goes first, or it would stay: perhaps somebody's last model.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
