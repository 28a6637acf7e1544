"""The embedded checkpoint, and the recipe that made it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
import transformers

from covey.embedded import CHECKPOINT
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.evaluation.evaluate import evaluate
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from covey.models.logp import batch_logp
from covey.rewards import ThinkAnswer
from covey.rollout.collect import Collector
from covey.rollout.episode import encode_prompts
from covey.scoring import InlineScorer
from covey.tasks.arithmetic import Arithmetic
from tests.tasks.sums import parse_prompt
from tools import train_embedded as recipe

TASK = Arithmetic(min_operations=2, max_operations=3)


def test_the_checkpoint_is_small_and_ordinary() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 4 * 2**20
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 400_000 <= model.num_parameters() <= 2_000_000


@pytest.mark.parametrize("text", ["47+8-6?", "<think>1</think>", "Grüße, 世界 🎉\n\t", "<eos", ""])
def test_the_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("<think></think><answer></answer>")) == 4
    assert recipe.build_tokenizer().encode(text) == ids


def test_the_start_leaves_reinforcement_both_calculation_and_form(embedded: LanguageModel) -> None:
    prompts, sampling = TASK.held_out(), Sampling(max_tokens=48, max_concurrent=256)
    collector = Collector(
        engine=NativeEngine(embedded), model=embedded, scorer=InlineScorer(ThinkAnswer())
    )
    start = evaluate(prompts, collector, sampling=sampling)
    assert 0.10 <= start.estimates["greedy"].value <= 0.30
    encoded = encode_prompts(embedded, prompts)
    sampled = collector.collect(encoded, sampling=replace(sampling, group_size=4), step=0)
    form = sum(r.parts["format"] for r in sampled.rollouts) / len(sampled.rollouts)
    assert 0.70 <= form <= 0.90
    mixed = [len({r.success for r in group.rollouts}) == 2 for group in sampled.groups]
    assert sum(mixed) / len(mixed) > 0.3


def test_no_stage_contains_a_held_out_sum() -> None:
    random = Random(1)
    for stage in recipe.STAGES:
        for _ in range(300):
            asked, told = recipe.example(stage, random)
            sums = parse_prompt(asked)
            assert not any(s.held_out for s in sums)
            assert stage.operations[0] <= len(sums) <= stage.operations[1]
            if not stage.careless:
                assert told.endswith(f"<answer>{sums[-1].result:02d}</answer>")


def test_careless_results_are_wrong_only_where_a_sum_carries() -> None:
    random = Random(2)
    carried = wrong = 0
    for _ in range(4000):
        (only,) = recipe.chain(random, 1, held_out=False)
        result = recipe.careless_result(only, random)
        assert only.carries or result == only.result
        assert 0 <= result < 100
        carried += only.carries
        wrong += result != only.result
    assert 0.75 < wrong / carried < 0.90


def test_sft_lowers_the_loss() -> None:
    torch.manual_seed(0)
    tokenizer = recipe.build_tokenizer()
    model = wrap(recipe.build_model(tokenizer), tokenizer)
    stage = recipe.Stage(steps=15, operations=(1, 1), peak_rate=3e-3, careless=False)

    def loss() -> float:
        batch = recipe.stage_batch(model, stage, Random(9))
        with torch.no_grad():
            logp = batch_logp(model, batch).logp
        return -float(logp.sum() / batch.mask.sum())

    before = loss()
    recipe.train_stage(model, stage, Random(0))
    assert loss() < 0.8 * before
