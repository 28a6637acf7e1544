"""A downloaded model cannot run code, block a run or use all memory."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers

from covey.embedded import CHECKPOINT
from covey.errors import ModelError
from covey.models import template_worker as rendering
from covey.models.adapter import add_adapter, load_adapter, save_adapter
from covey.models.chat import Renderer, Template, chat_text, make_renderer
from covey.models.load_model import load_language_model, read_pretrained
from covey.subprocesses import module_command

ASKED = {"role": "user", "content": "1+1?"}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
NESTED = "".join(f"{{% for i{n} in range(100000) %}}" for n in range(4)) + "{% endfor %}" * 4


def made(chat: str) -> Renderer:
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = chat
    return make_renderer(tokenizer, Template(), "tiny")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop renders after half a second."""
    rendering.RENDERER.close()
    monkeypatch.setattr(rendering, "SECONDS", 0.5)
    yield
    rendering.RENDERER.close()


@pytest.mark.parametrize(
    ("bomb", "why"),
    [
        (NESTED, "took longer than 0.5 seconds"),
        ("{{ (10 ** (10 ** 8)) % 7 }}", "took longer than 0.5 seconds"),
        ("{{ 'a' * 10 ** 11 }}", "took too much memory"),
    ],
)
def test_an_endless_template_is_a_one_line_error(bomb: str, why: str, quick: None) -> None:
    with pytest.raises(ModelError) as raised:
        made(bomb + CHAT)
    assert str(raised.value).startswith(
        f"model: the chat template cannot render a prompt: it {why}; set model"
    )
    # Later renders work as before.
    assert made(CHAT).text([ASKED]) == "1+1?"


def test_a_template_that_explodes_for_some_prompts_is_stopped_in_any_thread(quick: None) -> None:
    asking = made("{% if 'boom' in messages[0]['content'] %}" + NESTED + "{% endif %}" + CHAT)
    caught: list[str] = []

    def ask() -> None:
        try:
            asking.text([{"role": "user", "content": "boom"}])
        except ModelError as error:
            caught.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    assert len(caught) == 1
    assert "took longer" in caught[0]
    assert asking.text([ASKED]) == "1+1?"


def test_a_template_error_is_one_line() -> None:
    with pytest.raises(ModelError, match="fails: TypeError: "):
        made("{{ 1 + 'a' }}" + CHAT)
    with pytest.raises(ModelError, match=r"fails: .*unsafe"):
        made("{{ ().__class__.__bases__[0].__subclasses__() }}" + CHAT)


def test_a_template_has_no_environment_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rendering.RENDERER.close()
    monkeypatch.setenv("API_KEY", "COVEYSECRET")
    assert made(CHAT).text([ASKED]) == "1+1?"
    child = rendering.RENDERER._child
    assert child is not None
    given = Path(f"/proc/{child.process.pid}/environ").read_bytes()
    assert b"COVEYSECRET" not in given
    names = {entry.partition(b"=")[0].decode() for entry in given.split(b"\0") if entry}
    assert names <= {*rendering.TO_START, "LC_CTYPE"}


def test_rendering_equals_transformers() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = (
        "{{ bos_token }}{{ eos_token }}{%- for m in messages %}{{ m|tojson }}\n{%- endfor %}"
        "{% generation %}x{% endgeneration %}{% if add_generation_prompt %}>{% endif %}{{ shout }}"
    )
    messages = [{"role": "user", "content": "ä\ud800\n<&>'\u2028"}, ASKED]
    options = {"shout": 1.5}
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    assert chat_text(tokenizer, messages, options) == expected


def test_a_render_takes_less_than_a_millisecond() -> None:
    asking = made(CHAT)
    began = time.perf_counter()
    for _ in range(200):
        asking.text([ASKED])
    assert (time.perf_counter() - began) / 200 < 5e-3  # 0.1 ms on an idle machine


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A copy of the embedded model to damage."""
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    return tmp_path / "model"


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(name: str, downloaded: Path, tmp_path: Path) -> None:
    (downloaded / "model.safetensors").unlink()
    (downloaded / name).write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(ModelError, match=f"pickle file {name}"):
        load_language_model(str(downloaded), device="cpu")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("entry", ["weights.dat", "../model.safetensors", "/model.safetensors", 7])
@pytest.mark.parametrize("stray", [False, True])
def test_an_index_names_only_safetensors_files_beside_it(
    entry: object, stray: bool, downloaded: Path, tmp_path: Path
) -> None:
    (downloaded / "weights.dat").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    if not stray:
        (downloaded / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": entry}}
    (downloaded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="weight_map"):
        load_language_model(str(downloaded), device="cpu")
    # The checks before a model is read do not see into the Hub's cache.
    with pytest.raises(ModelError, match="weight_map"):
        read_pretrained(transformers.AutoModelForCausalLM, str(downloaded), torch.float32)
    assert not (tmp_path / "touched").exists()


def test_a_sharded_model_loads(downloaded: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(downloaded)
    (downloaded / "model.safetensors").unlink()
    model.save_pretrained(downloaded, max_shard_size="100KB")
    assert (downloaded / "model.safetensors.index.json").is_file()
    assert load_language_model(str(downloaded), device="cpu").packs


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"quantization_config": 7},
        {"_attn_implementation": "kernels-community/flash-attn2"},
        {"text_config": {"attn_implementation": "somebody/kernel"}},
        {"hidden_size": "8"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"vocab_size": 0},
        {"dtype": "float7"},
    ],
    ids=str,
)
def test_a_wrong_value_in_config_json_is_one_line(
    wrong: dict[str, object], downloaded: Path
) -> None:
    if "quantization_config" in wrong and importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed here")
    file = downloaded / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(ModelError, match=re.escape(str(downloaded))) as raised:
        load_language_model(str(downloaded), device="cpu")
    assert "\n" not in str(raised.value)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder with an adapter of rank 2 of the embedded model."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    model = add_adapter(load_language_model("embedded", device="cpu"), rank=2, base="embedded")
    save_adapter(
        model, {n: p for n, p in model.model.named_parameters() if p.requires_grad}, folder
    )
    return folder


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"r": 10**9}, "1000000000"),
        ({"r": "8"}, "'8'"),
        ({"r": 0}, "rank 0"),
        ({"rank_pattern": {"q_proj": 10**9}}, "1000000000"),
        ({"megatron_config": {"x": 1}, "megatron_core": "evil"}, "megatron_config"),
        ({"megatron_core": "evil"}, "megatron_core"),
        ({"use_dora": True}, "use_dora"),
        ({"target_modules": 5}, "cannot be read"),
        ({"peft_type": ["LORA"]}, "peft_type|adapter"),
    ],
    ids=str,
)
def test_a_wrong_value_of_an_adapter_is_one_line(
    wrong: dict[str, object], named: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (adapter / "evil.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(adapter))
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    model = load_language_model("embedded", device="cpu")
    with pytest.raises(ModelError, match=named) as raised:
        load_adapter(model, adapter)
    assert "\n" not in str(raised.value)
    assert "evil" not in sys.modules


def test_an_adapter_of_a_newer_peft_loads(adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"setting_of_tomorrow": 16}))
    assert load_adapter(load_language_model("embedded", device="cpu"), adapter).adapter.r == 2


def test_a_pickled_adapter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "embedded"}')
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(ModelError, match=r"pickle file adapter_model.bin"):
        load_language_model(str(folder), device="cpu")
    assert not (tmp_path / "touched").exists()


def test_remote_code_is_not_run(
    downloaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = tmp_path / "touched"
    for file in ("config.json", "tokenizer_config.json"):
        settings = json.loads((downloaded / file).read_text())
        settings |= {"model_type": "strange"} if file == "config.json" else {}
        settings["auto_map"] = {
            "AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None],
        }  # fmt: skip
        (downloaded / file).write_text(json.dumps(settings))
    (downloaded / "evil.py").write_text(f"open({str(touched)!r}, 'w')\nclass C: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask
    with pytest.raises(ModelError, match="custom code"):
        load_language_model(str(downloaded), device="cpu")
    assert not touched.exists()


def test_worker_processes_import_nothing_from_the_working_folder(tmp_path: Path) -> None:
    for name in ("json", "pickle", "asyncio", "transformers", "jinja2"):
        (tmp_path / f"{name}.py").write_text("open('touched', 'w')")
    for module in ("covey.workers", "covey.models.template_worker"):
        done = subprocess.run(
            module_command(module, "999", "1", "1"), cwd=tmp_path, capture_output=True, check=False
        )
        assert b"Bad file descriptor" in done.stderr, done.stderr
    assert not (tmp_path / "touched").exists()
    assert sys.executable in module_command("covey.workers")
