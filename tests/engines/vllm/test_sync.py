"""What is written for servers: the weights of one version, and no older ones."""

from __future__ import annotations

import contextlib
import copy
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from covey.config import load_config
from covey.config.resolve import resolve
from covey.engines.vllm.sync import AdapterSync, FileSync
from covey.errors import EngineError
from covey.models.adapter import add_adapter
from covey.models.language_model import LanguageModel
from covey.policy.policy import load_model


def test_only_the_newest_adapter_stays_in_the_folder(tmp_path: Path) -> None:
    settings = ["model.device=cpu", "adapter.rank=2"]
    model = load_model(resolve(load_config("arithmetic", settings)))
    sync = AdapterSync(model, tmp_path, base=FileSync(model, tmp_path))
    for version in (0, 1, 2):
        sync.prepare(model.model.named_parameters(), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["covey-2", "weights-0"]
    kept = load_file(tmp_path / "covey-2" / "adapter_model.safetensors")
    assert len(kept) == sum(".lora_" in name for name, _ in model.model.named_parameters())


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond a kilobyte, for no longer than a `with`: pytest writes files, too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_one_line(embedded: LanguageModel, tmp_path: Path) -> None:
    base = FileSync(embedded, tmp_path)
    adapted = add_adapter(copy.deepcopy(embedded), rank=8)
    for model, sync in (
        (embedded, base),
        (adapted, AdapterSync(adapted, tmp_path, base=base, based=True)),
    ):
        message = r"cannot write weights to .*; set engine.vllm.folder"
        with pytest.raises(EngineError, match=message), full_disk():
            sync.prepare(model.model.named_parameters(), 0)
