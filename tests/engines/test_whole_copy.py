"""A sharded policy's whole copy follows an engine elsewhere."""

from __future__ import annotations

import torch

from covey.engines.make import WholeCopy
from covey.engines.native.engine import NativeCopy
from covey.models.load_model import load_language_model


def test_both_have_the_weights_and_the_source_is_read_once() -> None:
    policy, copy, far = (load_language_model("embedded", device="cpu") for _ in range(3))
    engine = WholeCopy(NativeCopy(far), NativeCopy(copy))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.5)
    reads = []

    def weights() -> list[tuple[str, torch.Tensor]]:
        reads.append(1)
        return list(policy.model.named_parameters())

    engine.load_weights(weights, 3)
    assert len(reads) == 1
    for model in (copy, far):
        pairs = zip(policy.model.parameters(), model.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert (engine.copy.version, engine.engine.version) == (3, 3)
    assert not engine.info.shares_weights
