"""Prompt rendering: chat, plain, custom text, with and without a prefill."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers
from tokenizers.processors import TemplateProcessing
from transformers.utils.chat_template_utils import render_jinja_template

from covey.config import load_config
from covey.config.resolve import resolve, template_of
from covey.embedded import CHECKPOINT
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.errors import ConfigError, DataError, ModelError
from covey.models.chat import Renderer, Template, make_renderer
from covey.models.load_model import load_language_model
from covey.models.template_worker import render
from covey.rewards.registry import make_reward
from covey.rollout.collect import Collector
from covey.rollout.episode import encode_prompts
from covey.rollout.prompts import prompt_notes
from covey.scoring import make_scorer
from covey.types import Prompt

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "1+1?"}
TOLD = {"role": "assistant", "content": "2"}

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + CHATML
)
SILENT = (
    "{% for m in messages %}{% if m['role'] != 'system' %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USERS = (
    "<eos>{% for m in messages if m['role'] == 'user' %}<|user|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML


def made(chat: str | None, form: str = "auto", prefill: str = "") -> Renderer:
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = chat
    return make_renderer(tokenizer, Template(form=form, prefill=prefill), "tiny")


@pytest.mark.parametrize(
    ("chat", "form", "messages", "text"),
    [
        (CHATML, "auto", [SYSTEM, ASKED], "<|system|>Be brief.<eos><|user|>1+1?<eos><|assistant|>"),
        (CHATML, "chat", [ASKED], "<|user|>1+1?<eos><|assistant|>"),
        (CHATML, "plain", [SYSTEM, ASKED], "Be brief.\n1+1?"),
        (None, "auto", [SYSTEM, ASKED], "Be brief.\n1+1?"),
        (CHATML, "{system} Q: {question} {{A}}:", [SYSTEM, ASKED], "Be brief. Q: 1+1? {A}:"),
        (CHATML, "{system}Q: {question}", [ASKED], "Q: 1+1?"),
        (None, "Q: {question}", [SYSTEM, ASKED], "Q: 1+1?"),
        (NO_SYSTEM, "auto", [SYSTEM, ASKED], "<|user|>Be brief.\n\n1+1?<eos><|assistant|>"),
        (SILENT, "auto", [SYSTEM, ASKED], "<|user|>Be brief.\n\n1+1?<|assistant|>"),
        (NO_SYSTEM, "auto", [ASKED, TOLD, ASKED],
         "<|user|>1+1?<eos><|assistant|>2<eos><|user|>1+1?<eos><|assistant|>"),
    ],
)  # fmt: skip
def test_rendered_prompt(chat: str | None, form: str, messages: list[Any], text: str) -> None:
    assert made(chat, form).text(messages) == text
    assert made(chat, form, "Let me see.\n<think>").text(messages) == text + "Let me see.\n<think>"


def test_braces_in_a_prompt_are_not_fields() -> None:
    question = {"role": "user", "content": "{system} {x} {}"}
    assert made(None, "Q: {question}").text([SYSTEM, question]) == "Q: {system} {x} {}"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("chatt", "did you mean 'chat'?"),
        ("", "must be 'auto', 'chat', 'plain' or a text"),
        ("Q: {questoin}", "has the unknown field {questoin}"),
        ("Q: {question!r}", "has the unknown field {question!r}"),
        ("Q: {question:9}", "has the unknown field {question:9}"),
        ("Q: {}", "has the unknown field {}"),
        ("Q: {question} {", "for braces that do not mark a field"),
        ("{system}", "must contain the field {question}"),
    ],
)
def test_an_invalid_template_is_an_error(form: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Template(form=form)
    assert message in str(raised.value)
    assert "model.template" in str(raised.value)


def test_a_required_chat_template_must_exist_and_work() -> None:
    with pytest.raises(ModelError, match=r"tiny .*model\.template"):
        made(None, "chat")
    with pytest.raises(ModelError, match=r"out of order.*model\.template"):
        made("{{ raise_exception('out of order') }}")
    with pytest.raises(ModelError, match="drops the user message"):
        made("{{ 'Hello' }}")
    alternating = (
        "{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}" + CHATML
    )
    with pytest.raises(DataError, match="user, assistant, user: one turn"):
        made(alternating).text([ASKED, TOLD, ASKED])
    with pytest.raises(DataError, match="3 messages"):
        made(None, "Q: {question}").text([ASKED, TOLD, ASKED])


def test_chat_options_reach_the_chat_template() -> None:
    thinking = CHATML + "{% if quiet is defined and quiet %}<think></think>{% endif %}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = thinking
    for options, end in (({}, ""), ({"quiet": True}, "<think></think>"), ({"quiet": False}, "")):
        text = make_renderer(tokenizer, Template(chat_options=options)).text([ASKED])
        assert text == "<|user|>1+1?<eos><|assistant|>" + end
    with pytest.raises(ConfigError, match=r"chat_options\.loud"):
        make_renderer(tokenizer, Template(chat_options={"loud": 1}), "tiny")
    with pytest.raises(ConfigError, match=r"chat_options\.quie "):
        make_renderer(tokenizer, Template(chat_options={"quie": 1}))
    with pytest.raises(ConfigError, match=r"chat_options\.messages"):
        make_renderer(tokenizer, Template(chat_options={"messages": "none"}))
    with pytest.raises(ConfigError, match=r"chat_options\.quiet"):
        make_renderer(tokenizer, Template(form="plain", chat_options={"quiet": True}), "tiny")


def test_chat_options_come_from_the_configuration() -> None:
    config = load_config("arithmetic", ["model.chat_options.enable_thinking=false"])
    assert template_of(config).chat_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        CHECKPOINT.joinpath("chat_template.jinja").read_text(),
        "{% for m in messages %}\n  {% generation %}\n  {%- set seen = m.content %}{{ seen }}\n"
        "  {% endgeneration %}{{ seen }}|\n{% endfor %}\n",
        "{{ messages | tojson }} {{ tools | tojson(indent=2) }} {{ documents is none }}",
        "{{ messages[0] | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
        "{% break %}{% endfor %}",
        "{%- if tools is defined and not tools -%} none {%- endif -%} {{ bos_token }}",
        "{{ raise_exception('out of order') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_is_rendered_as_transformers_renders_it(template: str) -> None:
    messages = [{**ASKED, "content": "a < b, ä"}, TOLD]
    more: dict[str, Any] = {"bos_token": "<s>", "add_generation_prompt": True}
    try:
        (text,), _ = render_jinja_template([messages], chat_template=template, **more)
        expected = {"text": text}
    except jinja2.TemplateError as error:
        expected = {"error": str(error)}
    assert render({"messages": messages, "template": template, "arguments": more}) == expected


def test_the_date_in_a_template_is_fixed() -> None:
    assert made(DATED).text([ASKED]).startswith("26 Jul 2024<|user|>")


@pytest.mark.parametrize(("chat", "end"), [(CHATML, 1), (SILENT, None), (USERS, None)])
def test_the_end_of_turn_token_is_found(chat: str, end: int | None) -> None:
    assert made(chat).turn_end == end


def test_bos_is_added_where_no_chat_template_writes_it() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.chat_template = "<think>" + SILENT
    tokenizer.bos_token = "<think>"
    begin = tokenizer.bos_token_id
    plain = [make_renderer(tokenizer, Template(form=form)) for form in ("plain", "{question}")]
    chat = make_renderer(tokenizer, Template())
    asked = tokenizer.encode("1+1?", add_special_tokens=False)
    assert [list(r.tokens([ASKED])) for r in plain] == [asked, asked]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<think> $A", special_tokens=[("<think>", begin)]
    )
    assert [list(r.tokens([ASKED])) for r in plain] == [[begin, *asked]] * 2
    named = make_renderer(tokenizer, Template(form="<think>{question}"))
    for tokens in (named.tokens([ASKED]), chat.tokens([ASKED])):
        assert tokens.count(begin) == 1


PROMPT = Prompt(
    id="sum", task="arithmetic", target="55", messages=({"role": "user", "content": "47+8?"},)
)


@pytest.mark.parametrize("judged", [True, False])
def test_a_prefill_is_not_trained_and_scored_as_configured(judged: bool) -> None:
    template = Template(prefill="<think>", prefill_in_text=judged)
    model = load_language_model("embedded", device="cpu", template=template)
    plain = load_language_model("embedded", device="cpu")
    (opening,) = model.tokenizer.encode("<think>", add_special_tokens=False)
    seen: list[str] = []
    reward = make_reward("think_answer", {})
    scorer = make_scorer("think_answer", reward, workers=1, timeout=30.0, gigabytes=1.0)
    submit = scorer.submit

    class Watching:
        whole_groups, identity = scorer.whole_groups, scorer.identity

        def submit(self, job: Any) -> Any:
            seen.extend(job.texts)
            return submit(job)

    collector = Collector(engine=NativeEngine(model), model=model, scorer=Watching())
    sampling = Sampling(group_size=4, max_tokens=40)
    (group,) = collector.collect(encode_prompts(model, [PROMPT]), sampling=sampling, step=1).groups
    scorer.close()
    for rollout in group.rollouts:
        assert rollout.prompt_tokens == (*plain.encode(PROMPT.messages), opening)
        assert len(rollout.trained) == len(rollout.tokens)
        written = model.decode(rollout.tokens)
        assert rollout.text == ("<think>" if judged else "") + written
    assert sorted(seen) == sorted(r.text for r in group.rollouts)
    # The embedded model writes the tags that it was trained on; half of them break the format.
    formed = [r.parts["format"] for r in group.rollouts]
    assert max(formed) == (1.0 if judged else 0.0)


def test_a_folded_system_message_is_reported() -> None:
    model = load_language_model("embedded", device="cpu")
    folding = copy.copy(model)
    object.__setattr__(folding, "renderer", made(NO_SYSTEM))
    with_system = Prompt(id="s", task="t", target="", messages=(SYSTEM, ASKED))
    without = Prompt(id="s", task="t", target="", messages=(ASKED,))
    assert "does not support a system message" in prompt_notes(folding, [with_system])[0]
    assert prompt_notes(folding, [without]) == []
    assert prompt_notes(model, [with_system]) == []


def test_settings_in_the_docs_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    (tmp_path / "example.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    template = template_of(resolve(load_config(str(tmp_path / "example.toml"))))
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    text = make_renderer(tokenizer, template).text([SYSTEM, ASKED])
    opening = "Let me solve this step by step.\n<think>"
    assert text == f"Be brief.\nUser: 1+1?\nAssistant: {opening}"
    assert template.opening == opening


def test_an_invalid_template_is_found_before_loading() -> None:
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        resolve(load_config(None, ["model.template=plan", "model.path=nowhere"]))
