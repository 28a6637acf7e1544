"""Pieces of users' objectives: a wrong return value is one line that says what to return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.errors import ConfigError
from covey.objective import build, with_advantage
from covey.objective.loss import policy_loss
from tests.conftest import make_batch


@pytest.mark.parametrize(
    ("returned", "said"),
    [(None, "NoneType"), (1.0, "float"), (torch.zeros(6), r"\[6\]")],
)
def test_an_advantage_must_be_a_tensor_of_tokens(returned: Any, said: str) -> None:
    objective = replace(build("grpo"), advantage=lambda batch: returned)
    with pytest.raises(ConfigError, match=rf"advantage function returned {said}; .* \[6, 9\]"):
        with_advantage(objective, make_batch())


def test_a_surrogate_must_return_a_gain() -> None:
    wrong: Any = lambda tokens: tokens.advantage  # noqa: E731
    objective = replace(build("grpo"), surrogate=wrong)
    batch = with_advantage(objective, make_batch())
    batch = replace(batch, weight=batch.mask.double())
    with pytest.raises(ConfigError, match=r"returned Tensor; it must return .*Gain"):
        policy_loss(objective, batch, batch.sampler_logp)
