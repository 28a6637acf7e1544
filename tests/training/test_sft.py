"""Supervised training: its loss and gradient, its data, and its runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.cli.main import run as covey
from covey.config import load_config, parse_config
from covey.config.resolve import resolve
from covey.engines.draw import Distribution
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.errors import ConfigError, DataError
from covey.loop import train
from covey.models.chat import Template
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.parallel.passes import micro_batches
from covey.policy.optimizer import MasterAdamW, Stepped
from covey.policy.policy import Policy
from covey.policy.schedule import Schedule
from covey.records.folder import RunFolder
from covey.records.trackers.console import summary
from covey.rewards import ThinkAnswer
from covey.rewards.registry import make_reward
from covey.rewards.score import Reward
from covey.rng import sft_indices
from covey.rollout.episode import encode_prompts
from covey.scoring import InlineScorer, Job
from covey.sft import (
    build_sft,
    encode_example,
    learn,
    policy_run,
    sft_steps,
    sft_total,
    stack,
    step_examples,
)
from covey.solutions import Solutions, solutions_of, write_solution
from covey.stopping import StopSignal
from covey.tasks.arithmetic import Arithmetic
from covey.tasks.countdown import Countdown
from covey.types import Prompt, Rollout
from tests.conftest import build, rollouts_of
from tests.processes import forked, wait_until
from tests.trackers import Notes

TEXTS = [("1+1?", "two"), ("2+2?", "<answer>four</answer>"), ("2+2?", "4"), ("3?", "")]


class Kept:
    """An optimizer that keeps the gradients it is given, and changes nothing."""

    def __init__(self, model: LanguageModel) -> None:
        self.parameters = dict(model.model.named_parameters())
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, rate: float) -> Stepped:
        for name, parameter in self.parameters.items():
            self.gradients[name] = parameter.grad.clone()
            parameter.grad = None
        return Stepped(grad_norm=0.0, skipped=False)


def policy_with(model: LanguageModel, optimizer: Any) -> Policy:
    return Policy(model=model, optimizer=optimizer, temperature=1.0, logits_megabytes=0.01)


def examples_of(model: LanguageModel, texts: list[tuple[str, str]] = TEXTS) -> list[Rollout]:
    return [encode_example(model, ({"role": "user", "content": q},), a) for q, a in texts]


def gradients(
    model: LanguageModel, examples: list[Rollout], micro_batch_tokens: int = 10**6
) -> tuple[float, dict[str, torch.Tensor]]:
    kept = Kept(model)
    schedule = Schedule(peak=0.0, shape="constant", warmup_steps=0, total_steps=1)
    run = policy_run(policy_with(model, kept), schedule, micro_batch_tokens=micro_batch_tokens)
    learned = learn(run, stack(examples))
    return learned["loss/cross_entropy"], kept.gradients


def plain_gradients(
    model: LanguageModel, examples: list[Rollout]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return torch's own mean cross-entropy over padded rows, and its gradient."""
    width = max(len(e.prompt_tokens) + len(e.tokens) for e in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    targets = torch.full((len(examples), width), -100)
    for row, e in enumerate(examples):
        whole = [*e.prompt_tokens, *e.tokens]
        ids[row, : len(whole)] = torch.tensor(whole)
        start = len(e.prompt_tokens) - 1
        targets[row, start : start + len(e.tokens)] = torch.tensor(e.tokens)
    logits = model.model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.model.named_parameters()}
    model.model.zero_grad()
    return float(loss.detach()), found


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    largest = max(float(value.abs().max()) for value in b.values())
    assert largest > 1e-3
    for name in a:
        assert float((a[name] - b[name]).abs().max()) <= tolerance * largest, name


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2"])
def test_loss_and_gradient_are_those_of_plain_cross_entropy(name: str) -> None:
    model = build(name, torch.float64)
    examples = examples_of(model)
    loss, found = gradients(model, examples)
    expected, plain = plain_gradients(model, examples)
    # Models of Llama's kind normalise in float32 whatever their type.
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_close(found, plain, 1e-9 if name == "gpt2" else 1e-6)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 40])
def test_micro_batches_and_packing_change_nothing(packs: bool, micro_batch_tokens: int) -> None:
    model = build("llama")
    assert model.packs
    examples = examples_of(model)
    assert len(list(micro_batches(stack(examples), micro_batch_tokens))) > 1
    loss, whole = gradients(model, examples)
    object.__setattr__(model, "packs", packs)
    split_loss, split = gradients(model, examples, micro_batch_tokens)
    assert split_loss == pytest.approx(loss, rel=1e-6)
    assert_close(split, whole, 1e-6)


def test_every_token_weighs_the_same_however_long_its_solution() -> None:
    model = build("llama", torch.float64)
    examples = examples_of(model)
    sizes = [len(e.tokens) for e in examples]
    single = [gradients(model, [example])[0] for example in examples]
    together = sum(n * loss for n, loss in zip(sizes, single, strict=True)) / sum(sizes)
    assert gradients(model, examples)[0] == pytest.approx(together, rel=1e-6)
    assert min(sizes) == 1  # an empty solution is only its end


def test_the_end_is_learned_also_where_it_is_the_padding() -> None:
    model = build("llama")
    model.tokenizer.pad_token = model.tokenizer.eos_token
    assert model.tokenizer.pad_token_id == model.tokenizer.eos_token_id == 1
    prompts = [
        Prompt(id=q, task="t", messages=({"role": "user", "content": q},), target=a)
        for q, a in [("1+1?", "two"), ("2?", "a longer one")]
    ]
    batch = stack(examples_of(model, [(p.text, p.target) for p in prompts]))
    assert batch.tokens[batch.mask].tolist().count(1) == 2
    optimizer = MasterAdamW(
        model.model.named_parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    policy = policy_with(model, optimizer)
    schedule = Schedule(peak=0.01, shape="constant", warmup_steps=0, total_steps=40)
    run = policy_run(policy, schedule, micro_batch_tokens=4096)
    losses = [learn(run, batch)["loss/cross_entropy"] for _ in range(40)]
    assert losses[-1] < 0.05 < losses[0]
    assert policy.version == 40
    sampling = Sampling(group_size=1, max_tokens=30, distribution=Distribution(temperature=0.0))
    rollouts = rollouts_of(
        NativeEngine(model), encode_prompts(model, prompts), step=0, sampling=sampling
    )
    found = [(r.text, r.finish) for (r,) in rollouts]
    assert found == [("two", "stop"), ("a longer one", "stop")]


def test_every_epoch_is_a_new_order_of_all_solutions_without_gaps() -> None:
    numbers = sft_indices(seed=3, start=0, stop=30, size=10)
    epochs = [numbers[at : at + 10] for at in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert sft_indices(seed=3, start=7, stop=23, size=10) == numbers[7:23]
    assert sft_indices(seed=4, start=0, stop=30, size=10) != numbers


def settings_of(**sections: Any) -> Any:
    return resolve(parse_config(sections))


@pytest.mark.parametrize(
    ("sft", "steps", "total"),
    [
        ({"solutions": 4}, 3, 10),
        ({"solutions": 4, "epochs": 3}, 8, 30),
        ({"solutions": 4, "epochs": 3, "steps": 2}, 2, 8),
        ({"solutions": 64}, 1, 10),
        ({"solutions": 64, "steps": 2}, 2, 128),
    ],
)
def test_steps_or_epochs_decide_the_length(sft: dict[str, int], steps: int, total: int) -> None:
    config = parse_config({"sft": sft})
    prompts = [Prompt(id=str(n), task="", messages=(), target="") for n in range(10)]
    found = Solutions(prompts=prompts, template="{answer}")
    assert (sft_steps(config, found), sft_total(config, found)) == (steps, total)


JUDGED: list[tuple[Any, Reward]] = [
    (Arithmetic(), ThinkAnswer()),
    (Countdown(), make_reward("countdown", {})),
]


@pytest.mark.parametrize(("task", "reward"), JUDGED, ids=["arithmetic", "countdown"])
def test_a_written_solution_is_right_to_the_reward(task: Any, reward: Reward) -> None:
    template = "<think>{worked}</think><answer>{answer}</answer>"
    if task.name == "countdown":
        template = "<think>So it goes: {solution}</think><answer>{solution}</answer>"
    scorer = InlineScorer(reward)
    for prompt in task.train()[:50]:
        job = Job(prompt=prompt, texts=(write_solution(prompt, template),), progress=1.0)
        assert scorer.submit(job).result()[0].score.success


def test_templates_leave_other_braces_and_filled_in_braces_alone() -> None:
    prompt = Prompt(
        id="p", task="t", messages=(), target="{worked}",
        info={"worked": "w{answer}", "solution": "f(x) = {x: 1}"},
    )  # fmt: skip
    written = write_solution(prompt, "{} {x} {worked}|{solution}|{answer}{answer}")
    assert written == "{} {x} w{answer}|f(x) = {x: 1}|{worked}{worked}"
    plain = Prompt(id="p", task="t", messages=(), target="7")
    assert write_solution(plain, "{solution}") == "7"
    with pytest.raises(
        DataError, match=r"sft: prompt p has no worked solution; remove the field \{worked\}"
    ):
        write_solution(plain, "{worked}")


def test_what_the_prompt_already_says_is_not_said_again() -> None:
    template, asked = Template(prefill="<think>"), ({"role": "user", "content": "1+1?"},)
    prefilled = load_language_model("embedded", device="cpu", template=template)
    plain = load_language_model("embedded", device="cpu")
    example = encode_example(prefilled, asked, "<think>1+1=2</think>")
    rest = encode_example(plain, asked, "1+1=2</think>")
    assert (example.text, example.tokens) == (rest.text, rest.tokens)
    whole = encode_example(plain, asked, "<think>1+1=2</think>")
    assert example.prompt_tokens + example.tokens == whole.prompt_tokens + whole.tokens


def test_a_template_without_fields_is_refused() -> None:
    config = settings_of(sft={"template": "Yes {indeed}."})
    with pytest.raises(ConfigError, match=r"sft.template = 'Yes \{indeed\}.' contains none of"):
        solutions_of(config, Arithmetic())


def test_a_file_gives_questions_or_conversations_with_completions(tmp_path: Path) -> None:
    file = tmp_path / "solutions.jsonl"
    config = settings_of(sft={"file": str(file)})
    file.write_text('{"question": "1+1?", "completion": "It is {answer}: 2"}\n')
    only = solutions_of(config, Arithmetic())[0]
    assert (only.prompt.text, only.text) == ("1+1?", "It is {answer}: 2")
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    file.write_text(json.dumps({"messages": said, "completion": "2"}))
    only = solutions_of(config, Arithmetic())[0]
    assert (list(only.prompt.messages), only.text) == (said, "2")
    file.write_text('{"question": "1+1?", "answer": "2"}\n')
    with pytest.raises(DataError, match=r"solutions.jsonl:1 has no 'completion'"):
        solutions_of(config, Arithmetic())


QUICK: dict[str, Any] = {"model": {"device": "cpu"}, "rollout": {"temperature": 0.5}}


def test_too_long_solutions_are_left_out_and_a_step_of_nothing_else_is_an_error() -> None:
    parts = build_sft(settings_of(**QUICK, sft={"max_tokens": 30, "solutions": 40}))
    examples, left_out = step_examples(parts, 1)
    assert len(examples) + len(left_out) == 40
    assert min(left_out) > 30
    assert max(len(e.tokens) for e in examples) <= 30
    assert parts.policy.temperature == 1.0  # of the model itself, not of its samples
    with pytest.raises(
        DataError, match=r"all 40 solutions of step 1 are longer than sft\.max_tokens = 5"
    ):
        build_sft(settings_of(**QUICK, sft={"max_tokens": 5, "solutions": 40}))


def test_a_small_step_of_too_long_solutions_learns_nothing_and_the_next_goes_on(
    tmp_path: Path,
) -> None:
    rows = [{"question": "1+1?", "completion": "2"} for _ in range(5)]
    last = sft_indices(seed=0, start=0, stop=5, size=5)[-1]
    rows[last]["completion"] = "2 " * 200
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    sft = {
        "file": str(tmp_path / "rows.jsonl"),
        "solutions": 1,
        "evaluate_every": 0,
        "epochs": 2,
    }
    parts = build_sft(settings_of(**QUICK, sft=sft))
    run, reporter = RunFolder.create(tmp_path / "run", "", {}), Notes()
    assert train(parts, run, [reporter], StopSignal()) == 10
    steps = run.steps()
    assert [s["sft/examples"] for s in steps].count(0) == 2
    assert (steps[4]["sft/examples"], steps[4]["sft/left_out"]) == (0, 1)
    assert "loss/cross_entropy" not in steps[4]
    assert summary(steps[4]) == "nothing to train on: 1 solutions are too long"
    assert parts.policy.version == 8


SETTINGS = (
    "model.device=cpu", "sft.steps=6", "sft.solutions=12", "sft.learning_rate=1e-3",
    "sft.evaluate_every=3", "evaluate.prompts=8", "save.every=2", "save.keep=10",
    "train.micro_batch_tokens=256",
)  # fmt: skip


def arguments(path: Path, *more: str) -> list[str]:
    overrides = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    return ["sft", "--run", str(path), *overrides]


def rows(path: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read]


def assert_same(run: Path, other: Path) -> None:
    for name in ("steps.jsonl", "eval.jsonl"):
        assert rows(run / name) == rows(other / name)
    for file in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(p / "checkpoints/000006" / file) for p in (run, other))
        assert a.keys() == b.keys()
        assert all((a[k] == b[k]).all() for k in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert covey(arguments(path)) == 0
    return path


def test_the_loss_falls_on_the_embedded_task(whole: Path) -> None:
    steps = rows(whole / "steps.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    losses = [row["loss/cross_entropy"] for row in steps]
    assert losses[-1] < 0.6 * losses[0]
    assert [row["sft/epoch"] for row in steps] == [12 * n / 100_000 for n in range(1, 7)]
    assert steps[0]["lr"] == 1e-4  # the recipe warms the rate up
    assert [row["step"] for row in rows(whole / "eval.jsonl")] == [0, 3, 6]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_goes_on_bit_for_bit(
    number: signal.Signals, whole: Path, tmp_path: Path
) -> None:
    path, output = tmp_path / "run", tmp_path / "output"
    child = forked(lambda: covey(arguments(path)), output)
    wait_until((path / "checkpoints/000002").exists)
    os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (130 if number == signal.SIGINT else -number)
    saved = max(int(p.name) for p in (path / "checkpoints").iterdir() if p.name.isdecimal())
    assert saved >= 2
    if number == signal.SIGINT and saved < 6:
        assert f"SIGINT: saved step {saved} of 6" in output.read_text()
        assert f"covey sft --resume {path}" in output.read_text()
    assert covey(["sft", "--resume", str(path)]) == 0
    assert_same(path, whole)


def test_dropout_is_the_same_after_a_resume(tmp_path: Path) -> None:
    lora = ("adapter.rank=2", "adapter.dropout=0.5", "sft.steps=4", "sft.evaluate_every=0")
    assert covey(arguments(tmp_path / "whole", *lora)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    torch.rand(3)  # random numbers that something else draws
    assert covey(["sft", "--resume", str(tmp_path / "cut"), "--step", "2"]) == 0
    assert rows(tmp_path / "cut/steps.jsonl") == rows(tmp_path / "whole/steps.jsonl")


def test_reinforcement_goes_on_from_a_run_sft(whole: Path, tmp_path: Path) -> None:
    quick = (
        "train.steps=1",
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "evaluate.every=0",
    )
    overrides = [word for setting in quick for word in ("--set", setting)]
    model = str(whole / "checkpoints/000006")
    assert covey(["train", "--run", str(tmp_path / "run"), "--model", model, *overrides]) == 0
    assert [row["step"] for row in rows(tmp_path / "run/steps.jsonl")] == [1]


def test_the_two_kinds_of_runs_are_not_mixed_up(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert covey(["train", "--resume", str(whole)]) == 1
    assert "is an SFT run; resume it with: covey sft --resume" in capsys.readouterr().err
    assert covey(["sft", "--resume", str(whole), "--set", "seed=1"]) == 2
    assert "cannot change seed" in capsys.readouterr().err
    assert covey(["sft", "--resume", str(whole), "--set", "sft.steps=5"]) == 2
    assert "sft.steps = 5, but the run is already at step 6" in capsys.readouterr().err
    assert covey(["runs", str(whole.parent), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["steps"], row["reward"]) == (6, None)


def test_a_task_without_worked_solutions_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = covey(arguments(tmp_path / "run", "task.name=countdown", "reward.name=countdown"))
    error = capsys.readouterr().err
    assert code == 1
    assert "has no worked solution; remove the field {worked} from sft.template" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_configuration_on_the_page_loads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/sft.md").read_text()
    (tmp_path / "page.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL).group(1))
    config = resolve(load_config(str(tmp_path / "page.toml")))
    prompt = Prompt(id="p", task="t", messages=(), target="4", info={"worked": "2+2=4"})
    text = write_solution(prompt, config.sft.template)
    assert text == "<think>2+2=4</think>\n<answer>4</answer>"
    assert (config.sft.epochs, config.rollout.max_tokens) == (2, 400)
    fields = set(type(config.sft).model_fields)
    assert [name for name in fields if name not in page] == []
