"""Saves and loads checkpoints, and resumes runs. A checkpoint is an ordinary Hugging Face folder:

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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from covey.errors import RunError
from covey.models.adapter import WEIGHTS_FILE, named_weights, save_adapter
from covey.models.from_pretrained import read_pretrained
from covey.models.sharded_tensors import placed_like, whole_tensors
from covey.run.best import best_step
from covey.run.folder import RunFolder
from covey.run.records import Note, read_text
from covey.run.resume import Start, offer, put_aside_after
from covey.training.optimizer import Optimizer
from covey.training.policy import Policy
from covey.training.state import State

if TYPE_CHECKING:
    from covey.training.loop import Trainer

STATE_FILE = "covey.json"
OPTIMIZER_FILE = "optimizer.safetensors"


class Saved(Protocol):
    """A model that a checkpoint saves in addition to the policy, such as a critic."""

    def save(self, folder: Path, *, writes: bool = True) -> None:
        """Add files to a checkpoint; all ranks must call this method, but only one rank writes."""

    def load(self, folder: Path) -> None:
        """Restore the model's state from a checkpoint."""


def save(run: RunFolder, trainer: Trainer, state: State) -> None:
    """Write the checkpoint of a step atomically, and delete old checkpoints.

    The best checkpoint and the newest `save.keep` checkpoints are kept. Rank 0 writes the
    checkpoint. If parameters are sharded, each rank writes its own shards into the same folder.
    """
    parts, policy, world = trainer.parts, trainer.parts.policy, trainer.parts.world
    with ExitStack() as stack:
        folder = world.from_main(lambda: stack.enter_context(run.new_checkpoint(state.step)))
        if policy.whole is not None:
            save_state(policy.optimizer, folder)
        if world.is_main or policy.whole is not None:
            save_policy(policy, folder, asdict(state), writes=world.is_main)
        for other in parts.others:
            other.save(folder, writes=world.is_main)
        trainer.save(folder, state.step)
        world.barrier()
    if world.is_main:
        run.prune_checkpoints(parts.config.save.keep, best_step(run))
    world.barrier()


def restore(policy: Policy, others: Sequence[Saved], start: Start, fresh: State) -> State:
    """Load the checkpoint of `start` into the models, and return the saved progress of the run.

    If `start` has no checkpoint, leave the models unchanged, and return `fresh`.
    """
    if start.checkpoint is None:
        return fresh
    folder, step = start.checkpoint, start.step
    saved = load_policy(policy, folder)
    if saved["step"] != step:
        raise RunError(
            f"{folder} contains the checkpoint of step {saved['step']}, not of step {step}"
        )
    for other in others:
        other.load(folder)
    if saved.keys() == {"step", "version"}:  # older versions of SFT saved only these fields
        return State(step=step)
    try:
        return State(
            step=step,
            episode=int(saved["episode"]),
            tokens=int(saved.get("tokens", 0)),
            beta=float(saved["beta"]),
            beta_setting=saved.get("beta_setting"),
            evaluation_due=bool(saved.get("evaluation_due", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"checkpoint {folder} cannot be read, because {STATE_FILE} is invalid: {error!r}"
        ) from None


def resume(run: RunFolder, trainer: Trainer, start: Start, note: Note) -> State:
    """Restore a run's models and progress, and set aside the records of steps after the checkpoint.

    The resumed run computes the steps after the checkpoint again.
    """
    parts = trainer.parts
    try:
        state = restore(parts.policy, parts.others, start, trainer.fresh)
    except RunError as error:
        raise RunError(f"{error}; {offer(run, before=start.step)}") from None
    trainer.apply_settings(state)
    aside = parts.world.from_main(lambda: put_aside_after(run, start))
    if aside is not None:
        note(f"steps after {start.step} are computed again; their old records are in {aside}")
    return state


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
        state = _read_state(folder / STATE_FILE)
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
    return state


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state: Any = json.loads(read_text(file))
    except RecursionError:
        raise ValueError(f"{file.name} is not JSON") from None
    if not isinstance(state, dict) or type(state.get("version")) is not int:
        raise ValueError(f"{file.name} has no version")
    if type(state.get("step")) not in (int, type(None)):
        raise ValueError(f"{file.name}: step is not a whole number")
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
        """Reads the pickle `.metadata` with `_Unpickler`."""

        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            """Read `.metadata`; refuse non-tensor entries, which torch would unpickle."""
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
