"""Chat templates of five model families, as they are published, and tokenizers of their kind.

Branches that a conversation of texts never takes (images, calls apart from the text) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TOOLS = (
    "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are "
    'provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}'
    '{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}'
    '{{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and '
    "arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n'
)
_TOOL_RESULTS = """
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}"""
QWEN25 = (
    """{%- set usual = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{%- set system = messages[0].content if messages[0].role == 'system' else usual %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + system }}
    {{- "\\n\\n"""
    + _TOOLS
    + """" }}
{%- else %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ("user", "assistant") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"""
    + _TOOL_RESULTS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN3 = (
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- \""""
    + _TOOLS
    + """" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set text = message.content %}
    {%- set result = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
    {%- if ns.searching and message.role == "user" and not result %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set thought = thought.lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}"""
    + _TOOL_RESULTS
    + """{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
)
LLAMA3 = """{% for message in messages %}
{%- set text = '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' %}
{%- set text = text + message.content | trim + '<|eot_id|>' %}
{{- bos_token + text if loop.first else text }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
SMOLLM2 = """{% for message in messages %}
{%- if loop.first and message.role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat template with the control tokens of its vocabulary."""

    template: str
    special: tuple[str, ...]
    end: str
    """The token that ends a turn."""
    bos: str | None = None
    added: tuple[str, ...] = ()
    """Tokens that are added to the vocabulary, but not special."""
    options: dict[str, Any] = field(default_factory=dict)
    sentencepiece: bool = False


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS = ("<tool_call>", "</tool_call>")
_THINKING = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FAMILIES = {
    "qwen2.5": Family(template=QWEN25, special=_CHATML, end="<|im_end|>", added=_CALLS),
    "qwen3": Family(template=QWEN3, special=_CHATML, end="<|im_end|>", added=_CALLS + _THINKING),
    "llama3": Family(
        template=LLAMA3,
        special=("<|begin_of_text|>", "<|end_of_text|>", *_HEADERS),
        end="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "smollm2": Family(template=SMOLLM2, special=_CHATML, end="<|im_end|>"),
    "gemma": Family(
        template=GEMMA,
        special=("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
        bos="<bos>",
        added=("\n\n", "\n\n\n", "<b>", "</b>"),
        sentencepiece=True,
    ),
}


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """Return a tokenizer without merges, of bytes or of characters with bytes for all others."""
    tokenizer = _pieces(family.special) if family.sentencepiece else _bytes(family.special)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in family.special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=family.special[0],
        bos_token=family.bos,
        eos_token=family.end,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def _bytes(special: tuple[str, ...]) -> Tokenizer:
    vocabulary = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(special: tuple[str, ...]) -> Tokenizer:
    """Return a tokenizer in the style of SentencePiece."""
    shown = [chr(c) for c in range(33, 127)]
    vocabulary = [*special, "<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *shown]
    model = models.BPE(
        vocab={t: i for i, t in enumerate(vocabulary)}, merges=[], byte_fallback=True,
        unk_token="<unk>", fuse_unk=True,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
