"""An exported model gives the same completions in transformers as in covey."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from covey.cli.export import Push
from covey.cli.main import run
from covey.config import parse_config
from covey.engines.draw import Distribution
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.errors import ModelError
from covey.models.chat import Template
from covey.models.export import export_model
from covey.models.load_model import load_language_model, wrap
from covey.policy.policy import load_model
from covey.records.folder import RunFolder
from covey.records.model_card import Exported, model_card
from covey.records.trackers.console import ConsoleTracker
from covey.records.watch import best_of
from covey.rollout.episode import EncodedPrompt
from covey.tasks.arithmetic import Arithmetic
from covey.types import Prompt
from tests.conftest import build, rollouts_of

QUICK = (
    "train.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=4", "evaluate.every=1", "save.every=1",
    "evaluate.prompts=8", "optimizer.learning_rate=0.001", "model.prefill='<think>'",
)  # fmt: skip


def trained(path: Path, *more: str) -> Path:
    overrides = [word for setting in (*QUICK, *more) for word in ("--set", setting)]
    assert run(["train", "--run", str(path), *overrides]) == 0
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "quick")


def greedy_in_covey(folder: Path, questions: list[EncodedPrompt]) -> list[tuple[int, ...]]:
    # With its adapter, if the folder is one.
    model = load_model(parse_config({"model": {"path": str(folder), "device": "cpu"}}))
    sampler = NativeEngine(model)
    sampling = Sampling(max_tokens=40, distribution=Distribution(temperature=0.0))
    answers = rollouts_of(sampler, questions, step=0, sampling=sampling)
    return [rollouts[0].tokens for rollouts in answers]


def greedy_in_transformers(folder: Path, questions: list[EncodedPrompt]) -> list[tuple[int, ...]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for question in questions:
        ids = torch.tensor([question.tokens])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False
        )
        found.append(tuple(whole[0, ids.shape[1] :].tolist()))
    return found


def asked(folder: Path, count: int = 6) -> list[EncodedPrompt]:
    model = load_language_model(str(folder), device="cpu", template=Template(prefill="<think>"))
    prompts = Arithmetic().held_out()[:count]
    return [EncodedPrompt(prompt=p, tokens=model.encode(p.messages)) for p in prompts]


def test_an_export_loads_without_covey(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert run(["export", str(finished), str(out)]) == 0
    questions = asked(out)
    checkpoint = finished / "checkpoints/000003"
    texts = greedy_in_covey(checkpoint, questions)
    assert greedy_in_transformers(out, questions) == texts
    assert greedy_in_covey(out, questions) == texts
    assert any(text[-1] == 1 for text in texts)  # some end with EOS
    names = {path.name for path in out.iterdir()}
    assert names == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # readable by all or none
    assert not list(tmp_path.glob(".*"))


def test_the_model_card_describes_the_model(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "my-model"
    assert run(["export", str(finished), str(out), "--step", "2", "--dtype", "bfloat16"]) == 0
    card = (out / "README.md").read_text()
    assert "# my-model\n" in card
    assert "`embedded` after 2 of 3 steps" in card
    assert "algorithm `grpo`, task `arithmetic`, reward `think_answer`" in card
    assert "The weights are bfloat16." in card
    assert "began with `'<think>'`" in card
    assert (finished / "config.toml").read_text().strip() in card
    assert "torch " + torch.__version__.partition("+")[0] in card
    rows = [json.loads(line) for line in (finished / "eval.jsonl").read_text().splitlines()]
    assert "| best |" not in card  # save.best is not set
    picked = {"first": 0, "last": 3, "exported": 2}
    for label, index in picked.items():
        greedy = rows[index]["greedy"]
        numbers = f"{greedy['value']:.1%} [{greedy['low']:.1%}, {greedy['high']:.1%}]"
        assert f"| {label} | {index} | {numbers} |" in card
    assert "base_model" not in card  # the embedded model is not on a hub
    weights = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert {p.dtype for p in weights.parameters()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def with_best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The lowest mean length is not where accuracy is highest.
    more = ("save.best=evaluation/mean_tokens", "save.best_is=lowest", "save.keep=9")
    return trained(tmp_path_factory.mktemp("runs") / "best", *more)


def test_console_card_and_step_best_agree_on_the_best_step(
    with_best: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = RunFolder(with_best).evaluations()
    kept = [row for row in rows if row["step"]]  # step 0 has no checkpoint
    best = min(kept, key=lambda row: row["mean_tokens"])["step"]
    out = tmp_path / "model"
    assert run(["export", str(with_best), str(out), "--step", "best", "--trust", "json"]) == 0
    assert f"checkpoints/{best:06d} to" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert f"| best | {best} | " in card
    assert f"`embedded` after {best} of 3 steps" in card
    assert best_of(RunFolder(with_best)).line() in card
    screen = io.StringIO()
    ConsoleTracker(RunFolder(with_best), Console(file=screen, width=300)).finished(3, 3, None)
    assert f"{best:06d}  ({best_of(RunFolder(with_best)).line()})" in screen.getvalue()
    found = {}
    for step in ("best", str(best), "3"):
        assert run(["eval", str(with_best), "--step", step, "--json"]) == 0
        found[step] = json.loads(capsys.readouterr().out)
    assert found["best"] == found[str(best)]
    for step, name in (("best", best), ("3", 3)):
        assert found[step]["model"] == str(with_best / f"checkpoints/{name:06d}")
        assert found[step]["greedy"] == rows[name]["greedy"]


@pytest.mark.parametrize(
    ("step", "message"), [("best", "save.best"), ("7", "--step 7"), ("x", "--step x")]
)
def test_a_step_without_checkpoint_is_refused(
    step: str, message: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["export", str(finished), str(tmp_path / "m")], ["eval", str(finished)]):
        assert run([*command, "--step", step]) == 1
        assert message in capsys.readouterr().err
    checkpoint = finished / "checkpoints/000003"
    for command in (["export", str(checkpoint), str(tmp_path / "m")], ["eval", "embedded"]):
        assert run([*command, "--step", "3"]) == 1
        assert "--step 3" in capsys.readouterr().err


def test_the_card_names_no_folders_and_no_kernel(finished: Path, tmp_path: Path) -> None:
    copy = RunFolder.open(shutil.copytree(finished, tmp_path / "run"))
    environment = {
        **copy.environment(),
        "platform": "Linux-6.1.0-acme17-amd64-x86_64-with-glibc2.36",
        "command": ["/home/me/bin/covey", "train", "--run=/srv/acme/run", "--set", "a='/srv/b/c'"],
    }
    (copy.path / "environment.json").write_text(json.dumps(environment))
    config = copy.config_file.read_text().replace('"embedded"', '"/srv/acme/base"', 1)
    copy.config_file.write_text(config)
    exported = Exported(name="m", source="/srv/x/y", step=2, dtype="float32", stop_ids=[1])
    for card in (model_card(exported, copy), model_card(exported, None)):
        assert not any(word in card for word in ("acme", "/srv", "/home"))
    card = model_card(exported, copy)
    assert "- machine: Linux, on" in card
    assert "covey train --run=run --set" in card
    assert "began with `'<think>'`" in card


@pytest.mark.parametrize("file", [False, True])
def test_the_card_of_an_sft_run_does_not_mention_rl(file: bool, tmp_path: Path) -> None:
    settings = ["sft.steps=2", "sft.evaluate_every=0", "sft.solutions=4"]
    origin = "on worked solutions of task `arithmetic`"
    if file:
        answers = tmp_path / "answers.jsonl"
        answers.write_text(json.dumps({"question": "1+1", "completion": "2"}) + "\n")
        settings.append(f"sft.file='{answers}'")
        origin = "on the completions in `answers.jsonl`"
    overrides = [word for setting in settings for word in ("--set", setting)]
    assert run(["sft", "--run", str(tmp_path / "warm"), *overrides]) == 0
    assert run(["export", str(tmp_path / "warm"), str(tmp_path / "model")]) == 0
    card = (tmp_path / "model/README.md").read_text()
    said = card.partition("## Made with")[0]  # there: the command of pytest, with any words
    assert f"`embedded` after 2 steps of supervised fine-tuning with Covey, {origin}." in said
    assert "tags:\n- covey\n- sft\n---" in said
    assert not any(word in said for word in ("reinforcement", "grpo", "algorithm"))


def test_a_folder_is_not_mistaken_for_a_hub_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = Exported(name="mine", source="models/base", step=None, dtype="float32", stop_ids=[1])
    monkeypatch.chdir(tmp_path)
    assert "base_model: models/base\n" in model_card(exported, None)
    (tmp_path / "models/base").mkdir(parents=True)
    assert "base_model" not in model_card(exported, None)


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    finished = trained(tmp_path / "lora", "adapter.rank=4", "train.steps=1", "evaluate.every=0")
    out = tmp_path / "model"
    assert run(["export", str(finished), str(out)]) == 0
    questions = asked(out, 3)
    checkpoint = finished / "checkpoints/000001"
    assert (checkpoint / "adapter_config.json").is_file()
    assert greedy_in_transformers(out, questions) == greedy_in_covey(checkpoint, questions)
    state = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    start = load_language_model("embedded", device="cpu").model.state_dict()
    assert state.keys() == start.keys()
    assert any(not torch.equal(state[name], start[name]) for name in state)
    assert not (out / "merged").exists()
    assert "adapter is merged into the weights" in (out / "README.md").read_text()


def test_all_stop_tokens_and_a_padding_token_are_exported(tmp_path: Path) -> None:
    model = build("qwen2")
    model.model.generation_config.eos_token_id = [44, 1]
    model.tokenizer.pad_token = None
    model.tokenizer.chat_template = "{{ messages[-1]['content'] }}<pad>"
    model.model.save_pretrained(tmp_path / "plain")
    model.tokenizer.save_pretrained(tmp_path / "plain")
    wrapped = wrap(model.model, model.tokenizer)
    seen = []
    export_model(
        str(tmp_path / "plain"),
        tmp_path / "out",
        dtype="float32",
        template=Template(),
        card=lambda stops, merged: seen.append((stops, merged)) or "card",
    )
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert sorted(generation["eos_token_id"]) == list(wrapped.stop_ids) == sorted(seen[0][0])
    assert generation["eos_token_id"][0] == 1  # the tokenizer's comes first
    assert generation["pad_token_id"] == 1
    assert seen[0][1] is False
    prompt = Prompt(id="p", task="t", target="", messages=({"role": "user", "content": "?"},))
    starts = [(5, 9, 7 + n) for n in range(6)]
    questions = [EncodedPrompt(prompt=prompt, tokens=start) for start in starts]
    answers = greedy_in_covey(tmp_path / "out", questions)
    assert greedy_in_transformers(tmp_path / "out", questions) == answers


def test_a_failed_export_is_a_one_line_error_and_leaves_nothing(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(finished), str(tmp_path / "a"), "--step", "9"]) == 1
    assert (
        "has no checkpoint of this step; it has checkpoints of steps 2, 3"
        in capsys.readouterr().err
    )
    assert run(["export", "embedded", str(tmp_path / "a"), "--step", "9"]) == 1
    assert "--step 9 chooses a checkpoint of a run" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert run(["export", str(finished), str(tmp_path / "full")]) == 1
    assert "already contains files" in capsys.readouterr().err
    with pytest.raises(ModelError, match="cannot load"):
        export_model(
            str(tmp_path / "none"), tmp_path / "a", dtype="float32", template=Template(),
            card=lambda stops, merged: "",
        )  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"full"}


def test_a_model_without_a_run_is_exported_too(tmp_path: Path) -> None:
    assert run(["export", "embedded", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out/README.md").read_text()
    assert "Exported by Covey from `embedded`, in float32." in card
    assert "## Results" not in card


def test_a_dry_push_lists_every_file_and_sends_nothing(
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.create_connection", None)  # a connection would be an error
    folder = tmp_path / "model"
    command = ["export", str(finished), str(folder), "--push", "me/sums", "--dry-run"]
    assert run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[-1] for line in lines if " bytes  " in line}
    assert listed == {path.name for path in folder.iterdir()} >= {"README.md", "model.safetensors"}
    assert lines[-1] == "would upload to me/sums (private, if it is new); nothing was sent"


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--push", "me//x"], 2, "--push me//x: "),
        (["--push", "alone", "--dry-run"], 2, "as OWNER/NAME"),
        (["--dry-run"], 2, "add --push"),
        (["--push", "me/x"], 1, "Hub cannot be reached"),
    ],
)
def test_a_push_that_cannot_work_exports_nothing(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    more: list[str], code: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(["export", str(finished), str(tmp_path / "model"), *more]) == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_push_sends_the_files_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    sent: list[tuple[str, dict[str, object]]] = []

    class Api:
        def create_repo(self, name: str, **more: object) -> huggingface_hub.RepoUrl:
            sent.append((name, more))
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

        def upload_folder(self, *, repo_id: str, **more: object) -> None:
            sent.append((repo_id, more))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    url = Push(repository="me/sums").upload(tmp_path)
    assert url == "https://huggingface.co/me/sums"
    assert sent[0] == ("me/sums", {"private": True, "exist_ok": True})
    assert sent[1][0] == "me/sums"
    assert sent[1][1]["folder_path"] == tmp_path


def test_settings_cannot_write_markdown_into_the_model_card(finished: Path, tmp_path: Path) -> None:
    evil = "x`\n\n# Safe to use\n\n[click](http://evil)\n\n```\n# Also safe\n```"
    folder = RunFolder(shutil.copytree(finished, tmp_path / "run"))
    text = json.dumps(evil)  # also a string in TOML
    folder.config_file.write_text(
        f"[model]\npath = {text}\nprefill = {text}\n[task]\nname = {text}\nfile = {text}\n"
        f"[objective]\nname = {text}\n[reward]\nname = '''\n```\n# Also safe\n'''\n"
    )
    named = Exported(name="a\n# [click](b)", source=evil, step=1, dtype="float32", stop_ids=[0])
    for card in (model_card(named, folder), model_card(named, None)):
        shown = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", card, flags=re.DOTALL)
        titles = [line for line in shown.splitlines() if line.startswith("# ")]
        assert titles == ["# a\\n# \\[click\\](b)"]
        assert "click" not in shown.replace(titles[0], "")
