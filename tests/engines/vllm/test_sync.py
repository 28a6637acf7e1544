"""What is written for servers: the weights of one version, and no older ones."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from covey.config import load_config
from covey.engines.vllm.sync import AdapterSync, FileSync
from covey.training.models import load_model
from covey.training.resolve import resolve


def test_only_the_newest_adapter_stays_in_the_folder(tmp_path: Path) -> None:
    settings = ["model.device=cpu", "adapter.rank=2"]
    model = load_model(resolve(load_config("arithmetic", settings)))
    sync = AdapterSync(model, tmp_path, base=FileSync(model, tmp_path))
    for version in (0, 1, 2):
        sync.prepare(model.model.named_parameters(), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["covey-2", "weights-0"]
    kept = load_file(tmp_path / "covey-2" / "adapter_model.safetensors")
    assert len(kept) == sum(".lora_" in name for name, _ in model.model.named_parameters())
