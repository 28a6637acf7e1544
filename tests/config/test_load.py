from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import covey
from covey.cli.startup import loaded
from covey.config import Config, load_config, parse_config, recipe_names, to_toml
from covey.config.other_names import translated
from covey.errors import ConfigError

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}

# Every character that a file can hold but control characters, which have a test of their own.
characters = st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\"\\'\n\t\r#=[]{}")
text = st.text(characters, max_size=12)
positive = st.integers(1, 10**9)
count = st.integers(0, 10**9)
size = st.floats(0, exclude_min=True, allow_infinity=False)
share = st.floats(0, 1, exclude_max=True)
scalar = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text
identifier = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(lambda k: k != "name")
option = st.recursive(
    scalar | st.lists(scalar, max_size=3),
    lambda inner: st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
options = st.dictionaries(identifier, option, max_size=4)
named = st.builds(lambda name, extra: {"name": name, **extra}, text, options)

VALUES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "model": {
        "path": text.filter(bool),
        "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
        "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:0", "cuda:13"]),
        "gradient_checkpointing": st.booleans(),
        "offload_activations": st.booleans(),
        "deterministic": st.booleans(),
        "template": text,
        "chat_options": st.dictionaries(text, st.booleans() | st.integers(0, 9) | text, max_size=3),
        "prefill": text,
        "prefill_in_text": st.booleans(),
    },
    "adapter": {
        "rank": st.integers(0, 2**16),
        "alpha": positive,
        "targets": st.lists(text, max_size=3),
        "also_train": st.lists(text, max_size=3),
        "dropout": share,
        "load_in_4bit": st.booleans(),
    },
    "critic": {
        "path": text,
        "learning_rate": size,
        "warmup_steps": count,
        "initial_value": st.floats(-10, 10),
    },
    "preferences": {"file": text, "max_tokens": positive},
    "teacher": {
        "path": text,
        "offload": st.booleans(),
        "url": text,
        "token_env": text,
        "timeout": size,
        "patience": st.floats(0, allow_infinity=False),
        "temperature": size,
        "policy": st.sampled_from(["", "current", "frozen", "moving"]),
        "alpha": st.floats(0, 1, exclude_min=True),
        "every": positive,
        "context": st.dictionaries(text, text, max_size=3),
        "template": text,
    },
    "reference": {
        "kind": st.sampled_from(
            ["frozen", "offloaded", "adapter_off", "moving", "renewed", "server"]
        ),
        "alpha": st.floats(0, 1, exclude_min=True),
        "every": positive,
        "url": text,
        "token_env": text,
        "timeout": size,
        "patience": st.floats(0, allow_infinity=False),
        "fingerprint": text,
    },
    "rollout": {
        "prompts_per_step": st.integers(1, 10**3),
        "group_size": st.integers(2, 10**4),
        "max_tokens": st.integers(1, 10**7),
        "max_prompt_tokens": count,
        "long_prompts": st.sampled_from(["error", "skip", "truncate"]),
        "temperature": size,
        "top_k": count,
        "top_p": st.floats(0, 1, exclude_min=True),
        "min_p": share,
        "mask_replay": st.booleans(),
        "stop": st.lists(text.filter(bool), max_size=3),
    },
    "environment": {
        "name": text,
        "max_turns": positive,
        "max_calls": count,
        "max_tokens": positive,
        "call_format": st.sampled_from(["auto", "hermes", "llama3", "tags"]),
        "parallel_calls": st.booleans(),
        "workers": st.integers(0, 4096),
        "timeout": size,
        "gigabytes": st.floats(0.25, 1e6),
    },
    "engine": {
        "dtype": st.sampled_from(["model", "float8"]),
        "kv_dtype": st.sampled_from(["model", "float8"]),
        "kind": st.sampled_from(["native", "process", "vllm"]),
        "device": st.sampled_from(["auto", "cpu", "cuda:1"]),
        "max_concurrent": st.integers(1, 10**6),
        "cache_gigabytes": st.floats(0, 1e6),
        "vllm": st.fixed_dictionaries({"urls": st.lists(st.text(min_size=1)), "memory": size}),
    },
    "cluster": {
        "address": st.text(),
        "trainers": st.integers(0, 10**4),
        "trainer_cpus": st.floats(0, 64),
        "engines": st.integers(0, 10**4),
        "max_engines": count,
        "engine_cpus": st.floats(0, 64),
        "engine_gpus": st.floats(0, 8),
        "trainer_gpus": st.integers(0, 1),
        "scoring_actors": count,
        "reference_actor": st.booleans(),
        "restarts": count,
        "patience": size,
    },
    "scoring": {
        "workers": st.integers(0, 4096),
        "timeout": size,
        "gigabytes": st.floats(0.25, 1e6),
        "max_unscored": st.floats(0, 1),
        "none_rewards": st.sampled_from(["error", "skip"]),
    },
    "filter": {
        "drop_flat": st.booleans(),
        "dynamic_sampling": st.booleans(),
        "max_rounds": positive,
        "mask_truncated": st.booleans(),
        "skip_zero_gradient": st.booleans(),
    },
    "curriculum": {
        "sampling": st.sampled_from(["uniform", "hard", "uncertain"]),
        "memory": st.floats(0, 1, exclude_min=True),
        "floor": st.floats(0, 1, exclude_min=True),
        "drop_above": st.floats(0, 1),
        "mixture": st.sampled_from(["fixed", "progress"]),
    },
    "replay": {"groups": count, "size": positive, "max_age": positive},
    "overlap": {
        "staleness": st.integers(0, 64),
        "mode": st.sampled_from(["ahead", "copy"]),
        "in_flight": st.booleans(),
        "max_staleness": count,
    },
    "optimizer": {
        "learning_rate": st.floats(0, allow_infinity=False) | st.integers(0, 5),
        "beta1": share,
        "beta2": share,
        "eps": size,
        "weight_decay": st.floats(0, allow_infinity=False),
        "max_grad_norm": size,
        "schedule": st.sampled_from(["constant", "linear", "cosine"]),
        "warmup_steps": count,
        "warmup_ratio": share,
        "state": st.sampled_from(["float32", "compact"]),
    },
    "parallel": {
        "strategy": st.sampled_from(["ddp", "fsdp"]),
        "shard_ranks": count,
        "timeout": st.floats(0.1, 1e6),
    },
    "train": {
        "steps": positive,
        "stop_after": st.fixed_dictionaries({"tokens": count}),
        "mini_batches": st.integers(1, 2),
        "epochs": positive,
        "micro_batch_tokens": positive,
        "logits_megabytes": size,
        "old_logp": st.sampled_from(["auto", "recompute", "sampler"]),
        "graphs": st.sampled_from(["auto", "off"]),
        "stop_on": st.lists(text, max_size=3),
        "patience": count,
    },
    "sft": {
        "steps": count,
        "epochs": positive,
        "solutions": positive,
        "learning_rate": st.floats(0, allow_infinity=False),
        "schedule": st.sampled_from(["constant", "linear", "cosine"]),
        "warmup_steps": count,
        "max_tokens": count,
        "template": text,
        "file": text,
        "evaluate_every": count,
    },
    "evaluate": {
        "every": count,
        "prompts": count,
        "samples": st.integers(0, 10**5),
        "temperature": size,
        "reward": named,
    },
    "save": {
        "every": count,
        "keep": positive,
        "best": text,
        "best_is": st.sampled_from(["highest", "lowest"]),
        "rollouts": st.booleans(),
        "samples_every": count,
        "samples_shown": positive,
    },
}


def one_warmup(section: dict[str, Any]) -> dict[str, Any]:
    """Leave out one of two settings that exclude each other."""
    both = {"warmup_steps", "warmup_ratio"} <= section.keys()
    return {k: v for k, v in section.items() if not (both and k == "warmup_steps")}


configs = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "trackers": st.lists(text),
        "task": named,
        "reward": named,
        "length_penalty": named,
        "objective": named,
        **{
            name: st.fixed_dictionaries({}, optional=values).map(one_warmup)
            for name, values in VALUES.items()
        },
    },
)


def error_of(*overrides: str, source: str | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(source, overrides)
    message = str(raised.value)
    assert len(message.splitlines()) == 1, message
    return message


def get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def through_a_file(config: Config, folder: Path) -> Config:
    file = folder / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    return load_config(str(file))


@given(configs)
@example({})
@example({"task": {"name": "a", "float": 1.0, "integer": 1, "true": True, "text": "1", "e": []}})
@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_configuration_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]
) -> None:
    config = parse_config(data)
    back = through_a_file(config, tmp_path_factory.getbasetemp())
    assert back == config
    # Equality takes 1, 1.0 and True for the same, and so do -0.0 and 0.0.
    assert repr(back) == repr(config)


def test_control_characters_read_back_as_they_were_written(tmp_path: Path) -> None:
    codes = [*range(32), *range(127, 160)]
    texts = [f"a{chr(code)}b" for code in codes]
    config = parse_config({"rollout": {"stop": texts}, "task": {"name": texts[0]}})
    assert through_a_file(config, tmp_path) == config


@pytest.mark.parametrize("key", ["größe", "a.b", "", 'q"', "two words", "a-b", "_1", "\n"])
def test_any_key_reads_back_as_it_was_written(tmp_path: Path, key: str) -> None:
    config = parse_config({"task": {"name": "a", key: 1, "inner": {key: 2}}})
    back = through_a_file(config, tmp_path)
    assert back == config
    assert back.task.options == {key: 1, "inner": {key: 2}}


@pytest.mark.parametrize(
    "written",
    [
        "2024-02-29", "07:32:00", "07:32:00.000001", "2024-02-29T07:32:00",
        "2024-02-29 07:32:00.5Z", "2024-02-29T07:32:00-08:00",
    ],
)  # fmt: skip
def test_dates_and_times_read_back_as_they_were_written(tmp_path: Path, written: str) -> None:
    config = load_config(None, [f"task.since={written}", f"task.all=[{written}]"])
    since = config.task.options["since"]
    assert since == tomllib.loads(f"x = {written}")["x"]
    assert not isinstance(since, str)
    back = through_a_file(config, tmp_path)
    assert repr(back) == repr(config)


def test_the_round_trip_above_varies_every_field() -> None:
    varied = {name: set(values) for name, values in VALUES.items()}
    fields = {name: set(kind.model_fields) for name, kind in SECTIONS.items()}
    assert varied == {name: f for name, f in fields.items() if f != {"name"}}
    assert set(Config.model_fields) == {"seed", "trackers", *fields}


def test_what_is_written_names_every_field_with_its_value() -> None:
    data = tomllib.loads(to_toml(load_config(None, ["task.max_operations=9"])))
    assert data["task"] == {"name": "arithmetic", "max_operations": 9}
    assert data.keys() == Config.model_fields.keys()
    assert data["train"] == Config().train.model_dump()
    assert list(data["optimizer"]) == list(SECTIONS["optimizer"].model_fields)


def test_the_defaults_are_these() -> None:
    config = load_config()
    assert config == Config()
    assert (config.seed, config.model.path, config.task.name) == (0, "embedded", "arithmetic")
    assert (config.reward.name, config.objective.name) == ("think_answer", "grpo")
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (16, 8)
    assert config.optimizer.learning_rate == 1e-6


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().train.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=20", "train.steps", 20),
        ("train.steps = 20 ", "train.steps", 20),
        ("train.steps=1_000", "train.steps", 1000),
        ("seed=5", "seed", 5),
        ("seed=9223372036854775807", "seed", 2**63 - 1),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("optimizer.learning_rate=1e-5", "optimizer.learning_rate", 1e-5),
        ("rollout.temperature=0.7", "rollout.temperature", 0.7),
        ("save.rollouts=false", "save.rollouts", False),
        ("model.path=some/folder", "model.path", "some/folder"),
        ("model.path='some folder'", "model.path", "some folder"),
        ('model.path="7"', "model.path", "7"),
        ("model.path=a=b", "model.path", "a=b"),
        ("model.path=a#b", "model.path", "a#b"),
        ("model.path=C:\\x", "model.path", "C:\\x"),
        ("model.prefill=", "model.prefill", ""),
        ("model.path=Qwen/Qwen2.5-0.5B", "model.path", "Qwen/Qwen2.5-0.5B"),
        ("model.device=cuda:1", "model.device", "cuda:1"),
        ("optimizer.schedule=cosine", "optimizer.schedule", "cosine"),
        ('rollout.stop=["a", "\\n"]', "rollout.stop", ["a", "\n"]),
        ("rollout.stop=[]", "rollout.stop", []),
    ],
)
def test_an_override_is_read_as_toml_and_else_as_text(override: str, key: str, value: Any) -> None:
    found = get(load_config(None, [override]), key)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("raw", "value"),
    [("3", 3), ("0.5", 0.5), ("true", True), ("[1, 2]", [1, 2]), ("abc", "abc"), ("True", "True")],
)
def test_an_option_of_a_named_section_is_kept_as_it_is(raw: str, value: Any) -> None:
    found = load_config(None, [f"objective.beta={raw}"]).objective.options
    assert found == {"beta": value}
    assert type(found["beta"]) is type(value)


def test_overrides_apply_in_order_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("seed = 1\n[train]\nsteps = 5\nepochs = 2\n[task]\nmax_operations = 3\n")
    overrides = ["train.steps=6", "train.steps=7", "task.min_operations=1"]
    config = load_config(str(file), overrides)
    assert (config.seed, config.train.steps, config.train.epochs) == (1, 7, 2)
    assert config.task.options == {"max_operations": 3, "min_operations": 1}


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["task.name=jsonl"], {}),
        (["task.name=jsonl", "task.system=x"], {"system": "x"}),
        (["task.system=x", "task.name=jsonl"], {"system": "x"}),
        (["task.system=x", "task.name = jsonl"], {"system": "x"}),
        (["task.name=arithmetic"], {"max_operations": 3}),
        (["task.system=x"], {"max_operations": 3, "system": "x"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["name = 'arithmetic'", ""], ids=["named", "default"])
def test_naming_another_task_drops_the_options_of_the_old_one_and_no_others(
    tmp_path: Path, name: str, overrides: list[str], options: dict[str, Any]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"[task]\n{name}\nmax_operations = 3\n")
    assert load_config(str(file), overrides).task.options == options


FILE_OF_KINDS = """
[environment]
name = "games"
game = "maze"
max_turns = 3
call_format = "tags"
[evaluate.reward]
name = "math_answer"
tolerance = 0.1
[reference]
kind = "moving"
alpha = 0.2
every = 7
[engine]
kind = "process"
device = "cpu"
max_concurrent = 5
[engine.vllm]
memory = 0.3
"""


@pytest.mark.parametrize(
    ("override", "section", "kept", "dropped"),
    [
        ("environment.name=calculator", "environment", {"max_turns": 3, "call_format": "tags"},
         ["environment.game"]),
        ("environment.name=games", "environment", {"max_turns": 3, "game": "maze"}, []),
        ("evaluate.reward.name=think_answer", "evaluate", {}, ["evaluate.reward.tolerance"]),
        ("reference.kind=frozen", "reference", {}, ["reference.alpha", "reference.every"]),
        ("reference.kind=renewed", "reference", {"every": 7}, ["reference.alpha"]),
        ("reference.kind=moving", "reference", {"every": 7, "alpha": 0.2}, []),
        ("engine.kind=native", "engine", {"max_concurrent": 5}, ["engine.device", "engine.vllm"]),
        ("engine.kind=vllm", "engine", {"max_concurrent": 5}, ["engine.device"]),
        ("engine.kind=process", "engine", {"device": "cpu", "max_concurrent": 5}, []),
    ],
)  # fmt: skip
def test_a_new_name_or_kind_keeps_the_sections_own_settings_and_says_what_it_drops(
    tmp_path: Path, override: str, section: str, kept: dict[str, Any], dropped: list[str]
) -> None:
    file, said = tmp_path / "mine.toml", list[str]()
    file.write_text(FILE_OF_KINDS)
    found = getattr(load_config(str(file), [override], said.append), section).model_dump()
    assert {key: found[key] for key in kept} == kept
    assert [line.partition("dropped: ")[2].split(", ") for line in said] == [dropped] * bool(
        dropped
    )
    keys = [name.rpartition(".")[2] for name in dropped]
    given = load_config(str(file)).model_dump()[section]
    for key in keys:
        assert found.get(key) != given.get(key) or section == "evaluate"


def test_commands_say_once_what_a_new_name_drops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(FILE_OF_KINDS)
    for smoke in (False, True):
        loaded(str(file), ["environment.name=calculator"], smoke=smoke)
        assert capsys.readouterr().err.count("environment.game") == 1
    covey.load_config(file, **{"environment.name": "calculator"})
    assert capsys.readouterr().err.count("environment.game") == 1


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_naming_an_algorithm_drops_the_pieces_of_one_that_had_no_name(
    tmp_path: Path, name: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[objective]\nadvantage = 'centered'\nbeta = 0.1\n")
    assert load_config(str(file), [f"objective.name={name}"]).objective.options == {}
    kept = load_config(str(file), ["objective.name=composed"]).objective
    assert kept.options == {"advantage": "centered", "beta": 0.1}


@pytest.mark.parametrize("override", ["train.steps", "=1", " =1", "", "train.steps:1"])
def test_an_override_that_is_not_key_and_value_says_what_one_is(override: str) -> None:
    message = error_of(override)
    assert (
        message == f"the setting {override!r} must have the form key=value, such as train.steps=100"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1", "seed.x=1"], "config: seed.x cannot be set, because 'seed' is a single value"),
        (
            ["train.steps=1", "train.steps.x=1"],
            "config: train.steps.x cannot be set, because 'steps' is a single value",
        ),
        (["seed.x=1"], "config: seed = {'x': 1}: input should be a valid integer"),
        (["train=5"], "config: train is a table: write [train], or train.KEY=VALUE"),
        (["train.=5"], "config: train. is not a setting"),
    ],
)
def test_an_override_of_a_table_or_inside_a_value_is_an_error(
    overrides: list[str], message: str
) -> None:
    assert error_of(*overrides).startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sed=1", "config: sed is not a setting; did you mean 'seed'?"),
        ("trian.steps=1", "config: trian is not a setting; did you mean 'train'?"),
        ("train.step=1", "config: train.step is not a setting; did you mean 'steps'?"),
        (
            "optimizer.learning-rate=1",
            "config: optimizer.learning-rate is not a setting; did you mean 'learning_rate'?",
        ),
        (
            "save.zzz=1",
            "config: save.zzz is not a setting; choose from best, best_is, every, keep, rollouts, samples_every, samples_shown",
        ),
    ],
)
def test_an_unknown_key_gives_the_nearest_of_its_section(override: str, message: str) -> None:
    assert error_of(override) == message


KEYS = sorted({key for s in SECTIONS.values() for key in s.model_fields} - set(SECTIONS))


@pytest.mark.parametrize("key", KEYS)
def test_a_key_without_its_section_is_told_where_it_belongs(key: str) -> None:
    homes = [f"'{name}.{key}'" for name, s in SECTIONS.items() if key in s.model_fields]
    message = error_of(f"{key}=1")
    assert message.startswith(f"config: {key} is not a setting; did you mean ")
    assert any(home in message for home in homes)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=fast", "config: train.steps = 'fast': input should be a valid integer"),
        ("train.steps=1.0", "config: train.steps = 1.0: input should be a valid integer"),
        ("train.steps=true", "config: train.steps = True: input should be a valid integer"),
        ('train.steps="1"', "config: train.steps = '1': input should be a valid integer"),
        ("model.path=123", "config: model.path = 123: input should be a valid string"),
        ("save.rollouts=1", "config: save.rollouts = 1: input should be a valid boolean"),
        ("save.rollouts=yes", "config: save.rollouts = 'yes': input should be a valid boolean"),
        ("rollout.stop=a", "config: rollout.stop = 'a': input should be a valid list"),
        ('rollout.stop=["a", 3]', "config: rollout.stop.1 = 3: input should be a valid string"),
        (
            'rollout.stop=["a", ""]',
            "config: rollout.stop.1 = '': string should have at least 1 char",
        ),
        ("optimizer.schedule=cosin", "config: optimizer.schedule = 'cosin': input should be "),
        ("model.dtype=float16", "config: model.dtype = 'float16': input should be 'auto', "),
        ("task.name=3", "config: task.name = 3: input should be a valid string"),
        ("optimizer.eps=true", "config: optimizer.eps = True: input should be a valid number"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(override: str, message: str) -> None:
    assert error_of(override).startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=-1", "greater than or equal to 0"),
        ("train.steps=0", "greater than or equal to 1"),
        ("rollout.group_size=0", "greater than or equal to 1"),
        ("rollout.temperature=0", "greater than 0"),
        ("rollout.temperature=-1.0", "greater than 0"),
        ("rollout.top_p=0.0", "greater than 0"),
        ("rollout.top_p=1.01", "less than or equal to 1"),
        ("rollout.min_p=1.0", "less than 1"),
        ("rollout.top_k=-1", "greater than or equal to 0"),
        ("scoring.max_unscored=1.5", "less than or equal to 1"),
        ("optimizer.learning_rate=-0.5", "greater than or equal to 0"),
        ("optimizer.learning_rate=inf", "a finite number"),
        ("optimizer.learning_rate=nan", "a finite number"),
        ("optimizer.beta2=1.0", "less than 1"),
        ("optimizer.max_grad_norm=0", "greater than 0"),
        ("save.keep=0", "greater than or equal to 1"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(override: str, message: str) -> None:
    key, _, raw = override.partition("=")
    assert error_of(override) == f"config: {key} = {raw}: input should be {message}"


def test_a_seed_has_64_bits_as_the_generator_does() -> None:
    assert load_config(None, [f"seed={2**63 - 1}"]).seed == 2**63 - 1
    assert error_of(f"seed={2**64}").startswith(f"config: seed = {2**64}")


def test_mini_batches_cannot_outnumber_the_completions() -> None:
    fits = ["rollout.prompts_per_step=2", "rollout.group_size=3", "train.mini_batches=6"]
    assert load_config(None, fits).train.mini_batches == 6
    message = error_of(*fits[:2], "train.mini_batches=7")
    assert message == "config: train.mini_batches = 7 exceeds the 6 completions of a step"


def test_optimizer_steps_of_a_batch_are_mini_batches_times_epochs() -> None:
    assert load_config(None, ["train.mini_batches=4", "train.epochs=3"]).train.optimizer_steps == 12


def test_recipes_are_found_by_name() -> None:
    assert "arithmetic" in recipe_names()
    assert recipe_names() == sorted(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_differs_from_the_defaults_and_reads_back(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert config != Config()
    assert through_a_file(config, tmp_path) == config


def test_the_arithmetic_recipe_trains_the_embedded_model_with_four_mini_batches() -> None:
    config = load_config("arithmetic")
    assert (config.model.path, config.task.name) == ("embedded", "arithmetic")
    assert (config.train.steps, config.train.mini_batches) == (100, 4)
    assert config.objective.options == {"beta": 0.0}


def test_a_file_comes_before_a_recipe_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("arithmetic").write_text("seed = 9\n")
    assert load_config("arithmetic") == Config(seed=9)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("arithmetc", "config: there is no file or recipe 'arithmetc'; did you mean 'arithmetic'?"),
        ("missing.toml", "config: there is no file or recipe 'missing.toml'"),
        ("a\nb.toml", "config: there is no file or recipe 'a\\nb.toml'"),
        ("a\0b.toml", "config: there is no file or recipe 'a\\x00b.toml'"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, message: str) -> None:
    assert error_of(source=source) == message


def test_a_source_too_long_for_a_file_name_is_an_error_of_ours() -> None:
    assert error_of(source="a" * 300).startswith("config: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed = ", "Invalid value (at end of document)"),
        (b"seed = 1\nseed = 2\n", "Cannot overwrite a value (at line 2, column 9)"),
        (b"[train\n", "line 1"),
        (b"seed = '\xff'", "can't decode byte 0xff"),
    ],
)
def test_a_file_that_is_not_toml_is_named_with_the_place(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    error = error_of(source=str(file))
    assert error.startswith(f"config: {file}: ")
    assert message in error


def test_an_integer_of_more_digits_than_python_reads_is_an_error_of_ours() -> None:
    assert error_of("seed=" + "9" * 5000).startswith("config: seed")


@pytest.mark.parametrize("override", ["a\nb=1", "train.a\nb=1", "seed=a\nb", "task.name=[\n]"])
def test_an_error_about_a_key_or_value_with_line_breaks_is_one_line(override: str) -> None:
    assert "\n" not in error_of(override)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rollout.prompts=4", "rollout.prompts was renamed to rollout.prompts_per_step"),
        ("rollout.samples=4", "rollout.samples was renamed to rollout.group_size"),
        ("rollout.slots=4", "rollout.slots was renamed to engine.max_concurrent"),
        ("train.token_budget=4", "train.token_budget was renamed to train.micro_batch_tokens"),
        ("train.budget=tokens", "train.budget was renamed to train.stop_after, as in"),
        ("select.dynamic=true", "select.dynamic was renamed to filter.dynamic_sampling"),
        ("select.max_age=4", "select.max_age was renamed to overlap.max_staleness"),
        ("select.max_rounds=4", "select.max_rounds was renamed to filter.max_rounds"),
        ("warmup.steps=4", "warmup.steps was renamed to sft.steps"),
        ("objective.low=0.1", "objective.low was renamed to objective.clip_low"),
        ("save.review_every=4", "save.review_every was renamed to save.samples_every"),
    ],
)
def test_an_old_key_is_refused_with_its_new_name(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=new):
        load_config(None, [old])


def test_settings_of_an_old_run_are_read_under_their_new_names() -> None:
    old = {
        "seed": 3,
        "rollout": {"prompts": 4, "samples": 2, "slots": 8},
        "train": {"steps": 5, "budget": "tokens", "amount": 100},
        "select": {"dynamic": True, "max_age": 2},
        "warmup": {"steps": 7},
    }
    config = parse_config(translated(old))
    assert (config.seed, config.rollout.prompts_per_step, config.rollout.group_size) == (3, 4, 2)
    assert (config.engine.max_concurrent, config.overlap.max_staleness) == (8, 2)
    assert (config.train.budget, config.train.amount, config.train.steps) == ("tokens", 100, 5)
    assert config.filter.dynamic_sampling
    assert config.sft.steps == 7


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("num_generations=8", "rollout.group_size"),
        ("rollout.num_generations=8", "rollout.group_size"),
        ("train.max_steps=8", "train.steps"),
        ("optimizer.lr=1e-6", "optimizer.learning_rate"),
        ("max_completion_length=256", "rollout.max_tokens"),
        ("train.num_iterations=2", "train.epochs"),
    ],
)
def test_names_of_trl_and_verl_give_ours(override: str, name: str) -> None:
    assert error_of(override).endswith(f"is '{name}' here")
