"""The speed benchmark on a CPU with tiny shapes: its arithmetic, its counts, and its file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENVIRONMENT = {
    "started": "2026-01-02T03:04:05",
    "machine": "a test",
    "packages": {"torch": "1", "transformers": "2"},
    "copy_bytes_per_s": 1e12,
}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def weights(config: Any) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def test_a_step_reads_at_least_its_weights_and_its_keys() -> None:
    from speed_shapes import shapes, step_bytes

    shape = shapes()["smollm2"]
    # Embedding 49,152 x 576; a layer: q and o 576 x 576, k and v 576 x 192, gate, up and down
    # 576 x 1,536, two norms; and the last norm.
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert weights(shape.config) == 49_152 * 576 + 30 * layer + 576 == 134_515_008
    # Keys and values: 30 layers x 2 x 3 heads x 64 numbers x 2 bytes = 23,040 a token; 16 prompts of
    # 128 tokens, and 128 completions that have 100.
    found = step_bytes(shape, 269_030_016, completions=128, group=8, prompt=128, written=100)
    assert found == 269_030_016 + 23_040 * (2_048 + 12_800) == 611_127_936
    wide = step_bytes(shape, 0, completions=128, group=8, prompt=128, written=100, size=4)
    assert wide == 2 * (found - 269_030_016)


def test_flops_are_six_a_weight_and_token_and_attention() -> None:
    from speed_shapes import flops, shapes

    shape = shapes()["smollm2"]
    multiplied = 134_515_008 - 61 * 576  # norms are no products
    tokens = 128 * 384
    # Two products of 576 numbers for each of 384^2 / 2 pairs in 30 layers, and twice that backward.
    attention = 3 * 4 * 128 * (384**2 / 2) * 576 * 30
    assert flops(shape, tokens) == 6 * multiplied * tokens + attention
    # A prompt that its group shares: 16 x 128 + 128 x 255 tokens, and a head for completions alone.
    seen, head = 16 * 128 + 128 * 255, 49_152 * 576
    shared = 3 * 4 * 128 * (384**2 / 2 - 7 / 8 * 128**2 / 2) * 576 * 30
    expected = 6 * (multiplied - head) * seen + 6 * head * 128 * 256 + shared
    assert flops(shape, seen, shared=8) == pytest.approx(expected, rel=1e-12)


def test_a_group_of_one_needs_no_head_for_its_prompt_either() -> None:
    from speed_shapes import flops, shapes

    shape = shapes()["smollm2"]
    tokens, head = 128 * (128 + 255), 49_152 * 576
    expected = flops(shape, tokens) - 6 * head * (tokens - 128 * 256)
    assert flops(shape, tokens, shared=1) == pytest.approx(expected, rel=1e-12)


def test_a_prompt_is_read_again_in_every_micro_batch_of_its_group() -> None:
    from speed_shapes import tiny_shapes
    from update_gpu import Setting, run

    # Two groups of 8 completions, 8 + 16 tokens each: padded, 16 completions make 384 tokens, and 4 make 96.
    shape = tiny_shapes()["smollm2"]
    for budget, parts, seen in ((384, 1, 2 * 8 + 16 * 15), (96, 4, 4 * 8 + 16 * 15)):
        found = run("smollm2", shape, Setting(device="cpu", budget=budget, repeat=1))
        assert found["micro_batches"] == parts
        assert found["packed"] == seen


def test_large_models_and_long_sequences_have_a_forecast_of_their_memory() -> None:
    from speed_large import seven_b, update_long
    from speed_report import Report
    from speed_sizes import sizes_for

    sizes = sizes_for("cpu")
    report = Report(None, ENVIRONMENT, {})
    for name, measure in (("seven_b", seven_b), ("update_long", update_long)):
        with report.section(name):
            measure(sizes, report)
    rows = [row for section in report.sections.values() for row in section["rows"]]
    assert not any("missing" in row for row in rows)
    assert [row["who"] for row in rows] == ["LoRA", "full", "covey", "covey"]
    assert all(row["forecast_gib"] >= 0 for row in rows)
    lora, full, kept, recomputed = rows
    tokens = sizes.seven_prompts * sizes.group * sizes.seven_tokens
    assert full["sampled_per_s"] == pytest.approx(tokens / full["rollout"])
    assert lora["seconds"] > lora["update"] > 0
    assert (kept["length"], kept["tokens"], recomputed["tokens"]) == (64, 4 * 64, 2 * 96)


def test_the_forecast_of_an_update_leaves_out_the_engine() -> None:
    from speed_large import update_forecast
    from speed_shapes import shapes
    from update_gpu import Setting

    shape = shapes()["qwen2.5"]
    setting = Setting(checkpointing=True, state="compact", budget=8_192)
    found = update_forecast(shape, setting)
    # 12 bytes a parameter; 6,400 tokens: the layers' inputs in float32, and attention's results.
    state = 12 * weights(shape.config)
    inputs = 28 * 6_400 * (1_536 * 4 + 1_536 * 2 + 12 * 4)
    assert state + inputs < found < 1.05 * (state + inputs)


def test_a_result_names_no_folder_of_the_machine_that_it_is_from() -> None:
    from described import anywhere

    words = [str(BENCHMARKS / "x.py"), "--out", "/a/b/c.json", "--set", "model.path=/d/e", "f/g=h"]
    expected = ["benchmarks/x.py", "--out", "c.json", "--set", "model.path=e", "f/g=h"]
    assert anywhere(words) == expected


@pytest.mark.parametrize("stops", [False, True])
def test_a_word_is_a_token(stops: bool) -> None:
    from speed_shapes import encoded_prompts, prompt_text, word_tokenizer

    from covey.models.language_model import byte_pieces

    tokenizer = word_tokenizer(200, stops=stops)
    assert tokenizer.encode("w17 w3 w133 w2") == [17, 3, 133, 2]
    assert tokenizer.eos_token_id == (1 if stops else 200)
    text = prompt_text(3, words=40, vocabulary=200)
    assert tuple(tokenizer.encode(text)) == encoded_prompts(4, words=40, vocabulary=200)[3].tokens
    assert tokenizer.decode(tokenizer.encode(text)) == f" {text}"
    assert byte_pieces(tokenizer, 200) is not None  # decoded as the models' own are


def test_a_decode_step_is_a_part_of_the_call_that_takes_it() -> None:
    from speed_sampler import random_engine, step_seconds, timed
    from speed_sizes import sizes_for

    sizes = sizes_for("cpu")
    sampler = random_engine(sizes, "smollm2")
    found = timed(sampler, sizes, completions=8, repeat=3)
    assert found.tokens == 8 * sizes.tokens
    # 15 of 16 tokens take a step, and the call does more than that.
    assert 0 < step_seconds(sampler, sizes, 8) * (sizes.tokens - 1) < 2 * max(found.seconds)


def test_the_first_tokens_come_after_all_that_they_need() -> None:
    from speed_checks import first_rollout
    from speed_sizes import sizes_for

    found = first_rollout(sizes_for("cpu"), "smollm2")
    assert 0 < found["ready_s"] < found["first_token_s"] < found["first_graph_s"]


def test_refilled_slots_and_waiting_batches_give_the_same_completions() -> None:
    from speed_report import Report
    from speed_sampler import ragged
    from speed_sizes import sizes_for

    report = Report.at(None, ENVIRONMENT)
    with report.section("ragged"):
        ragged(sizes_for("cpu"), report)
    refill, static = report.sections["ragged"]["rows"]
    assert refill["tokens"] == static["tokens"]
    assert static["same_lengths"]
    assert refill["shortest"] < 4 < 30 < refill["longest"]
    # 64 lengths of a geometric law with mean 12: their mean is 12 with a deviation of 1.4.
    assert refill["mean_length"] == pytest.approx(12, abs=4)
    assert static["ratio"] == pytest.approx(static["seconds"] / refill["seconds"])


def test_all_memory_is_there_before_refilled_slots_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    import speed_sampler
    from speed_report import Report
    from speed_sizes import sizes_for

    from covey.engines.native.engine import NativeEngine
    from covey.models.language_model import LanguageModel
    from tests.engines.native.test_decode_graph import by_graph

    made: list[NativeEngine] = []
    kept: list[bool] = []

    def sampler(model: LanguageModel) -> NativeEngine:
        made.append(by_graph(model))
        return made[0]

    def seconds_of(call: Any, device: str) -> float:
        before = made[0].backend.cache
        call()
        kept.append(made[0].backend.cache is before)
        return 1.0

    monkeypatch.setattr(speed_sampler, "NativeEngine", sampler)
    monkeypatch.setattr(speed_sampler, "seconds_of", seconds_of)
    few = {"ragged_completions": 8, "ragged_slots": 4, "ragged_longest": 3, "ragged_mean": 2}
    report = Report.at(None, ENVIRONMENT)
    with report.section("ragged"):
        speed_sampler.ragged(sizes_for("cpu", **few), report)
    assert kept == [True, True]  # graphs hold its addresses, and would be recorded again


def test_float8_halves_the_bytes_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import speed_float8
    from speed_report import Report
    from speed_shapes import tiny_shapes
    from speed_sizes import sizes_for

    # A step alone is only timed with a captured graph, or with a cache for whole sequences.
    monkeypatch.setattr(speed_float8, "step_seconds", lambda *arguments: 1e-3)
    sizes, report = sizes_for("cpu", tokens=3, float8=(4,)), Report.at(None, ENVIRONMENT)
    with report.section("float8"):
        speed_float8.float8(sizes, report)
    plain, small, smallest = report.sections["float8"]["rows"]
    assert (plain["who"], small["who"]) == ("model", "float8")
    assert plain["tokens"] == small["tokens"] == smallest["tokens"] == 4 * 3
    config = tiny_shapes()["qwen2.5"].config
    layers = weights(config) - 512 * 32 - 32  # without the embedding, which is the head, and a norm
    less = layers * (1 - 1 / 4)  # 8 of 32 bits
    bandwidth = ENVIRONMENT["copy_bytes_per_s"]
    assert plain["floor_ms"] - small["floor_ms"] == pytest.approx(1e3 * 4 * less / bandwidth)
    # A prompt of 8 tokens, and 1 token of each of 4 completions: 8 of 32 bits.
    keys = tiny_shapes()["qwen2.5"].key_numbers * (8 + 4) * 3
    assert small["floor_ms"] - smallest["floor_ms"] == pytest.approx(1e3 * keys / bandwidth)
    assert small["refresh_ms"] > 0


def test_a_step_is_the_whole_loop_and_every_token_is_counted() -> None:
    from speed_sizes import sizes_for
    from speed_step import step_covey

    sizes = sizes_for("cpu")
    found = step_covey(sizes)
    assert found["tokens"] == sizes.prompts * sizes.group * sizes.tokens == 2 * 4 * 16
    assert len(found["all_seconds"]) == sizes.steps
    assert found["startup"] > 0
    assert found["rollout"] + found["update"] <= sum(found["all_seconds"])


def test_the_command_measures_writes_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import speed
    from speed_report import COLUMNS
    from speed_sizes import sizes_for

    out, sizes = tmp_path / "speed.json", sizes_for("cpu")

    def command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["speed.py", "--device", "cpu", *arguments])
        speed.main()
        return capsys.readouterr().out

    command("--only", "linear", "--out", str(out))
    first = json.loads(out.read_text())["sections"]["linear"]
    assert [row["tokens"] for row in first["rows"]] == [n * sizes.tokens for n in sizes.linear]
    command("--only", "numerics", "--out", str(out))
    sections = json.loads(out.read_text())["sections"]
    assert list(sections) == ["linear", "numerics"]
    assert sections["linear"] == first  # what is not measured again stays
    logp = [row for row in sections["numerics"]["rows"] if "mean" in row]
    greedy = [row for row in sections["numerics"]["rows"] if "differ" in row]
    assert all(row["largest"] < 1e-5 for row in logp)
    assert all(row["differ"] == 0 and row["distinct"] > 20 for row in greedy)
    assert len(logp) == len(greedy) == 2

    lines = command("--table", str(out)).splitlines()
    for name, section in sections.items():
        place = next(n for n, line in enumerate(lines) if line.startswith(f"**{name}**"))
        body = lines[place + 4 : place + 4 + len(section["rows"])]
        assert all(line.startswith("| ") for line in body)
        assert not lines[place + 4 + len(section["rows"])]
        headings = {c.heading: c for c in COLUMNS[name]}
        shown = [headings[h] for h in lines[place + 2].strip("| ").split(" | ")]
        for line, row in zip(body, section["rows"], strict=True):
            for cell, column in zip(line[2:-2].split(" | "), shown, strict=True):
                value = row.get(column.key)
                assert cell == ("" if value is None else format(value, column.form))


def test_what_fails_is_a_row_with_the_reason_and_the_rest_goes_on(tmp_path: Path) -> None:
    from own_process import WorkerFailed, in_own_process
    from speed_report import Report, markdown
    from speed_sizes import sizes_for
    from speed_step import step

    def own_process(worker: str) -> Any:
        if worker == "step_covey":
            return {"all_seconds": [2.0, 1.0, 3.0], "tokens": 100}
        code = "import sys; print('log'); raise ImportError('no module named trl')"
        return in_own_process([sys.executable, "-c", code])

    report = Report.at(tmp_path / "speed.json", ENVIRONMENT)
    with report.section("step"):
        step(sizes_for("cpu"), report, own_process)
    with report.section("update"):
        raise ValueError("of another kind")
    covey, trl = report.sections["step"]["rows"]
    assert covey["seconds"] == 2.0
    assert covey["tokens_per_s"] == 50.0
    assert trl["missing"] == "WorkerFailed: ImportError: no module named trl"
    assert report.sections["update"]["rows"][0]["missing"] == "ValueError: of another kind"
    written = json.loads((tmp_path / "speed.json").read_text())["sections"]
    assert written == report.sections
    assert "no module named trl |" in markdown(written)
    with pytest.raises(WorkerFailed, match="more than"):
        in_own_process([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.2)
