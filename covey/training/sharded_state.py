"""Save and load the state of a sharded optimizer; each rank writes and reads its own part.

The folder `state` of a checkpoint has the format of torch.distributed.checkpoint. The folder
contains weights in the optimizer's precision, moments and step counts. Any number of ranks can read
the folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from covey.errors import RunError
from covey.training.optimizer import Optimizer

STATE_FOLDER = "state"
WEIGHT = "weight"


def save_state(optimizer: Optimizer, folder: Path) -> None:
    """Write weights and moments; all ranks must call this function."""
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"{WEIGHT}.{name}": master.detach() for name, master in optimizer.masters.items()}
    tensors |= optimizer.state()
    save(tensors, checkpoint_id=folder / STATE_FOLDER)


def has_state(folder: Path) -> bool:
    """Whether a checkpoint contains a sharded state."""
    return (folder / STATE_FOLDER / ".metadata").is_file()


def load_state(optimizer: Optimizer, folder: Path, *, sharded: bool) -> None:
    """Read weights and moments in place.

    With a sharded optimizer, all ranks must call this function.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    path = folder / STATE_FOLDER
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    masters = optimizer.masters
    named = {key.split(".", 1)[1] for key in saved}
    if named != set(masters):
        other = min(named ^ set(masters))
        raise RunError(
            f"checkpoint {folder} is of another model: one of the two has no tensor {other}"
        )
    tensors = {key: _blank(key, masters) for key in saved}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            load(tensors, checkpoint_id=path, no_dist=not sharded)
    except CheckpointException as error:
        why = next(iter(error.failures.values()), (error, None))[0]
        raise RunError(f"checkpoint {folder} cannot be read: {why}") from None
    weights = {k.split(".", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{WEIGHT}.")}
    optimizer.load(weights, {k: v for k, v in tensors.items() if not k.startswith(f"{WEIGHT}.")})


def _blank(key: str, masters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    kind, name = key.split(".", 1)
    if kind == "step":
        return torch.zeros(())
    return torch.empty_like(masters[name].detach())
