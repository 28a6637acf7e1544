"""Keeping Python's garbage collector from objects that live as long as the process.

Torch, transformers and Triton make some four hundred thousand objects when they are imported, and
a full collection visits every one of them: a fifth of a second. The thousands of rollouts of a
step trigger such collections, one after the other, while a GPU waits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_garbage_collector() -> Iterator[None]:
    """Leave objects that exist by now out of all collections; later ones are collected.

    A full collection comes first, or garbage that exists already would stay, such as a model. If
    the caller has frozen objects already, nothing is done: what stays frozen is its choice.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
