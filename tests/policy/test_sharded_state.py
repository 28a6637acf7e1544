"""Reading the sharded state of a foreign checkpoint runs no code that the checkpoint contains."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from covey.errors import RunError
from covey.policy.checkpoint import STATE_FOLDER, load_state, save_state
from tests.policy.test_optimizer import make

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def saved(folder: Path) -> torch.Tensor:
    """Save the state of an optimizer after a step; return its weight."""
    parameter, optimizer = make(torch.bfloat16)
    parameter.sum().backward()
    optimizer.step(1e-2)
    save_state(optimizer, folder)
    return optimizer.masters["w"].detach().clone()


def test_a_state_of_ours_is_read_bit_for_bit(tmp_path: Path) -> None:
    weight = saved(tmp_path)
    _, optimizer = make(torch.bfloat16)
    assert not torch.equal(optimizer.masters["w"], weight)
    load_state(optimizer, tmp_path, sharded=False)
    assert torch.equal(optimizer.masters["w"], weight)


class Shell:
    """An object whose unpickling runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_code_in_the_description_is_refused_and_does_not_run(tmp_path: Path) -> None:
    saved(tmp_path)
    path, proof = tmp_path / STATE_FOLDER / ".metadata", tmp_path / "proof"
    found = pickle.loads(path.read_bytes())
    found.planner_data = Shell(f"touch {proof}")
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(RunError, match="system does not belong"):
        load_state(make(torch.bfloat16)[1], tmp_path, sharded=False)
    assert not proof.exists()
    pickle.loads(path.read_bytes())  # as torch reads it
    assert proof.exists()


def test_entries_that_torch_would_unpickle_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / STATE_FOLDER / ".metadata"
    found = pickle.loads(path.read_bytes())
    found.state_dict_metadata["weight.w"] = BytesStorageMetadata()
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(RunError, match="does not belong"):
        load_state(make(torch.bfloat16)[1], tmp_path, sharded=False)


def test_a_truncated_description_is_one_line(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / STATE_FOLDER / ".metadata"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RunError, match="cannot be read"):
        load_state(make(torch.bfloat16)[1], tmp_path, sharded=False)
