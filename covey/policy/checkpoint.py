"""Writes and reads the models of a checkpoint, which is an ordinary Hugging Face folder:

    config.json, model.safetensors, tokenizer...   for AutoModelForCausalLM; float32 masters
    optimizer.safetensors                          AdamW's moments
    covey.json                                     the state of the run and the policy version

With an adapter, adapter_config.json and adapter_model.safetensors (peft's format) replace the
model's weights. If training updates the reference, the checkpoint also contains the reference's
weights. The file in_flight.jsonl contains rollouts that the engine has already generated for later
steps. If the parameters are sharded, the optimizer state is in the subfolder `state` instead of
optimizer.safetensors. Any number of ranks, with or without sharding, can load any checkpoint.
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from covey.errors import RunError
from covey.models.adapter import WEIGHTS_FILE, named_weights, save_adapter
from covey.models.load_model import read_pretrained
from covey.parallel.shard import placed_like, whole_tensors
from covey.policy.optimizer import Optimizer
from covey.policy.policy import Policy
from covey.records.records import read_text

STATE_FILE = "covey.json"
OPTIMIZER_FILE = "optimizer.safetensors"


def save_policy(
    policy: Policy, folder: Path, state: Mapping[str, Any], *, writes: bool = True
) -> None:
    """Write the policy, its optimizer and `state` into an existing folder.

    If the policy is sharded, all ranks must call this function, but only the rank with
    `writes=True` creates files. The folder must already contain the state of a sharded optimizer.
    """
    model = policy.whole or policy.model
    if model.adapter is None:
        weights = master_state_dict(policy, keep=writes)
    else:
        weights = whole_tensors(policy.optimizer.masters, keep=writes)
    if not writes:
        return
    try:
        if model.adapter is None:
            config = copy.deepcopy(model.model.config)
            config.dtype = torch.float32
            model.model.save_pretrained(folder, state_dict=weights)
            config.save_pretrained(folder)
            model.tokenizer.save_pretrained(folder)
        else:
            save_adapter(policy.model, weights, folder)
        if policy.whole is None:
            tensors = {k: v.contiguous() for k, v in policy.optimizer.state().items()}
            save_file(tensors, folder / OPTIMIZER_FILE)
    except SafetensorError as error:
        # safetensors reports a full disk with its own error; callers expect an OSError.
        raise OSError(str(error)) from None
    (folder / STATE_FILE).write_text(json.dumps({**state, "version": policy.version}, indent=2))


def master_state_dict(policy: Policy, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """Return the model's full state dict, with master weights for the trained parameters.

    A rank with `keep=False` helps the other ranks to gather sharded weights, but returns {}.
    """
    state: dict[str, torch.Tensor] = dict(policy.model.model.state_dict(keep_vars=True))
    # A tied weight has two names, but only one master copy.
    names = {id(p): n for n, p in policy.optimizer.parameters.items()}
    found = whole_tensors(policy.optimizer.masters, keep=keep)
    rest = {name: value for name, value in state.items() if id(value) not in names}
    whole = whole_tensors(rest, keep=keep)
    if not keep:
        return {}
    return {n: whole[n] if n in rest else found[names[id(v)]] for n, v in state.items()}


def load_policy(policy: Policy, folder: Path) -> dict[str, Any]:
    """Load a checkpoint into the policy and its optimizer; return the contents of covey.json."""
    try:
        try:
            state: Any = json.loads(read_text(folder / STATE_FILE))
        except RecursionError:
            raise ValueError(f"{STATE_FILE} is not JSON") from None
        if not isinstance(state, dict) or type(state.get("version")) is not int:
            raise ValueError(f"{STATE_FILE} has no version")
        if type(state.get("step")) not in (int, type(None)):
            raise ValueError(f"{STATE_FILE}: step is not a whole number")
        if (folder / STATE_FOLDER / METADATA_FILE).is_file():
            load_state(policy.optimizer, folder, sharded=policy.model.sharded)
        else:
            weights, masters = read_weights(policy, folder), policy.optimizer.masters
            moments = load_file(folder / OPTIMIZER_FILE)
            policy.optimizer.load(
                {name: placed_like(weights[name].detach(), masters[name]) for name in masters},
                {k: placed_like(v, masters[k.split(".", 1)[1]]) for k, v in moments.items()},
            )
        policy.version = state["version"]
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise RunError(f"checkpoint {folder} cannot be read: {error}") from None
    return {"step": None, **state}


def read_weights(policy: Policy, folder: Path) -> Mapping[str, torch.Tensor]:
    """Return the weights of a checkpoint, keyed by the optimizer's parameter names."""
    model = policy.model.model
    if policy.model.adapter is not None:
        saved = load_file(folder / WEIGHTS_FILE)
        weights = named_weights(policy.model, saved)
        if weights.keys() != policy.optimizer.masters.keys() or len(weights) != len(saved):
            raise RunError(
                f"checkpoint {folder} has an adapter that does not match the [adapter] section of "
                "the configuration; use the [adapter] settings of the run that saved the checkpoint"
            )
        return weights
    # Many models use other parameter names in the file, and store one tensor per expert.
    exact = torch.promote_types(model.dtype, torch.float32)
    return dict(read_pretrained(type(model), str(folder), exact).named_parameters())


# Save and load the state of a sharded optimizer; each rank writes and reads its own part.
#
# The folder `state` of a checkpoint has the format of torch.distributed.checkpoint, which any
# number of ranks can read. It contains weights in the optimizer's precision, moments and step
# counts; the pickle `.metadata` describes the folder. A checkpoint may come from a stranger, so
# this module reads the pickle without running code in it.

STATE_FOLDER, METADATA_FILE = "state", ".metadata"
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
"""Maps Python modules to the classes and functions that the pickle `.metadata` may load."""


def save_state(optimizer: Optimizer, folder: Path) -> None:
    """Write the optimizer's weights and moments; all ranks must call this function."""
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"{WEIGHT}.{name}": master.detach() for name, master in optimizer.masters.items()}
    tensors |= optimizer.state()
    save(tensors, checkpoint_id=folder / STATE_FOLDER)


def load_state(optimizer: Optimizer, folder: Path, *, sharded: bool) -> None:
    """Load the optimizer's weights and moments; if `sharded`, all ranks must call this function."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = _reader(folder)
    saved = [(key, *key.split(".", 1)) for key in reader.read_metadata().state_dict_metadata]
    masters = optimizer.masters
    if lacking := {name for _, _, name in saved} ^ set(masters):
        raise RunError(
            f"checkpoint {folder} belongs to another model: the tensor {min(lacking)} exists only "
            "in the checkpoint or only in the model"
        )
    tensors = {
        key: torch.zeros(()) if kind == "step" else torch.empty_like(masters[name].detach())
        for key, kind, name in saved
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            load(tensors, storage_reader=reader, no_dist=not sharded)
    except CheckpointException as error:
        why = next(iter(error.failures.values()), (error, None))[0]
        raise RunError(f"checkpoint {folder} cannot be read: {why}") from None
    weights = {name: tensors.pop(key) for key, kind, name in saved if kind == WEIGHT}
    optimizer.load(weights, tensors)


class _Unpickler(pickle.Unpickler):
    """Unpickler that loads only tensor metadata, so that an untrusted pickle runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or function; raise UnpicklingError for any other name."""
        plain = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if plain or (module, name) == ("torch", "Size") or name in METADATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")


def _reader(folder: Path) -> Any:
    """Return a safe reader for the folder `state` of an untrusted checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            try:
                with (folder / STATE_FOLDER / METADATA_FILE).open("rb") as file:
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
