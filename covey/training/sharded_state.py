"""Save and load the state of a sharded optimizer; each rank writes and reads its own part.

The folder `state` of a checkpoint has the format of torch.distributed.checkpoint. The folder
contains weights in the optimizer's precision, moments and step counts. Any number of ranks can read
the folder. Torch describes the folder in the pickle `.metadata`. A checkpoint may come from a
stranger, so this module reads the pickle without running code in it.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from covey.errors import RunError
from covey.training.optimizer import Optimizer

STATE_FOLDER = "state"
WEIGHT = "weight"
METADATA: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "pathlib": frozenset({"PosixPath", "WindowsPath"}),
        "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
        "torch.distributed.checkpoint.metadata": frozenset(
            {
                "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            }
        ),
        "torch.serialization": frozenset({"_get_layout"}),
    }
)  # fmt: skip
"""The classes and functions that the pickle `.metadata` may contain, by module."""


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
    """Load weights and moments into the optimizer.

    With a sharded optimizer, all ranks must call this function.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = _reader(folder)
    saved = reader.read_metadata().state_dict_metadata
    masters = optimizer.masters
    named = {key.split(".", 1)[1] for key in saved}
    if named != set(masters):
        name = min(named ^ set(masters))
        raise RunError(
            f"checkpoint {folder} belongs to another model: the tensor {name} is missing in the "
            "checkpoint or in the model"
        )
    tensors = {key: _blank(key, masters) for key in saved}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            load(tensors, storage_reader=reader, no_dist=not sharded)
    except CheckpointException as error:
        why = next(iter(error.failures.values()), (error, None))[0]
        raise RunError(f"checkpoint {folder} cannot be read: {why}") from None
    weights = {k.split(".", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{WEIGHT}.")}
    optimizer.load(weights, {k: v for k, v in tensors.items() if not k.startswith(f"{WEIGHT}.")})


class _Unpickler(pickle.Unpickler):
    """Unpickles only classes that describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that describes tensors; raise an error for any other object."""
        plain = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if plain or (module, name) == ("torch", "Size") or name in METADATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")


def _reader(folder: Path) -> Any:
    """Return a safe reader for the folder `state` of an untrusted checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    class Reader(FileSystemReader):
        """Reads the pickle `.metadata` with `_Unpickler`."""

        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            """Read `.metadata`; refuse entries other than tensors, which torch would unpickle."""
            try:
                with (folder / STATE_FOLDER / ".metadata").open("rb") as file:
                    found: Metadata = _Unpickler(file).load()
                tensors = found.state_dict_metadata.values()
                if not all(isinstance(entry, TensorStorageMetadata) for entry in tensors):
                    raise pickle.UnpicklingError("an entry is not a tensor")
            except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
                raise RunError(f"checkpoint {folder} cannot be read: {error}") from None
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    return Reader(folder / STATE_FOLDER)


def _blank(key: str, masters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    kind, name = key.split(".", 1)
    if kind == "step":
        return torch.zeros(())
    return torch.empty_like(masters[name].detach())
