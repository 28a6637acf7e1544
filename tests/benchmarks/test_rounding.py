"""The hand-written forward pass of benchmarks/rounding.py is the model's, but for what it rounds."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from covey.models.language_model import LanguageModel

TOKENS = torch.arange(40) % 90 + 2


@pytest.fixture(scope="module")
def rounding() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("rounding")


class States:
    """The hand-written pass through the embedded model."""

    def __init__(self, module: ModuleType, model: LanguageModel) -> None:
        self.module, self.model = module, model

    def __call__(self, *places: str, noise: int | None = None) -> torch.Tensor:
        generator = None if noise is None else torch.Generator().manual_seed(noise)
        rounded = self.module.Rounding(set(places), generator)
        with torch.no_grad():
            found: torch.Tensor = self.module.hidden_states(self.model.backbone, TOKENS, rounded)
        return found


@pytest.fixture
def states(rounding: ModuleType, embedded: LanguageModel) -> States:
    return States(rounding, embedded)


def test_without_rounding_it_is_the_models_own_pass(
    states: States, embedded: LanguageModel
) -> None:
    with torch.no_grad():
        own = embedded.backbone(TOKENS[None]).last_hidden_state[0]
    assert torch.allclose(states(), own, atol=2e-5, rtol=0)


def test_every_place_rounds_something_of_its_own(states: States) -> None:
    exact, seen = states(), set()
    for place in states.module.PLACES:
        off = float((states(place) - exact).abs().mean())
        assert 1e-6 < off < 0.05, place
        seen.add(off)
    assert len(seen) == len(states.module.PLACES)
    final = states("final")
    assert torch.equal(final, exact.bfloat16().float())


def test_noise_is_of_the_last_bits(states: States) -> None:
    one, other = (states(noise=seed) for seed in (1, 2))
    assert 0 < float((one - other).abs().mean()) < 1e-5
    assert torch.equal(one, states(noise=1))


def test_cases_take_each_place_away_and_each_alone(rounding: ModuleType) -> None:
    found, places = dict(rounding.cases()), set(rounding.PLACES)
    assert len(found) == 3 + (len(places) - 1) + len(places)
    assert found["everywhere"] == places
    assert found["... nor in norms"] == places - {"products", "norms"}
