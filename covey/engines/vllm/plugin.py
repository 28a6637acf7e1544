"""The plugin that vLLM loads in each of its processes; it registers covey's transfer engine.

vLLM finds the plugin by the entry point `vllm.general_plugins` in pyproject.toml.
"""

from __future__ import annotations

BACKEND = "covey_file"
"""The name of the transfer engine in `--weight-transfer-config`."""


def register() -> None:
    """Register the transfer engine; vLLM may call this function several times in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "covey.engines.vllm.transfer", "FileTransfer"
        )
