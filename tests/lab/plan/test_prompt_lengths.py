from __future__ import annotations

from dataclasses import asdict

from covey.config import load_config
from covey.config.resolve import resolve
from covey.embedded import CHECKPOINT
from covey.lab.plan.task_facts import measure, measuring_elsewhere, task_facts
from covey.models.chat import Template


def test_another_process_measures_the_same() -> None:
    config = resolve(load_config("arithmetic"))
    with measuring_elsewhere() as elsewhere:
        found = task_facts(config, elsewhere)
    assert (found.longest_prompt, found.measured, found.problem) == (9, 64, "")
    assert found == task_facts(config)


def test_solutions_are_measured_although_prompts_cannot_be_rendered() -> None:
    job = {
        "path": "mine", "source": str(CHECKPOINT), "options": {}, "solutions": ["1 + 1"],
        "template": asdict(Template(form="{system} {question}")), "prompts": [[]],
    }  # fmt: skip
    found = measure(job)
    assert found["solutions"] == [5]
    assert "prompts" not in found
    assert "a prompt has 0 messages" in found["problem"]


def test_a_job_without_a_tokenizer_is_a_problem() -> None:
    with measuring_elsewhere() as elsewhere:
        found = elsewhere({"path": "mine"})
    assert found == {"problem": "'source'"}
