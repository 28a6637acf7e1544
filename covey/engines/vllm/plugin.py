"""A vLLM plugin that registers Covey's weight transfer engine in each vLLM process.

vLLM finds the plugin by the entry point `vllm.general_plugins` in pyproject.toml.
"""

from __future__ import annotations

BACKEND = "covey_file"
"""The name of Covey's weight transfer engine in vLLM's `--weight-transfer-config`."""


def register() -> None:
    """Register Covey's weight transfer engine; vLLM may call this function several times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "covey.engines.vllm.transfer", "FileTransfer"
        )
