"""Every kind of reference: what it says, how it follows, and that it can be stopped."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.cli.main import run as covey
from covey.config import Config, load_config
from covey.config.reference_kinds import OPTIONS
from covey.config.resolve import resolve
from covey.errors import ConfigError, RunError
from covey.models.adapter import add_adapter
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.models.logp import LogProbs, batch_logp
from covey.policy.optimizer import MasterAdamW
from covey.policy.policy import Policy
from covey.reference import Reference
from covey.reference.build import make_reference
from covey.reference.frozen import AdapterOffReference, FrozenReference, OffloadedReference
from covey.run import Run
from covey.types import Batch
from tests.conftest import make_batch
from tests.reference.servers import TOKEN, Server, fork_server


def config_of(*overrides: str) -> Config:
    return load_config(None, ["model.device=cpu", "rollout.temperature=0.8", *overrides])


def policy_of(model: LanguageModel) -> Policy:
    optimizer = MasterAdamW(
        model.model.named_parameters(),
        betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    return Policy(model=model, optimizer=optimizer, temperature=0.8, logits_megabytes=64)


def take_step(policy: Policy, batch: Batch, rate: float = 1e-2) -> None:
    values = policy.logp(batch)
    (values.logp * torch.linspace(-1, 1, len(batch))[:, None]).sum().backward()
    policy.step(rate)


def kl(policy: Policy, reference: LogProbs, batch: Batch) -> torch.Tensor:
    """The k3 estimate of every token."""
    with torch.no_grad():
        d = reference.logp - policy.logp(batch).logp
    return (d.exp() - 1 - d)[batch.mask]


@pytest.mark.parametrize("name", ["embedded", "qwen"])
def test_the_starting_weights_give_the_same_kl_wherever_they_are(
    name: str, server: Server, qwen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "embedded" if name == "embedded" else qwen
    monkeypatch.setenv("TEST_TOKEN", TOKEN)
    flags = ("--token-env", "TEST_TOKEN")
    mine = server if name == "embedded" else fork_server(tmp_path / "output", path, *flags)
    where = [f"reference.url={mine.url}", "reference.token_env=TEST_TOKEN"]
    options = {"server": where}
    load = partial(load_language_model, path, device="cpu")
    batch = make_batch(rows=24, longest=16, groups=6)

    adapted = add_adapter(load(), rank=4)
    whole, thin = policy_of(load()), policy_of(adapted)
    for policy in (whole, thin):
        take_step(policy, batch)
    found = {}
    for kind in ("frozen", "offloaded", "server", "adapter_off"):
        policy = thin if kind == "adapter_off" else whole
        config = config_of(f"reference.kind={kind}", *options.get(kind, []))
        reference = make_reference(config, policy=policy.model, load=load)
        with reference.loaded():
            found[kind] = reference.logp(batch)
    if mine is not server:
        mine.kill()
    expected = kl(whole, found["frozen"], batch)
    assert expected.mean() > 1e-3
    for values in found.values():
        assert torch.allclose(kl(whole, values, batch), expected, atol=1e-5, rtol=0)
        assert torch.allclose(values.entropy, found["frozen"].entropy, atol=1e-5, rtol=0)
    assert float(kl(thin, found["adapter_off"], batch).mean()) > 1e-3


def test_an_adapter_without_effect_has_no_kl(qwen: str) -> None:
    model = add_adapter(load_language_model(qwen, device="cpu"), rank=4)
    reference = AdapterOffReference(model=model, temperature=1.0, logits_megabytes=64)
    batch = make_batch()
    assert torch.equal(reference.logp(batch).logp, batch_logp(model, batch).logp)
    assert [n for n, p in model.model.named_parameters() if p.requires_grad] != []


def test_a_new_adapter_needs_no_second_copy(qwen: str) -> None:
    model = add_adapter(load_language_model(qwen, device="cpu"), rank=4)
    config = config_of(f"model.path={qwen}")
    reference = make_reference(config, policy=model, load=lambda: pytest.fail("loaded"))
    assert isinstance(reference, AdapterOffReference)


def test_an_offloaded_reference_is_at_home_when_it_does_not_compute(qwen: str) -> None:
    model = load_language_model(qwen, device="cpu")
    reference = OffloadedReference(model=model, temperature=1.0, logits_megabytes=64)
    addresses = {n: p.data_ptr() for n, p in model.model.named_parameters()}
    with reference.loaded():
        assert reference.on_device
        reference.logp(make_batch())
        assert reference.on_device
    assert not reference.on_device
    assert {n: p.data_ptr() for n, p in model.model.named_parameters()} == addresses


def follower(kind: str, path: str, *options: str) -> tuple[Policy, Any]:
    load = partial(load_language_model, path, device="cpu")
    policy = policy_of(load())
    config = config_of(f"reference.kind={kind}", *options)
    return policy, make_reference(config, policy=policy.model, load=load)


def weights_of(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.model.named_parameters()}


def test_a_moving_reference_is_the_average_worked_out_by_hand(qwen: str) -> None:
    policy, reference = follower("moving", qwen, "reference.alpha=0.25", "reference.every=2")
    expected, batch = weights_of(policy.model), make_batch()
    for step in range(1, 7):
        take_step(policy, batch)
        reference.after_step(policy.version, policy.optimizer.masters)
        if step % 2 == 0:
            now = weights_of(policy.model)
            expected = {n: 0.25 * now[n] + 0.75 * w for n, w in expected.items()}
        found = weights_of(reference.model)
        for name, weight in expected.items():
            assert torch.allclose(found[name], weight, atol=1e-7, rtol=1e-6)
    assert float(kl(policy, reference.logp(batch), batch).mean()) > 1e-4
    # The policy's own weights are not shared, nor touched.
    assert {p.data_ptr() for p in reference.model.model.parameters()}.isdisjoint(
        p.data_ptr() for p in policy.model.model.parameters()
    )


def test_small_moves_are_not_lost_in_bfloat16() -> None:
    load = partial(load_language_model, "embedded", device="cpu", dtype="bfloat16")
    policy = policy_of(load())
    config = config_of("reference.kind=moving", "reference.alpha=0.001", "reference.every=1")
    reference = make_reference(config, policy=policy.model, load=load)
    name, master = next(iter(policy.optimizer.masters.items()))
    start = master.detach().clone()
    with torch.no_grad():
        master.add_(0.01)
    for _ in range(1000):
        policy.version += 1
        reference.after_step(policy.version, policy.optimizer.masters)
    moved = dict(reference.model.model.named_parameters())[name].float() - start
    assert moved.mean() == pytest.approx(0.01 * (1 - 0.999**1000), rel=0.05)


def test_a_renewed_reference_is_the_policy_of_that_step(qwen: str) -> None:
    policy, reference = follower("renewed", qwen, "reference.every=3")
    start, batch = weights_of(policy.model), make_batch()
    for step in range(1, 8):
        take_step(policy, batch)
        reference.after_step(policy.version, policy.optimizer.masters)
        if step in (3, 6):
            start = weights_of(policy.model)
            assert float(kl(policy, reference.logp(batch), batch).abs().max()) == 0.0
        else:
            assert float(kl(policy, reference.logp(batch), batch).mean()) > 0
        found = weights_of(reference.model)
        assert all(torch.equal(found[n], w) for n, w in start.items())


SETTINGS = (
    "model.device=cpu", "train.steps=4", "save.every=2", "save.keep=10", "evaluate.every=0",
    "rollout.prompts_per_step=3", "rollout.group_size=4", "train.mini_batches=2", "objective.beta=0.1",
    "optimizer.learning_rate=1e-3",
)  # fmt: skip


def timeless(path: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def test_a_run_with_a_moving_reference_resumes_bit_for_bit(tmp_path: Path) -> None:
    options = (*SETTINGS, "reference.kind=moving", "reference.alpha=0.5", "reference.every=3")
    overrides = [word for setting in options for word in ("--set", setting)]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert covey(["train", "--run", str(whole), *overrides]) == 0
    shutil.copytree(whole, cut)
    assert covey(["train", "--resume", str(cut), "--step", "2"]) == 0
    assert timeless(cut) == timeless(whole)
    saved = [load_file(p / "checkpoints/000004/reference.safetensors") for p in (whole, cut)]
    assert all(torch.equal(saved[0][n], saved[1][n]) for n in saved[0])
    # It has moved, twice, and is not the policy.
    model = load_file(whole / "checkpoints/000004/model.safetensors")
    half = load_file(whole / "checkpoints/000002/reference.safetensors")
    assert not all(torch.equal(saved[0][n], half[n]) for n in half)
    assert not all(torch.equal(saved[0][n], model[n]) for n in half)


def test_without_its_file_a_moving_reference_does_not_go_on(tmp_path: Path, qwen: str) -> None:
    _, reference = follower("moving", qwen)
    with pytest.raises(RunError, match="has no valid weights of the reference"):
        reference.load(tmp_path)


def test_a_run_renews_its_reference_and_the_kl_starts_again_at_nothing(tmp_path: Path) -> None:
    options = (*SETTINGS, "train.mini_batches=1", "reference.kind=renewed", "reference.every=2")
    overrides = [word for setting in options for word in ("--set", setting)]
    assert covey(["train", "--run", str(tmp_path / "run"), *overrides]) == 0
    values = [row["objective/kl_avg"] for row in timeless(tmp_path / "run")]
    assert values[0] == pytest.approx(0, abs=1e-9)
    assert values[2] == pytest.approx(0, abs=1e-9)
    assert min(values[1], values[3]) > 1e-4


@pytest.mark.parametrize(
    "options",
    [["kind=moving"], ["kind=server", "url=http://127.0.0.1:1"]],
    ids=["moving", "server"],
)
def test_without_a_penalty_nothing_is_loaded_or_asked(options: list[str]) -> None:
    overrides = ["objective.beta=0.0", *(f"reference.{o}" for o in options)]
    parts = Run.build(resolve(load_config(None, overrides)))
    assert parts.reference is None
    parts.scorer.close()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["alpha=0.5"], "reference.alpha = 0.5 has no effect with reference.kind = 'frozen'"),
        (["kind=renewed", "alpha=0.5"], "only with reference.kind = 'moving'"),
        (["kind=moving", "url=http://x"], "reference.url = 'http://x' has no effect"),
        (
            ["kind=offloaded", "every=5"],
            "only with reference.kind = 'moving' or 'renewed'",
        ),
        (["kind=server"], "needs reference.url"),
        (["kind=server", "url=http://x", "every=7"], "reference.every = 7 has no effect"),
    ],
)
def test_a_setting_that_a_kind_does_not_have_is_refused(overrides: list[str], words: str) -> None:
    config = load_config(None, [f"reference.{o}" for o in overrides])
    with pytest.raises(ConfigError) as raised:
        resolve(config)
    assert words in str(raised.value)


def test_every_setting_belongs_to_a_kind() -> None:
    fields = set(type(Config().reference).model_fields) - {"kind"}
    assert {name for names in OPTIONS.values() for name in names} == fields


def made(kind: str, model: LanguageModel, *options: str) -> Reference:
    config = config_of(f"reference.kind={kind}", *options)
    return make_reference(config, policy=model, load=lambda: pytest.fail("loaded"))


def test_a_server_needs_a_valid_token(qwen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_language_model(qwen, device="cpu")
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with pytest.raises(
        ConfigError,
        match="'NO_TOKEN': this environment variable does not contain a valid access token",
    ):
        made("server", plain, "reference.url=http://127.0.0.1:1", "reference.token_env=NO_TOKEN")


def test_the_default_is_frozen(embedded: LanguageModel) -> None:
    config = config_of()
    reference = make_reference(
        config, policy=embedded, load=partial(load_language_model, "embedded", device="cpu")
    )
    assert type(reference) is FrozenReference
    assert reference.identity == "frozen"
