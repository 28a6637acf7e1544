"""Numbers that no model can mean: from a server, from a local reference, from a sampler."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.cli.main import run as covey
from covey.collate import collate
from covey.config import load_config
from covey.config.resolve import resolve
from covey.errors import ModelError
from covey.loop import train
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.policy.policy import LogProbs
from covey.records.folder import RunFolder
from covey.reference.frozen import FrozenReference
from covey.reference.wire import SLACK, encode_reply, reply_bytes
from covey.run import Run
from covey.step import check_finite
from covey.stopping import StopSignal
from covey.types import Group, Prompt, Rollout
from tests.conftest import make_batch
from tests.reference.servers import HEALTH, connect, fork_server
from tests.trackers import Notes

SETTINGS = (
    "model.device=cpu", "train.steps=2", "evaluate.every=0", "rollout.prompts_per_step=2",
    "rollout.group_size=4", "objective.beta=0.1", "train.micro_batch_tokens=200",
)  # fmt: skip

Scripted = tuple[str, list[tuple[int, bytes]]]


def arguments(path: Path, *more: str) -> list[str]:
    overrides = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    return ["train", "--run", str(path), *overrides]


def spoil(model: LanguageModel, value: float) -> None:
    """Replace one weight that every hidden state goes through."""
    weights = dict(model.model.named_parameters())
    name = next(n for n in weights if n.endswith("norm.weight") and "layers" not in n)
    with torch.no_grad():
        weights[name][0] = value


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("logp", math.nan, "1 of 30 values of logp are not finite and at most 0, the first is nan"),
        ("logp", math.inf, "the first is inf"),
        ("logp", -math.inf, "the first is -inf"),
        ("logp", 5.0, "1 of 30 values of logp are not finite and at most 0, the first is 5"),
        ("logp", 2 * SLACK, "of logp are not finite and at most 0"),
        ("entropy", math.nan, "1 of 30 values of entropy are not finite and at least 0"),
        ("entropy", -1.0, "the first is -1"),
    ],
)
def test_a_reply_that_no_model_can_mean_names_the_server(
    scripted: Scripted, field: str, value: float, words: str
) -> None:
    url, replies = scripted
    batch = make_batch()
    values = LogProbs(logp=-torch.rand(batch.mask.shape), entropy=torch.rand(batch.mask.shape))
    getattr(values, field)[0, 1] = value
    words = words.replace("30", str(batch.mask.numel()))
    replies += [(200, json.dumps(HEALTH).encode()), (200, encode_reply(values, "w"))]
    reference = connect(url, [], patience=0)
    with pytest.raises(ModelError) as raised:
        reference.logp(batch)
    assert str(raised.value).startswith(f"reference: the server {url} sent an invalid reply: ")
    assert words in str(raised.value)


def test_what_rounding_does_is_not_refused(scripted: Scripted) -> None:
    url, replies = scripted
    batch = make_batch()
    blank = torch.zeros(batch.mask.shape)
    values = LogProbs(logp=blank + SLACK / 2, entropy=blank - SLACK / 2)
    replies += [(200, json.dumps(HEALTH).encode()), (200, encode_reply(values, "w"))]
    assert float(connect(url, [], patience=0).logp(batch).logp.max()) == pytest.approx(SLACK / 2)


def test_a_reply_without_end_is_not_read_to_its_end(scripted: Scripted) -> None:
    url, replies = scripted
    batch = make_batch()
    most = reply_bytes(batch.tokens.shape)
    replies += [(200, json.dumps(HEALTH).encode()), (200, b"x" * (most + 1))]
    reference = connect(url, [], patience=0)
    with pytest.raises(
        ModelError, match=f"sent a reply of more than {most} bytes to the request /logp"
    ):
        reference.logp(batch)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_run_with_a_nan_reference_stops_before_it_learns(
    value: float, where: str, tmp_path: Path
) -> None:
    settings = [*SETTINGS, f"objective.kl_in={where}"]
    parts = Run.build(resolve(load_config(None, settings)))
    assert isinstance(parts.reference, FrozenReference)
    spoil(parts.reference.model, value)
    folder = RunFolder.create(tmp_path / "run", "", {})
    words = "log-probs of the reference are not finite for [0-9]+ of [0-9]+ tok"
    with closing(parts.scorer), pytest.raises(ModelError, match=words) as raised:
        train(parts, folder, [Notes()], StopSignal())
    assert str(raised.value).startswith("training stopped at step 1")
    assert parts.policy.version == 0
    assert folder.steps() == []


def test_a_server_whose_model_gives_nan_says_so_and_the_run_stops(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = load_language_model("embedded", device="cpu")
    spoil(model, math.nan)
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    server = fork_server(tmp_path / "output", str(tmp_path / "model"))
    try:
        where = ("reference.kind=server", f"reference.url={server.url}")
        assert covey(arguments(tmp_path / "run", *where)) == 1
    finally:
        server.kill()
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith(f"covey: reference: {server.url} replied 500: the model gives invalid")
    assert "of logp are not finite" in said


def test_padding_may_hold_anything_and_trained_tokens_may_not() -> None:
    batch = make_batch()
    logp = torch.zeros(batch.mask.shape).where(batch.mask, math.nan)
    assert not batch.mask.all()
    check_finite(replace(batch, ref_logp=logp, old_logp=logp), step=3)
    row, column = batch.mask.nonzero()[0].tolist()
    for name, whose in (("ref_logp", "the reference"), ("old_logp", "the policy")):
        spoilt = logp.clone()
        spoilt[row, column] = -math.inf
        tokens = int(batch.mask.sum())
        words = f"log-probs of {whose} are not finite for 1 of {tokens} tokens"
        with pytest.raises(ModelError, match=words):
            check_finite(replace(batch, **{name: spoilt}), step=3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_samplers_log_probability_must_be_finite(value: float) -> None:
    prompt = Prompt(id="p-7", messages=({"role": "user", "content": "1+1?"},), target="2", task="t")
    rollout = Rollout.single_turn(
        prompt_id="p-7", sample=3, text="2", tokens=(5, 6), sampler_logp=(-0.1, value),
        prompt_tokens=(1, 2), trained=(True, True), finish="stop", policy_version=0, reward=1.0, success=True,
    )  # fmt: skip
    with pytest.raises(
        ModelError,
        match="1 tokens are not finite; the first such token is in completion 3 of prompt p-7",
    ):
        collate([Group(prompt=prompt, rollouts=(rollout,))])


def test_an_optimizer_step_that_is_left_out_is_noted(tmp_path: Path) -> None:
    parts = Run.build(resolve(load_config(None, [*SETTINGS, "objective.beta=0", "train.steps=1"])))
    policy = parts.policy
    name = next(n for n in policy.optimizer.parameters if n.endswith("norm.weight"))
    # The forward pass is sound, and one gradient is not.
    policy.optimizer.parameters[name].register_hook(lambda grad: grad * math.nan)
    notes = Notes()
    folder = RunFolder.create(tmp_path / "run", "", {})
    with closing(parts.scorer):
        train(parts, folder, [notes], StopSignal())
    assert folder.steps()[0]["optim/skipped"] == 1
    said = [note for note in notes.notes if "optimizer steps skipped" in note]
    assert len(said) == 1
    assert "1 optimizer steps skipped, because gradients were not finite" in said[0]
