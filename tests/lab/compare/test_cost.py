"""What a run costs beside its accuracy, and what an arm of pairs keeps of a recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.errors import ConfigError
from covey.lab.checks import doctor as machine
from covey.lab.compare.arm_results import Cost, arm_results
from covey.lab.compare.conclusion import conclude
from covey.lab.compare.design import Request, config_of, design_comparison, kept_options
from covey.lab.compare.launch import peak_memory
from covey.lab.compare.tables import cost_table
from tests.lab.compare.sample_comparison import comparison, run


def test_the_cost_of_an_arm_is_its_median_time_and_its_largest_memory() -> None:
    known = [
        replace(run("grpo", seed, "0000", "1100"), memory_gib=memory, cpu_seconds=cpu)
        for seed, memory, cpu in [(1, 1.5, 30.0), (2, 2.5, 10.0), (3, 2.0, 20.0)]
    ]
    unknown = [run("<b>", seed, "0000", "1100") for seed in (1, 2, 3)]
    made = comparison(runs=(*known, *unknown))
    first, second = (arm.cost for arm in arm_results(made))
    assert first == Cost(seconds=5.0, cpu_seconds=20.0, memory_gib=2.5)
    assert second == Cost(seconds=5.0, cpu_seconds=None, memory_gib=None)
    rows = cost_table(conclude(made)).rows
    assert [row[0] for row in rows] == ["grpo", "<b>"]
    assert rows[0][-2:] == ["20", "2.50"]
    assert rows[1][-2:] == ["-", "-"]


def test_the_peak_of_a_process_is_at_least_what_it_holds() -> None:
    held = torch.ones(2**24)  # 64 MiB
    assert peak_memory(held.device) > held.nbytes


def test_the_peak_of_a_process_is_in_bytes_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ru_maxrss` is in bytes there, and in KiB on Linux; the doctor used KiB everywhere."""
    assert machine.peak_memory is peak_memory
    monkeypatch.setattr("sys.platform", "darwin")
    cpu = torch.device("cpu")
    in_bytes = peak_memory(cpu)
    monkeypatch.setattr("sys.platform", "linux")
    assert peak_memory(cpu) >= 1024 * in_bytes


def test_the_beta_of_a_pair_is_not_that_of_a_penalty() -> None:
    request = Request(source="demo", algorithms=("grpo", "dpo", "ppo"), seeds=1)
    design = design_comparison(request)
    arms = {arm.name: arm for arm in design.arms}
    options = {name: config_of(design, arm).objective.options for name, arm in arms.items()}
    assert {name: one["beta"] for name, one in options.items()} == {"grpo": 0, "dpo": 0.1, "ppo": 0}
    assert "beta" not in kept_options(design, arms["dpo"])
    assert kept_options(design, arms["ppo"])["beta"] == (0.0, 0.05)


def test_a_comparison_samples_its_pairs() -> None:
    request = Request(
        source="demo", algorithms=("dpo", "ipo"), overrides=("preferences.file=x", "objective.name=dpo")
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"preferences\.file"):
        design_comparison(request)
