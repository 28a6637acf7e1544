"""A weight transfer engine that runs in vLLM's workers and loads weights from a file.

vLLM's own transfer engines move weights between GPUs. The transfer engine in this module works on
any device. The engine reads a safetensors file in shared memory, or on a file system that trainer
and servers share. The plugin in plugin.py registers the engine with vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class FileInit(WeightTransferInitInfo):
    """The initial settings, which are empty because the transfer engine needs none."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """The message that announces new weights, with the path of their file."""

    path: str


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads all weights of the model from a file."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing, because a file needs no connection."""

    def start_weight_update(self) -> None:
        """Restore the weight layout that the model's weight loaders expect."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the weights from the file, one tensor at a time."""
        with safe_open(update_info.path, framework="pt", device="cpu") as file:
            names = file.keys()
            self.model.load_weights((name, file.get_tensor(name)) for name in names)

    def finish_weight_update(self) -> None:
        """Convert the loaded weights to the layout that the kernels need."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing, because no file is open between updates."""
