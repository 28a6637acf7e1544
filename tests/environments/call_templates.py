"""Chat templates with the tool-call formats of published models, and tokenizers of their kind.

The texts around tools, turns and results are those of the published templates; system prompts and
branches that a conversation with tools never takes are left out.
"""

# ruff: noqa: RUF001 - DeepSeek's tokens are written with these signs

from __future__ import annotations

from tests.environments.chat_templates import Family

MISTRAL_V3 = """{%- set ns = namespace(index=0) %}
{%- for m in messages if m.role != 'tool' and not m.tool_calls %}
    {%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}
    {%- endif %}{%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == 0 %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_V11 = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == 0 %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- m.content }}
        {%- for call in m.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}
            {{- '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}{{- m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_V13 = MISTRAL_V11.replace("+ '[CALL_ID]' + call.id ", "").replace(
    "m.tool_call_id + '[TOOL_CONTENT]' + ", ""
)

GLM4 = """[gMASK]<sop>
{%- if tools %}{{ '<|system|>\\n# 可用工具' }}
    {%- for tool in tools %}
        {{- '\\n\\n## ' + tool.function.name + '\\n\\n' + tool.function | tojson }}
    {%- endfor %}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.metadata %}
        {{- '<|assistant|>' + m.metadata + '\\n' + m.content }}
    {%- elif m.role in ('user', 'assistant', 'system', 'observation') %}
        {{- '<|' + m.role + '|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"""

GLM45 = """[gMASK]<sop>
{%- if tools %}{{ '<|system|>\\n# Tools\\n\\n<tools>\\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{%- endfor %}
    {{- '</tools>\\n\\n<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n</tool_call>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>\\n<think></think>' }}
        {%- if m.content.strip() %}{{ '\\n' + m.content.strip() }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
                {{- (v if v is string else v | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"""

_DEEPSEEK = """{%- set ns = namespace(tool=false, first=true) %}
{{- bos_token }}
{%- if tools %}{{ tools | tojson }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.tool = false %}{{ '<｜User｜>' + m.content }}
    {%- elif m.tool_calls %}
        {%- set ns.tool = false %}
        {{- '<｜Assistant｜>' + m.content + '<｜tool▁calls▁begin｜>' }}
        {%- for call in m.tool_calls %}
            {{- CALL }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'assistant' %}
        {{- ('<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>') + m.content }}
        {{- '<｜end▁of▁sentence｜>' }}{%- set ns.tool = false %}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁outputs▁begin｜>' if ns.first else '' }}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.tool = true %}{%- set ns.first = false %}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{ '<｜Assistant｜>' }}{%- endif %}"""
DEEPSEEK_V3 = _DEEPSEEK.replace(
    "CALL }}",
    "('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + "
    "call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}",
)
DEEPSEEK_V31 = _DEEPSEEK.replace(
    "CALL }}",
    "'<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + "
    "'<｜tool▁call▁end｜>' }}",
)

GPT_OSS = """{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}{{ 'type ' + tool.function.name + ' = (_: any) => any;' }}{%- endfor %}
    {{- '\\n}<|end|>' }}
{%- endif %}
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and '<|channel|>' in m.content %}
        {{- raise_exception('You have passed a message containing <|channel|> tags') }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {%- set ns.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
        {%- set ns.name = none %}
    {%- elif m.role == 'tool' %}
        {%- if ns.name is none %}{{ raise_exception('no tool call before') }}{%- endif %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"""

QWEN3_CODER = """{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\n<tool_call>\\n<function=example_function_name>\\n</function>\\n' }}
    {{- '</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<parameter=' + k + '>\\n' }}
                {{- v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]",
)  # fmt: skip
_GLM = (
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
_GLM_CALLS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<think>", "</think>",
)  # fmt: skip
_DEEPSEEK_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_DEEPSEEK_ADDED = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_HARMONY = (
    "<|endoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>",
    "<|end|>", "<|call|>",
)  # fmt: skip


def _mistral(template: str) -> Family:
    return Family(template=template, special=_MISTRAL, end="</s>", bos="<s>", sentencepiece=True)


def _deepseek(template: str) -> Family:
    return Family(
        template=template, special=_DEEPSEEK_SPECIAL, end="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>", added=_DEEPSEEK_ADDED,
    )  # fmt: skip


CALLING = {
    "mistral_v3": _mistral(MISTRAL_V3),
    "mistral_v11": _mistral(MISTRAL_V11),
    "mistral_v13": _mistral(MISTRAL_V13),
    "glm4": Family(template=GLM4, special=_GLM, end="<|observation|>"),
    "glm45": Family(template=GLM45, special=_GLM, end="<|observation|>", added=_GLM_CALLS),
    "deepseek_v3": _deepseek(DEEPSEEK_V3),
    "deepseek_v31": _deepseek(DEEPSEEK_V31),
    "gpt_oss": Family(template=GPT_OSS, special=_HARMONY, end="<|call|>"),
    "qwen3_coder": Family(
        template=QWEN3_CODER,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
        added=("<tool_call>", "</tool_call>"),
    ),
}
"""The families, by the format of their calls; `end` is the token that ends a turn with a call."""
