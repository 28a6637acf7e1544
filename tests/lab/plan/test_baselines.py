"""What `covey plan` knows of critics and pairs: memory, and settings without effect."""

from __future__ import annotations

from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.lab.plan.equivalence import coincidences
from covey.lab.plan.forecast import Device
from covey.lab.plan.memory import forecast
from covey.lab.plan.model_shape import shape_of

CPU = Device(kind="cpu", memory=2**34, name="a laptop")
GPU = Device(kind="cuda", memory=80 * 2**30, name="a GPU")


def config_of(*given: str) -> Config:
    return resolve(load_config("arithmetic", given))


def bytes_of(config: Config, device: Device) -> dict[str, int]:
    return {part.name: part.bytes for part in forecast(config, device).parts}


def test_a_critic_is_a_second_model_in_training() -> None:
    config = config_of("objective.name=ppo", "objective.beta=0.0")
    shape = shape_of(config)
    on_cpu, on_gpu = bytes_of(config, CPU), bytes_of(config, GPU)
    weights = shape.parameters
    assert on_cpu["critic"] == 4 * weights + 8 * shape.trained
    assert on_cpu["critic gradients"] == 4 * shape.trained
    # bfloat16 weights, a float32 master and two moments.
    assert on_gpu["critic"] == 2 * weights + 12 * shape.trained
    assert "critic" not in bytes_of(config_of("objective.name=grpo", "objective.beta=0.0"), CPU)


def test_pairs_need_a_reference() -> None:
    assert bytes_of(config_of("objective.name=dpo"), CPU)["reference"] > 0


def test_no_arm_of_the_comparison_is_another_under_a_different_name() -> None:
    names = ("ppo", "dpo", "ipo", "grpo", "gspo", "reinforce_pp")
    assert coincidences({name: config_of(f"objective.name={name}") for name in names}) == []
