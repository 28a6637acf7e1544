"""The metrics of GPU memory and GPU utilization, on a simulated GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from covey.loop import usage_metrics
from covey.types import Group, Prompt, Rollout


@pytest.mark.parametrize(("ranks", "device", "share"), [(1, "NVIDIA H200", 0.5), (4, "NVIDIA H200", 0.125), (1, "other", None)])  # fmt: skip
def test_utilization_is_a_share_of_the_peak_of_all_gpus(
    ranks: int, device: str, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**31)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    weights = torch.empty(10**9, device="meta")
    model: Any = SimpleNamespace(
        device=torch.device("cuda"), model=SimpleNamespace(parameters=lambda: [weights])
    )
    parts: Any = SimpleNamespace(
        policy=SimpleNamespace(model=model), world=SimpleNamespace(size=ranks),
        config=SimpleNamespace(train=SimpleNamespace(epochs=2)),
    )  # fmt: skip
    tokens = (0,) * 41_208
    rollout = Rollout.single_turn(
        prompt_id="p", sample=0, prompt_tokens=tokens, tokens=tokens,
        sampler_logp=(0.0,) * len(tokens), text="", finish="stop",
    )  # fmt: skip
    group = Group(prompt=Prompt(id="p", task="", messages=(), target=""), rollouts=(rollout,))
    found = usage_metrics(parts, [group], 2.0)
    assert found.pop("memory/peak") == 2.0
    assert found == ({} if share is None else {"time/mfu": pytest.approx(share, rel=1e-4)})
