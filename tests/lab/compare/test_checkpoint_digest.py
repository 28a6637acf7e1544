from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from covey.lab.compare.launch import checkpoint_digest

WEIGHTS = {"b": torch.tensor([[1.0, -0.0]]), "a": torch.tensor([3, 4], dtype=torch.int64)}


def folder(path: Path, **files: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
    return path


def test_digest_covers_names_dtypes_shapes_and_bytes(tmp_path: Path) -> None:
    by_hand = hashlib.sha256(
        b"a I64 [2]\n" + b"\x03" + bytes(7) + b"\x04" + bytes(7)
        + b"b F32 [1, 2]\n" + bytes([0, 0, 0x80, 0x3F, 0, 0, 0, 0x80])
    ).hexdigest()  # fmt: skip
    assert checkpoint_digest(folder(tmp_path / "one", model=WEIGHTS)) == by_hand
    parts = {f"model-{n}": {n: WEIGHTS[n]} for n in WEIGHTS}
    assert checkpoint_digest(folder(tmp_path / "two", **parts)) == by_hand
    # Optimizer state is not the policy.
    more = folder(tmp_path / "more", model=WEIGHTS, optimizer={"x": torch.ones(3)})
    assert checkpoint_digest(more) == by_hand


def test_one_bit_changes_the_digest(tmp_path: Path) -> None:
    other = {**WEIGHTS, "b": torch.tensor([[1.0, 0.0]])}  # plus zero, not minus zero
    digests = [
        checkpoint_digest(folder(tmp_path / str(n), model=w))
        for n, w in enumerate([WEIGHTS, other])
    ]
    assert digests[0] != digests[1]


def test_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path / "one", model=WEIGHTS) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SafetensorError, match="incomplete"):
        checkpoint_digest(path.parent)
