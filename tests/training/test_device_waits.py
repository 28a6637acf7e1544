import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from covey import garbage
from covey.config import load_config
from covey.config.resolve import resolve
from covey.loop import train
from covey.models.logp import LogProbs
from covey.objective import build as build_objective
from covey.objective import with_advantage
from covey.parallel import passes
from covey.parallel.passes import balanced_parts
from covey.policy.optimizer import Stepped
from covey.records.folder import RunFolder
from covey.run import Run
from covey.step import RowFacts, optimize, prepare
from covey.stopping import StopSignal
from covey.types import Batch, HostRows, Totals
from tests.conftest import make_batch
from tests.lab.plan.runs import SHORT
from tests.trackers import Notes
from tests.training.test_step import settings

WAITS = {
    "tolist", "item", "cpu", "numpy", "nonzero", "unique", "masked_select",
    "__float__", "__int__", "__bool__", "__index__",
}  # fmt: skip
"""What a device has to be waited for."""


class OnDevice(torch.Tensor):
    """Stands for a tensor on a device: all that is computed from one is one, until it is fetched."""

    waits: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in index):
                cls.waits["a mask as index"] += 1
        elif name in WAITS:
            cls.waits[name] += 1
        result = super().__torch_function__(func, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if name == "cpu" else result


class Still:
    """A policy that says the same of all tokens and never moves."""

    version = 0
    dropout = None
    packs = False
    training = True

    def __init__(self) -> None:
        self.model, self.said = self, torch.zeros((), requires_grad=True)

    def train(self) -> None: ...

    def expect_last_pass(self) -> None: ...

    def logp(self, batch: Batch) -> LogProbs:
        zero = torch.zeros(batch.tokens.shape)
        return LogProbs(logp=zero + self.said, entropy=zero)

    def step(self, rate: float) -> Stepped:
        return Stepped(grad_norm=1.0, skipped=False)


def waits_of_an_update(monkeypatch: pytest.MonkeyPatch, mini_batches: int) -> Counter[str]:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(passes, "micro_batches", balanced_parts)
    batch = make_batch(rows=24, groups=12)
    names = [n for n in Batch.__slots__ if getattr(batch, n) is not None]
    there: dict[str, Any] = {n: getattr(batch, n).as_subclass(OnDevice) for n in names}
    batch = replace(batch, **there, host=HostRows.of(batch))
    policy: Any = Still()
    policy.model.model = policy
    asked = settings(
        mini_batches=mini_batches, old_logp_from_sampler=True, skip_zero_gradient=True,
        micro_batch_tokens=100,
    )  # fmt: skip
    objective = build_objective("grpo", beta=0.0)
    learner = Run(policy=policy, objective=objective, settings=asked)
    batch = with_advantage(objective, prepare(learner, batch))
    OnDevice.waits.clear()
    metrics = optimize(learner, batch, step=1)
    assert metrics["val/ratio"] > 0
    return Counter(OnDevice.waits)


@pytest.mark.parametrize("mini_batches", [1, 3, 8])
def test_an_update_waits_for_the_device_three_times_however_many_steps_it_takes(
    monkeypatch: pytest.MonkeyPatch, mini_batches: int
) -> None:
    # Facts of the rows, losses, all other metrics; the optimizer waits for the norm beside.
    assert waits_of_an_update(monkeypatch, mini_batches) == {"cpu": 2, "tolist": 1}


def test_totals_and_useful_rows_are_those_of_the_batch() -> None:
    batch = make_batch(rows=12, groups=4)
    # One group has equal rewards, and one row of the others has no trained token.
    flat = batch.rewards.where(batch.group != 2, 1.0)
    batch = replace(batch, rewards=flat, mask=batch.mask & (torch.arange(12) != 5)[:, None])
    batch = with_advantage(build_objective("grpo", beta=0.0), batch)
    facts = RowFacts.of(batch, skip=True)
    index = torch.tensor([11, 0, 5, 2, 6, 10])
    assert facts.totals(index) == Totals.of(batch.rows(index))
    assert batch.advantage is not None
    useful = [n for n, row in enumerate(index.tolist()) if batch.advantage[row].abs().sum() > 0]
    assert facts.in_passes(index).tolist() == useful == [0, 1]
    assert facts.in_passes(torch.tensor([2, 6, 10])).tolist() == [0]


def test_all_rows_of_a_batch_are_the_batch_unless_it_has_padding_to_lose() -> None:
    batch = make_batch(rows=6)
    assert batch.rows(torch.arange(6)) is batch
    assert batch.rows(torch.tensor([1, 0, 2, 3, 4, 5])) is not batch
    wider = replace(
        batch,
        **{
            name: torch.nn.functional.pad(getattr(batch, name), (0, 3))
            for name in ("tokens", "mask", "sampler_logp")
        },
    )
    assert wider.rows(torch.arange(6)).tokens.equal(batch.tokens)


def test_a_run_keeps_the_collector_off_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counts(Notes):
        frozen = 0

        def step(self, metrics: object) -> None:
            self.frozen = gc.get_freeze_count()

    counts, before = Counts(), gc.get_freeze_count()
    monkeypatch.setattr(garbage, "_frozen", False)
    gc.unfreeze()
    parts = Run.build(resolve(load_config("arithmetic", [*SHORT, "train.steps=1"])))
    train(parts, RunFolder.create(tmp_path / "run", "", {}), [counts], StopSignal())
    assert counts.frozen > 10_000
    assert gc.get_freeze_count() == 0
    if before:  # as the test session had it
        gc.freeze()
