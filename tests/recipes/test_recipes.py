"""Every recipe says what was published, where it departs from that, and runs."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from covey.cli.main import run
from covey.config import Config, load_config, load_smoke, recipe_names
from covey.config.load import RECIPES, parse_config, read_settings, recipe_text
from covey.config.resolve import objective_of, resolve, reward_of, task_of, template_of
from covey.embedded import CHECKPOINT
from covey.lab.plan.findings import findings
from covey.solutions import solutions_of

PAGE = Path(__file__).parent.parent.parent / "docs/recipes.md"
KEYS = (
    "lr",
    "beta",
    "clip_low",
    "clip_high",
    "prompts",
    "samples",
    "tokens",
    "temperature",
    "steps",
    "updates",
)

# What the systems published, in the order of KEYS; None where they have no such setting, or where
# their loop has another shape and a test below says how it maps.
PUBLISHED: dict[str, tuple[float | None, ...]] = {
    "zhangfaen-grpo": (5e-6, 0.04, 0.1, 0.1, 2, 8, 400, 1.0, 200, 1),
    "zhangfaen-dr_grpo": (5e-6, 0.04, 0.1, 0.1, 2, 8, 400, 1.0, 200, 1),
    "zhangfaen-gspo": (5e-6, 0.04, 0.1, 0.1, 2, 8, 400, 1.0, 200, 1),
    "nano-aha": (1e-6, 0.001, None, None, 16, 4, 1024, 1.0, 1000, 1),
    "grpo-zero": (1e-5, 0.0, None, None, 32, 8, 1024, 1.0, 15_320, 1),
    "simple-grpo": (1e-6, 0.04, 0.2, 0.2, None, 8, 700, 0.9, None, None),
    "lm-book": (5e-6, 0.04, 0.1, 0.1, 4, 16, 500, 1.0, 500, 1),
    "awesome-grpo": (1e-6, 0.04, 0.2, 0.2, None, 8, 700, 0.9, None, None),
    "awesome-dapo": (1e-6, 0.0, 0.1, 0.2, None, 8, 700, 0.9, None, None),
    "awesome-dr_grpo": (1e-6, 0.04, 0.2, 0.2, None, 8, 700, 0.9, None, None),
    "awesome-gtpo": (1e-6, 0.0, 0.2, 0.28, 128, 16, None, 1.0, None, None),
    "awesome-grpo_s": (1e-6, 0.0, 0.2, 0.28, 128, 16, None, 1.0, None, None),
    "agent-book": (5e-6, 0.01, None, None, 1, 8, 512, 0.7, None, 1),
    "open-instruct-debug": (3e-7, 0.01, 0.2, 0.2, 8, 4, 512, 0.7, 200 // 32, 1),
    "open-instruct-tulu3-8b": (5e-7, 0.01, 0.2, 0.2, 64, 16, 2048, 1.0, 2_000_000 // 1024, 2),
    "open-instruct-qwen-zero": (5e-7, 0.0, 0.2, 0.2, 48, 16, 4096, 1.0, 5_000_000 // 768, 1),
    "open-instruct-if-mix": (5e-7, 0.01, 0.2, 0.2, 64, 16, 2048, 1.0, 2_000_000 // 1024, 2),
    "open-instruct-olmo2-7b": (5e-7, 0.01, 0.2, 0.2, 48, 16, 2048, 1.0, 2_000_000 // 768, 2),
    "open-instruct-olmo2-7b-zero": (5e-7, 0.0, 0.2, 0.2, 48, 16, 2048, 1.0, 1_000_000 // 768, 1),
    "open-instruct-olmo2-13b-zero": (5e-7, 0.0, 0.2, 0.2, 48, 16, 2048, 1.0, 1_000_000 // 768, 1),
    "dr-grpo-zero": (1e-6, 0.0, 0.2, 0.2, 128, 8, 3000, 1.0, 20 * 12_000 // 128, 8),
    "scalerl": (5e-7, 0.0, None, None, 48, 16, 14_336, 1.0, None, 1),
}  # fmt: skip

# Where we depart from that: the setting, and its value here. The file says so in its line.
CORRECTED: dict[str, dict[str, float]] = {
    "zhangfaen-gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
}
NAMED_IN_FILE = {"updates": "mini_batches", "clip_low": "clip_low", "clip_high": "clip_high"}

# Model, task, reward, algorithm, seed and gradient clip.
WHAT: dict[str, tuple[str, str, str, str, float]] = {
    "zhangfaen-grpo": ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "lm_book", "grpo", 0.1),
    "zhangfaen-dr_grpo": ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "lm_book", "dr_grpo", 0.1),
    "zhangfaen-gspo": ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "lm_book", "gspo", 0.1),
    "nano-aha": ("Qwen/Qwen2.5-3B", "countdown", "nano_aha", "composed", 1.0),
    "grpo-zero": ("Qwen/Qwen2.5-3B-Instruct", "countdown", "grpo_zero", "composed", 1.0),
    "simple-grpo": ("Qwen/Qwen2.5-7B", "gsm8k", "simple_grpo", "grpo", 1.0),
    "lm-book": ("Qwen/Qwen2.5-0.5B-Instruct", "gsm8k", "lm_book", "grpo", 0.1),
    "awesome-grpo": ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "simple_grpo", "grpo", 1.0),
    "awesome-dapo": ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "simple_grpo", "dapo", 1.0),
    "awesome-dr_grpo": ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "math_answer", "dr_grpo", 1.0),
    "awesome-gtpo": ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "math_answer", "gtpo", 1.0),
    "awesome-grpo_s": ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "math_answer", "grpo_s", 1.0),
    "agent-book": ("Qwen/Qwen2.5-1.5B-Instruct", "tools", "agent", "grpo", 0.5),
    "open-instruct-debug": ("Qwen/Qwen3-0.6B", "hub", "open_instruct", "composed", 1.0),
    "open-instruct-tulu3-8b": ("allenai/Llama-3.1-Tulu-3-8B-DPO", "hub", "math_answer", "composed", 1.0),
    "open-instruct-qwen-zero": ("Qwen/Qwen2.5-7B", "hub", "mix", "composed", 1.0),
    "open-instruct-if-mix": ("allenai/Llama-3.1-Tulu-3-8B-DPO", "hub", "by_task", "composed", 1.0),
    "open-instruct-olmo2-7b": ("allenai/OLMo-2-1124-7B-DPO", "hub", "by_task", "composed", 1.0),
    "open-instruct-olmo2-7b-zero": ("allenai/OLMo-2-1124-7B", "hub", "mix", "composed", 1.0),
    "open-instruct-olmo2-13b-zero": ("allenai/OLMo-2-1124-13B", "hub", "mix", "composed", 1.0),
    "dr-grpo-zero": ("Qwen/Qwen2.5-1.5B", "hub", "math_answer", "dr_grpo", 1.0),
    "scalerl": ("Qwen/Qwen3-8B", "hub", "math_answer", "scalerl", 1.0),
}  # fmt: skip
# Degrees of freedom and floor of the deviation that advantages are divided by, seed, weight decay.
DIVISOR: dict[str, tuple[int, float, int, float]] = {
    "zhangfaen-grpo": (0, 1e-4, 42, 0.01),
    "zhangfaen-gspo": (0, 1e-4, 42, 0.01),
    "nano-aha": (0, 1e-4, 42, 0.0),
    "grpo-zero": (0, 1e-4, 1337, 0.0),
    "simple-grpo": (1, 1e-4, 0, 0.0),
    "lm-book": (1, 1e-4, 42, 0.0),
    "awesome-grpo": (1, 1e-4, 0, 0.0),
    "awesome-dapo": (1, 1e-4, 0, 0.0),
    "agent-book": (1, 1e-4, 0, 0.0),
    "open-instruct-debug": (0, 1e-8, 3, 0.0),
    "open-instruct-tulu3-8b": (0, 1e-8, 1, 0.0),
    "open-instruct-qwen-zero": (0, 1e-8, 1, 0.0),
    "open-instruct-if-mix": (0, 1e-8, 1, 0.0),
    "open-instruct-olmo2-7b": (0, 1e-8, 1, 0.0),
    "open-instruct-olmo2-7b-zero": (0, 1e-8, 1, 0.0),
    "open-instruct-olmo2-13b-zero": (0, 1e-8, 1, 0.0),
}
# Recipes of our own, which no system has published.
OWN = {
    "agent-calculator", "agent-python", "agent-search", "arithmetic", "demo", "opd-smollm2",
    "seven-b-full", "seven-b-lora",
}  # fmt: skip
NONE = "\N{EN DASH}"


def text_of(name: str) -> str:
    return recipe_text(name)


def about(name: str) -> str:
    """Return what the README of the recipe's system says about all its recipes and this one."""
    [file] = Path(str(RECIPES)).glob(f"*/{name}.toml")
    everything, *sections = file.with_name("README.md").read_text("utf-8").split("\n## ")
    [own] = [s for s in sections if s.partition("\n")[0] == name]
    return f"{everything}\n{own}"


def numbers_of(config: Config) -> dict[str, float | None]:
    objective = config.objective.options
    return {
        "lr": config.optimizer.learning_rate,
        "beta": objective["beta"],
        "clip_low": objective.get("clip_low"),
        "clip_high": objective.get("clip_high"),
        "prompts": config.rollout.prompts_per_step,
        "samples": config.rollout.group_size,
        "tokens": config.rollout.max_tokens,
        "temperature": config.rollout.temperature,
        "steps": config.train.steps,
        "updates": config.train.optimizer_steps,
    }


def test_every_recipe_is_in_the_tables() -> None:
    published = set(recipe_names()) - OWN
    assert published == set(PUBLISHED) == set(WHAT)
    assert len(published) == 22


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_numbers_but_for_what_it_corrects(name: str) -> None:
    found = numbers_of(resolve(load_config(name)))
    corrected = CORRECTED.get(name, {})
    published = dict(zip(KEYS, PUBLISHED[name], strict=True))
    expected = {k: v for k, v in (published | corrected).items() if v is not None}
    assert {key: found[key] for key in expected} == expected
    for key, ours in corrected.items():
        line = re.search(rf"^{NAMED_IN_FILE[key]} = .*# published: (\S+)$", text_of(name), re.M)
        assert line, f"{name}: the line of {key} does not say what was published"
        assert float(line.group(1)) == published[key] != ours


@pytest.mark.parametrize("name", WHAT)
def test_a_recipe_has_the_model_task_reward_and_algorithm_of_its_system(name: str) -> None:
    config = load_config(name)
    found = (config.model.path, config.task.name, config.reward.name, config.objective.name)
    assert (*found, config.optimizer.max_grad_norm) == WHAT[name]


@pytest.mark.parametrize("name", DIVISOR)
def test_a_recipe_divides_advantages_as_its_system_does(name: str) -> None:
    config = resolve(load_config(name))
    options = config.objective.options
    found = (options["ddof"], options["eps"], config.seed, config.optimizer.weight_decay)
    assert found == DIVISOR[name]


def test_a_system_message_that_is_said_to_be_the_published_one_is() -> None:
    lm_book = load_config("lm-book").task.options["system"]
    zhangfaen = load_config("zhangfaen-grpo").task.options["system"]
    assert lm_book != zhangfaen  # by an empty line
    assert lm_book.replace("\n\n", "\n") == zhangfaen
    assert "reasoning process in your mind" in load_config("grpo-zero").task.options["system"]
    assert "reasoning process in the mind" in load_config("nano-aha").task.options["system"]


@pytest.mark.parametrize(("name", "micro_batch"), [("simple-grpo", 8), ("awesome-grpo", 1), ("awesome-dapo", 1), ("awesome-dr_grpo", 1)])  # fmt: skip
def test_sixteen_micro_batches_between_new_weights_are_one_rollout(
    name: str, micro_batch: int
) -> None:
    # gen_update_steps 16, gradient_accumulation_steps 4, all_steps 1000, all in micro-batches.
    config = load_config(name)
    answers = config.rollout.prompts_per_step * config.rollout.group_size
    assert answers == 16 * micro_batch
    assert answers / config.train.optimizer_steps == 4 * micro_batch
    assert config.train.steps == math.ceil(1000 / 16)


def test_two_passes_of_the_agent_book_are_its_steps() -> None:
    config = resolve(load_config("agent-book"))
    assert config.train.steps == 2 * len(task_of(config).train())
    assert config.optimizer.warmup_steps == round(0.1 * config.train.steps)
    weights = {k: config.reward.options[k] for k in ("accuracy", "format", "efficiency", "safety")}
    assert weights == {"accuracy": 0.5, "format": 0.2, "efficiency": 0.15, "safety": 0.15}


def test_open_instruct_drops_groups_without_a_standard_deviation_and_not_solved_ones() -> None:
    names = [name for name in recipe_names() if name.startswith("open-instruct")]
    assert len(names) == 7
    for name in names:
        chosen = load_config(name).filter
        # Not by success: the penalty for one cut-off completion of a solved group teaches to stop.
        assert (chosen.drop_flat, chosen.dynamic_sampling) == (True, False), name


def test_a_finding_about_a_recipe_is_explained_in_it() -> None:
    assert "train.mini_batches = 2 avoids it" in about("awesome-dapo")
    assert "17 are held out" in about("agent-book")
    config = resolve(load_config("agent-book"))
    assert config.trackers == ["tensorboard"]
    assert len(task_of(config).held_out()) == 17


def test_the_settings_of_one_system_alone() -> None:
    nano = load_config("nano-aha")
    assert nano.rollout.top_p == 0.999
    assert (nano.evaluate.every, nano.evaluate.temperature, nano.save.every) == (25, 0.3, 50)
    assert nano.task.options["held_out_size"] == 500
    assert load_config("grpo-zero").task.options["held_out_size"] == 128
    assert load_config("zhangfaen-grpo").evaluate.temperature == 0.7
    tulu, zero = load_config("open-instruct-tulu3-8b"), load_config("open-instruct-qwen-zero")
    for config in (tulu, zero):
        assert config.length_penalty.name == "unfinished"
        assert config.length_penalty.options == {"at_most": 0.0}
    assert (tulu.optimizer.schedule, zero.optimizer.schedule) == ("constant", "linear")
    assert (tulu.train.micro_batch_tokens, zero.train.micro_batch_tokens) == (4096, 6144)
    assert zero.rollout.stop == ["</answer>"]


def alternatives(name: str) -> list[dict[str, Any]]:
    """Return the tables that the README of a recipe offers in place of its own."""
    blocks = re.findall(r"^```toml\n(.*?)^```", about(name), re.M | re.S)
    return [tomllib.loads(text) for text in blocks]


@pytest.mark.parametrize("name", [n for n in PUBLISHED if alternatives(n)])
def test_what_a_readme_offers_resolves(name: str) -> None:
    for tables in alternatives(name):
        resolve(parse_config({**read_settings(name), **tables}))


def suggested(name: str) -> list[list[str]]:
    """Return the overrides that the README of a recipe suggests, those of a line together."""
    lines = about(name).splitlines()
    return [found for line in lines if (found := re.findall(r"--set ([\w.]+=[\w.-]+\w)", line))]


@pytest.mark.parametrize("name", [n for n in PUBLISHED if suggested(n)])
def test_what_a_readme_suggests_does_no_harm(name: str) -> None:
    harms = lambda config: {f.title for f in findings(resolve(config)) if f.kind == "risk"}  # noqa: E731
    for overrides in suggested(name):
        assert harms(load_config(name, overrides)) <= harms(load_config(name))


@pytest.mark.parametrize("name", ["simple-grpo", "open-instruct-tulu3-8b", "open-instruct-qwen-zero"])  # fmt: skip
def test_a_recipe_that_needs_more_than_one_gpu_says_so(name: str) -> None:
    assert re.search(r"^Memory: with these settings about \d+ GiB on one GPU", about(name), re.M)
    assert any("optimizer.state=compact" in overrides for overrides in suggested(name))


def test_no_reference_is_renewed_after_the_last_step() -> None:
    for name in PUBLISHED:
        config = load_config(name)
        if config.reference.kind in ("moving", "renewed"):
            assert config.reference.every < config.train.steps * config.train.optimizer_steps


def test_what_was_published_as_dr_grpo_is_offered() -> None:
    [tables] = alternatives("zhangfaen-dr_grpo")
    config = resolve(parse_config({**read_settings("zhangfaen-dr_grpo"), **tables}))
    published = objective_of(config)
    ours = objective_of(resolve(load_config("zhangfaen-dr_grpo")))
    name = lambda piece: getattr(piece, "func", piece).__name__  # noqa: E731
    assert name(published.advantage) == name(ours.advantage) == "centered"
    assert name(published.weights) == "sequence_mean_token_mean"
    assert name(ours.weights) == "sequence_mean_token_sum_norm"
    assert published.beta == ours.beta == 0.04


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_right_answer_in_the_form_that_is_asked_for_is_right(name: str) -> None:
    # Prompt, prefill, the template of solutions and the reward belong together.
    config = resolve(load_smoke(name, ["model.path=any"])[0])
    solution = solutions_of(config, task_of(config))[0]
    template = template_of(config)
    text = template.opening + template.without_prefill(solution.text)
    score = reward_of(config)(solution.prompt, text)
    assert score.success
    high = reward_of(config).bounds[1]
    assert score.reward == pytest.approx(high)
    wrong = reward_of(config)(solution.prompt, "I do not know.")
    assert not wrong.success
    assert wrong.reward < high / 2


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_runs_with_the_embedded_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run(["train", name, "--model", "embedded", "--smoke", "--run", str(folder)]) == 0
    assert "arithmetic and think_answer replace" in capsys.readouterr().err
    config = load_config(str(folder / "config.toml"))
    assert config.objective.name == WHAT[name][3]
    steps = read(folder / "steps.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    may_lose = 0 if not config.filter.drop_flat else config.rollout.prompts_per_step
    lost = [config.rollout.prompts_per_step - row["rollout/trained_groups"] for row in steps]
    assert max(lost) <= may_lose
    assert [row["step"] for row in read(folder / "eval.jsonl")] == [0, 2]
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["000002"]


CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@pytest.fixture(scope="module")
def small_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads any text, byte by byte, and has a chat template."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=262, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=16, max_position_embeddings=4096,
            eos_token_id=1, pad_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = CHAT
    folder = tmp_path_factory.mktemp("models") / "small"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_runs_with_its_own_prompt_and_reward(
    name: str, small_chat_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert (
        run(["train", name, "--model", str(small_chat_model), "--smoke", "--run", str(folder)]) == 0
    )
    config = load_config(str(folder / "config.toml"))
    assert (config.reward.name, config.objective.name) == WHAT[name][2:4]
    assert config.model.prefill == load_config(name).model.prefill
    assert [row["objective/unscored"] for row in read(folder / "steps.jsonl")] == [0, 0]
    answer = read(folder / "rollouts/000002.jsonl")[0]
    assert answer["text"].startswith(template_of(config).opening)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_of_recipes_has_a_row_for_each(name: str) -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith(f"| `{name}` |")]
    assert len(rows) == 2  # what it is, and its numbers
    cells = [cell.strip() for cell in rows[1].split("|")[2:-1]]
    found = numbers_of(resolve(load_config(name)))
    shown = [found[key] for key in KEYS if key != "clip_high"]
    parsed = [None if cell == NONE else float(cell.split(" / ")[0]) for cell in cells]
    assert parsed == shown
