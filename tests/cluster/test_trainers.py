from __future__ import annotations

import pytest

from covey.cluster.actors import ray_starts_ranks
from covey.cluster.rank_actor import Place
from covey.cluster.trainers import variables_of
from covey.config import load_config
from covey.engines.make import check_engine
from covey.errors import ConfigError


def places(*nodes: str) -> list[Place]:
    return [
        Place(node=node, address=f"10.0.0.{node}", port=4000 + n, gpus=(str(6 - n),))
        for n, node in enumerate(nodes)
    ]


def test_ranks_get_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    first, _, third = variables_of(places("1", "1", "2"), threads=4)
    assert first == {
        "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000", "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "6,5",
    }  # fmt: skip
    changed = {"RANK": "2", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "4"}
    assert third == first | changed


def test_ranks_of_one_machine_meet_on_its_loopback_address() -> None:
    assert {row["MASTER_ADDR"] for row in variables_of(places("7", "7"), 1)} == {"127.0.0.1"}


def test_a_process_that_is_a_rank_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = load_config(overrides=["cluster.trainers=2", 'cluster.address="auto"'])
    monkeypatch.delenv("RANK", raising=False)
    assert ray_starts_ranks(asked)
    assert not ray_starts_ranks(load_config(overrides=["cluster.trainers=2"]))
    with pytest.raises(ConfigError, match=r"cluster.trainers = 2 .* torchrun"):
        check_engine(asked)  # from Python, or `covey compare`
    monkeypatch.setenv("RANK", "0")
    assert not ray_starts_ranks(asked)


def test_a_rank_has_one_gpu() -> None:
    with pytest.raises(ConfigError, match=r"cluster.trainer_gpus = 2 .* a rank trains on one GPU"):
        load_config(overrides=["cluster.trainers=2", "cluster.trainer_gpus=2"])
