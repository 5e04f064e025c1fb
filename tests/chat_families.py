r"""Chat templates of fifteen families of models, each with tokenizers of its kind, base and chat.

They write what the families' own templates write (as their model cards and tokenizers publish it), in as few words:
where system messages and tools stand, how calls and what tools give are written, what ends a turn. Descriptions are
shortened. The tokenizers are small, with the families' own special tokens; `blank` puts a blank before a text, as those
of SentencePiece do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tba.types import Json


@dataclass(frozen=True)
class Family:
    """One family: its template, the tokens that have a meaning, and what is right about its turns."""

    template: str
    end: str  # of an answer
    base: str  # the end-of-text token of the base model's tokenizer
    chat: str  # and of the chat model's
    special: tuple[str, ...]  # the tokens that no decoded text shows
    shown: tuple[str, ...] = ()  # those that it does
    begins: str | None = None  # the beginning of a text
    calls: bool = True  # the template writes `tool_calls`; else a call is what our description asks for
    role: str = "tool"  # who says what tools give
    called: str = ""  # what ends a turn that calls tools; empty: `end`
    gap: str = ""  # before the end
    opening: Mapping[str, str] = field(default_factory=dict)  # before an answer, by what follows: last, heard, called
    blank: bool = False
    eats: bool = False  # the special tokens take the blanks behind them


def lines(*parts: str) -> str:
    """Joins the statements of a template, between which nothing is written."""
    return "".join("{%- " + p[1:] + " -%}" if p.startswith("%") else "{{- " + p + " -}}" for p in parts)


def deepseek(text: str) -> str:
    """Returns a text with DeepSeek's marks, which are written as `<:name:>` here."""
    return re.sub("<:(.*?):>", lambda mark: f"<\uff5c{mark[1]}\uff5c>".replace(" ", "\u2581"), text)


NEW = r"'\n'"
CHATML_HEAD = (r"'<|im_start|>' + m.role + '\n'",)
GENERATE = ("%if add_generation_prompt", r"'<|im_start|>assistant\n'", "%endif")
ONE_CALL = (
    r"""'<tool_call>\n{"name": "' + c.function.name""",
    r"""'", "arguments": ' + c.function.arguments | tojson + '}\n</tool_call>'""",
)
JSON_CALL = (
    "%for c in m.tool_calls",
    NEW,
    *ONE_CALL,
    "%endfor",
)
RESPONSES = (  # what tools give, together in one message of the user
    "%if loop.first or messages[loop.index0 - 1].role != 'tool'",
    "'<|im_start|>user'",
    "%endif",
    r"'\n<tool_response>\n' + m.content + '\n</tool_response>'",
    "%if loop.last or messages[loop.index0 + 1].role != 'tool'",
    r"'<|im_end|>\n'",
    "%endif",
)
TOOLS = (
    "%if tools",
    "'<|im_start|>system\n'",
    "%if messages[0].role == 'system'",
    r"messages[0].content + '\n\n'",
    "%endif",
    "'# Tools\n\n<tools>'",
    "%for tool in tools",
    r"'\n' + tool | tojson",
    "%endfor",
    r"'\n</tools><|im_end|>\n'",
    "%elif messages[0].role == 'system'",
    r"'<|im_start|>system\n' + messages[0].content + '<|im_end|>\n'",
    "%endif",
)

QWEN2 = lines(
    *TOOLS,
    "%for m in messages",
    "%if m.role == 'tool'",
    *RESPONSES,
    "%elif m.role == 'assistant' and m.tool_calls",
    "'<|im_start|>assistant'",
    "%if m.content",
    r"'\n' + m.content",
    "%endif",
    *JSON_CALL,
    r"'<|im_end|>\n'",
    "%elif m.role != 'system' or not loop.first",
    *CHATML_HEAD,
    r"m.content + '<|im_end|>\n'",
    "%endif",
    "%endfor",
    *GENERATE,
)
QWEN3 = lines(  # thoughts stay behind the last question alone, and the last answer always has some
    *TOOLS,
    "%set ns = namespace(asked=0)",
    "%for m in messages",
    "%if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>'))",
    "%set ns.asked = loop.index0",
    "%endif",
    "%endfor",
    "%for m in messages",
    "%if m.role == 'tool'",
    *RESPONSES,
    "%elif m.role == 'assistant'",
    "%set content = m.content or ''",
    "%set thought = ''",
    "%if '</think>' in content",
    r"%set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n')",
    r"%set content = content.split('</think>')[-1].lstrip('\n')",
    "%endif",
    r"'<|im_start|>assistant\n'",
    "%if loop.index0 > ns.asked and (loop.last or thought)",
    r"'<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n')",
    "%else",
    "content",
    "%endif",
    "%for c in m.tool_calls or []",
    "%if not loop.first or content",
    NEW,
    "%endif",
    *ONE_CALL,
    "%endfor",
    r"'<|im_end|>\n'",
    "%elif m.role != 'system' or not loop.first",
    *CHATML_HEAD,
    r"m.content + '<|im_end|>\n'",
    "%endif",
    "%endfor",
    "%if add_generation_prompt",
    r"'<|im_start|>assistant\n'",
    "%if enable_thinking is defined and enable_thinking is false",
    r"'<think>\n\n</think>\n\n'",
    "%elif begun_thought is defined",  # as in the models that always think
    r"'<think>\n'",
    "%endif",
    "%endif",
)
QWEN3_CODER = lines(  # arguments one by one, as texts
    *TOOLS,
    "%for m in messages",
    "%if m.role == 'tool'",
    "%if loop.first or messages[loop.index0 - 1].role != 'tool'",
    r"'<|im_start|>user\n'",
    "%endif",
    r"'<tool_response>\n' + m.content + '\n</tool_response>\n'",
    "%if loop.last or messages[loop.index0 + 1].role != 'tool'",
    r"'<|im_end|>\n'",
    "%endif",
    "%elif m.role == 'assistant' and m.tool_calls",
    "'<|im_start|>assistant'",
    "%if m.content",
    r"'\n' + m.content | trim + '\n'",
    "%endif",
    "%for c in m.tool_calls",
    r"'\n<tool_call>\n<function=' + c.function.name + '>\n'",
    "%for name, value in c.function.arguments | items",
    r"'<parameter=' + name + '>\n'",
    "value | tojson if value is mapping or (value is sequence and value is not string) else value | string",
    r"'\n</parameter>\n'",
    "%endfor",
    r"'</function>\n</tool_call>'",
    "%endfor",
    r"'<|im_end|>\n'",
    "%elif m.role != 'system' or not loop.first",
    *CHATML_HEAD,
    r"m.content + '<|im_end|>\n'",
    "%endif",
    "%endfor",
    *GENERATE,
)
LLAMA3 = lines(  # a single call is a whole turn; tools stand in the first message of the user
    "bos_token",
    r"'<|start_header_id|>system<|end_header_id|>\n\n'",
    "%if messages[0].role == 'system'",
    "messages[0].content | trim",
    "%endif",
    "'<|eot_id|>'",
    "%set ns = namespace(told=not tools)",
    "%for m in messages",
    "%if m.role == 'tool'",
    r"'<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>'",
    "%elif m.tool_calls",
    "%if m.tool_calls | length != 1",
    "raise_exception('one call at a time')",
    "%endif",
    "%set c = m.tool_calls[0].function",
    r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
    """'{"name": "' + c.name + '", "parameters": ' + c.arguments | tojson + '}<|eot_id|>'""",
    "%elif m.role != 'system'",
    r"'<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'",
    "%if m.role == 'user' and not ns.told",
    "%set ns.told = true",
    "%for tool in tools",
    r"tool | tojson(indent=4) + '\n\n'",
    "%endfor",
    "%endif",
    "m.content | trim + '<|eot_id|>'",
    "%endif",
    "%endfor",
    "%if add_generation_prompt",
    r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
    "%endif",
)
GEMMA3 = lines(  # no tools, no system: that stands before the first message
    "bos_token",
    "%set first = ''",
    "%set said = messages",
    "%if messages[0].role == 'system'",
    r"%set first = messages[0].content + '\n\n'",
    "%set said = messages[1:]",
    "%endif",
    "%for m in said",
    "%if (m.role == 'user') != (loop.index0 % 2 == 0)",
    "raise_exception('roles must alternate')",
    "%endif",
    r"'<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '')",
    r"m.content | trim + '<end_of_turn>\n'",
    "%endfor",
    "%if add_generation_prompt",
    r"'<start_of_turn>model\n'",
    "%endif",
)
PHI3 = lines(
    "%for m in messages",
    "%if m.role in ('system', 'user', 'assistant')",
    r"'<|' + m.role + '|>\n' + m.content + '<|end|>\n'",
    "%endif",
    "%endfor",
    r"'<|assistant|>\n' if add_generation_prompt else eos_token",
)
MISTRAL_TOOLS = (
    "%if tools and loop.index0 == ns.asked",
    "'[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]'",
    "%endif",
)
ASKED = (  # where the last message of the user is
    "%set ns = namespace(asked=0, turn=0)",
    "%for m in messages",
    "%if m.role == 'user'",
    "%set ns.asked = loop.index0",
    "%endif",
    "%endfor",
)
MISTRAL = lines(  # of 7B v0.3: tools before the last question, calls as a list, and each has a name of nine letters
    "bos_token",
    *ASKED,
    "%for m in messages",
    "%if m.role in ('user', 'assistant') and not m.tool_calls",
    "%if (m.role == 'user') != (ns.turn % 2 == 0)",
    "raise_exception('roles must alternate')",
    "%endif",
    "%set ns.turn = ns.turn + 1",
    "%endif",
    "%if m.role == 'user'",
    *MISTRAL_TOOLS,
    "'[INST] ' + m.content + '[/INST]'",
    "%elif m.tool_calls",
    "'[TOOL_CALLS] ['",
    "%for c in m.tool_calls",
    "%if c.id is not defined or c.id | length != 9",
    "raise_exception('ids have nine letters')",
    "%endif",
    """'{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson""",
    """', "id": "' + c.id + '"}' + (']' if loop.last else ', ')""",
    "%endfor",
    "eos_token",
    "%elif m.role == 'assistant'",
    "' ' + m.content | trim + eos_token",
    "%elif m.role == 'tool'",
    "%if m.tool_call_id is not defined or m.tool_call_id | length != 9",
    "raise_exception('ids have nine letters')",
    "%endif",
    """'[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]'""",
    "%endif",
    "%endfor",
)
MISTRAL_ARGS = lines(  # of the versions with [ARGS]
    "bos_token",
    *ASKED,
    "%for m in messages",
    "%if m.role == 'user'",
    *MISTRAL_TOOLS,
    "'[INST]' + m.content + '[/INST]'",
    "%elif m.role == 'assistant'",
    "m.content or ''",
    "%for c in m.tool_calls or []",
    "'[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson",
    "%endfor",
    "eos_token",
    "%elif m.role == 'tool'",
    "'[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]'",
    "%elif m.role == 'system'",
    "'[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]'",
    "%endif",
    "%endfor",
)
SMOLLM2 = lines(  # it knows no tools, and writes any role
    "%for m in messages",
    "%if loop.first and m.role != 'system'",
    r"'<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n'",
    "%endif",
    *CHATML_HEAD,
    r"m.content + '<|im_end|>\n'",
    "%endfor",
    *GENERATE,
)
DEEPSEEK_HEAD = (
    "bos_token",
    "%for m in messages",
    "%if m.role == 'system'",
    "m.content",
    "%endif",
    "%endfor",
    "%set ns = namespace(tool=false)",
    "%for m in messages",
    "%if m.role == 'user'",
    "%set ns.tool = false",
    "'<:User:>' + m.content",
    "%elif m.role == 'assistant'",
)
DEEPSEEK3 = deepseek(
    lines(  # calls between marks of their own; behind what tools give the answer begins without a header
        *DEEPSEEK_HEAD,
        "'<:tool outputs end:>' if ns.tool else '<:Assistant:>'",
        "%set ns.tool = false",
        "m.content or ''",
        "%for c in m.tool_calls or []",
        "%if loop.first",
        "'<:tool calls begin:>'",
        "%else",
        NEW,
        "%endif",
        r"'<:tool call begin:>' + c.type + '<:tool sep:>' + c.function.name + '\n```json\n'",
        r"c.function.arguments | tojson + '\n```<:tool call end:>'",
        "%if loop.last",
        "'<:tool calls end:>'",
        "%endif",
        "%endfor",
        "'<:end of sentence:>'",
        "%elif m.role == 'tool'",
        r"'\n' if ns.tool else '<:tool outputs begin:>'",
        "'<:tool output begin:>' + m.content + '<:tool output end:>'",
        "%set ns.tool = true",
        "%endif",
        "%endfor",
        "%if ns.tool",
        "'<:tool outputs end:>'",
        "%elif add_generation_prompt",
        "'<:Assistant:>'",
        "%endif",
    )
)
DEEPSEEK31 = deepseek(
    lines(  # each answer is opened by the end of no thought
        *DEEPSEEK_HEAD,
        "%if not ns.tool",
        "'<:Assistant:></think>'",
        "%endif",
        "%set ns.tool = false",
        "m.content or ''",
        "%for c in m.tool_calls or []",
        "%if loop.first",
        "'<:tool calls begin:>'",
        "%endif",
        "'<:tool call begin:>' + c.function.name + '<:tool sep:>'",
        "c.function.arguments | tojson + '<:tool call end:>'",
        "%if loop.last",
        "'<:tool calls end:>'",
        "%endif",
        "%endfor",
        "'<:end of sentence:>'",
        "%elif m.role == 'tool'",
        "%set ns.tool = true",
        "'<:tool output begin:>' + m.content + '<:tool output end:>'",
        "%endif",
        "%endfor",
        "%if add_generation_prompt and not ns.tool",
        "'<:Assistant:></think>'",
        "%endif",
    )
)
GLM4 = lines(  # of 4.5: no token ends a turn; who speaks next does
    "'[gMASK]<sop>'",
    "%if tools",
    r"'<|system|>\n# Tools\n\n<tools>\n'",
    "%for tool in tools",
    r"tool | tojson + '\n'",
    "%endfor",
    "'</tools>'",
    "%endif",
    "%for m in messages",
    "%if m.role == 'user'",
    r"'<|user|>\n' + m.content",
    "%elif m.role == 'assistant'",
    "%set content = m.content or ''",
    "%set thought = ''",
    "%if '</think>' in content",
    "%set thought = content.split('</think>')[0].split('<think>')[-1].strip()",
    r"%set content = content.split('</think>')[-1].lstrip('\n')",
    "%endif",
    r"'<|assistant|>\n<think>' + thought + '</think>'",
    "%if content.strip()",
    r"'\n' + content.strip()",
    "%endif",
    "%for c in m.tool_calls or []",
    r"'\n<tool_call>' + c.function.name + '\n'",
    "%for name, value in c.function.arguments | items",
    r"'<arg_key>' + name + '</arg_key>\n<arg_value>'",
    r"(value if value is string else value | tojson) + '</arg_value>\n'",
    "%endfor",
    "'</tool_call>'",
    "%endfor",
    "%elif m.role == 'tool'",
    "%if loop.first or messages[loop.index0 - 1].role != 'tool'",
    "'<|observation|>'",
    "%endif",
    r"'\n<tool_response>\n' + m.content + '\n</tool_response>'",
    "%elif m.role == 'system'",
    r"'<|system|>\n' + m.content",
    "%endif",
    "%endfor",
    "%if add_generation_prompt",
    "'<|assistant|>'",
    "%endif",
)
ZEPHYR = lines(  # headers are plain text
    "%for m in messages",
    "%if m.role in ('system', 'user', 'assistant')",
    r"'<|' + m.role + '|>\n' + m.content + eos_token + '\n'",
    "%endif",
    "%if loop.last and add_generation_prompt",
    r"'<|assistant|>\n'",
    "%endif",
    "%endfor",
)
OLMO2 = lines(
    "bos_token",
    "%for m in messages",
    "%if m.role in ('system', 'user')",
    r"'<|' + m.role + '|>\n' + m.content + '\n'",
    "%elif m.role == 'assistant'",
    r"'<|assistant|>\n' + m.content + eos_token + ('' if loop.last else '\n')",
    "%endif",
    "%if loop.last and add_generation_prompt",
    r"'<|assistant|>\n'",
    "%endif",
    "%endfor",
)
LLAMA2 = lines(  # blanks around an answer
    "%set first = ''",
    "%set said = messages",
    "%if messages[0].role == 'system'",
    r"%set first = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n'",
    "%set said = messages[1:]",
    "%endif",
    "%for m in said",
    "%if (m.role == 'user') != (loop.index0 % 2 == 0)",
    "raise_exception('roles must alternate')",
    "%endif",
    "%if m.role == 'user'",
    "bos_token + '[INST] ' + (first if loop.first else '') + m.content | trim + ' [/INST]'",
    "%else",
    "' ' + m.content | trim + ' ' + eos_token",
    "%endif",
    "%endfor",
)
GRANITE = lines(
    "%if messages[0].role == 'system'",
    "%set first = messages[0].content",
    "%set said = messages[1:]",
    "%else",
    "%set first = 'You are Granite.'",
    "%set said = messages",
    "%endif",
    r"'<|start_of_role|>system<|end_of_role|>' + first + '<|end_of_text|>\n'",
    "%if tools",
    r"'<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\n'",
    "%endif",
    "%for m in said",
    "'<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' + (m.content or '')",
    "%for c in m.tool_calls or []",
    "%if loop.first",
    "'<|tool_call|>['",
    "%endif",
    """'{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}'""",
    "']' if loop.last else ', '",
    "%endfor",
    r"'<|end_of_text|>\n'",
    "%endfor",
    "%if add_generation_prompt",
    "'<|start_of_role|>assistant<|end_of_role|>'",
    "%endif",
)

_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
_DEEPSEEK = (
    *("<think>", "</think>"),
    *(
        deepseek(f"<:{name}:>")
        for name in (
            *("User", "Assistant", "tool calls begin", "tool calls end", "tool call begin", "tool call end"),
            *("tool outputs begin", "tool outputs end", "tool output begin", "tool output end", "tool sep"),
        )
    ),
)
_EOS, _BOS = deepseek("<:end of sentence:>"), deepseek("<:begin of sentence:>")
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
)
_PHI = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_SHOWN = (*_QWEN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_THOUGHT = "\n<think></think>\n"
_GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_SPM = ("<s>", "</s>")

FAMILIES = {
    "qwen2.5": Family(QWEN2, "<|im_end|>", "<|endoftext|>", "<|im_end|>", _IM, _QWEN),
    "qwen3": Family(
        *(QWEN3, "<|im_end|>", "<|endoftext|>", "<|im_end|>", _IM, _QWEN),
        opening={"last": "<think>\n\n</think>\n\n"},
    ),
    "qwen3-coder": Family(QWEN3_CODER, "<|im_end|>", "<|endoftext|>", "<|im_end|>", _IM, _QWEN),
    "llama3": Family(
        *(LLAMA3, "<|eot_id|>", "<|end_of_text|>", "<|eot_id|>", (*_LLAMA, "<|python_tag|>")),
        begins="<|begin_of_text|>",
    ),
    "gemma3": Family(
        *(GEMMA3, "<end_of_turn>", "<eos>", "<eos>", ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")),
        begins="<bos>",
        calls=False,
        role="user",
    ),
    "phi3": Family(
        *(PHI3, "<|end|>", "<|endoftext|>", "<|endoftext|>", _PHI),
        calls=False,
        role="user",
        blank=True,
        eats=True,
    ),
    "mistral": Family(
        *(MISTRAL, "</s>", "</s>", "</s>", _MISTRAL),
        begins="<s>",
        opening={"last": " ", "heard": " ", "called": " "},
        blank=True,
    ),
    "mistral-args": Family(MISTRAL_ARGS, "</s>", "</s>", "</s>", _MISTRAL, begins="<s>"),
    "smollm2": Family(SMOLLM2, "<|im_end|>", "<|endoftext|>", "<|im_end|>", _IM, calls=False),
    "deepseek3": Family(DEEPSEEK3, _EOS, _EOS, _EOS, (_EOS, _BOS), _DEEPSEEK, begins=_BOS),
    "deepseek3.1": Family(DEEPSEEK31, _EOS, _EOS, _EOS, (_EOS, _BOS), _DEEPSEEK, begins=_BOS),
    "glm4.5": Family(
        *(GLM4, "<|user|>", "<|endoftext|>", "<|endoftext|>", _GLM, _GLM_SHOWN),
        called="<|observation|>",
        opening={"last": _THOUGHT, "heard": _THOUGHT, "called": _THOUGHT},
    ),
    "zephyr": Family(ZEPHYR, "</s>", "</s>", "</s>", _SPM, calls=False, role="user", blank=True),
    "olmo2": Family(
        *(OLMO2, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>", ("<|endoftext|>",)),
        begins="<|endoftext|>",
        calls=False,
        role="user",
    ),
    "llama2": Family(
        *(LLAMA2, "</s>", "</s>", "</s>", _SPM),
        begins="<s>",
        calls=False,
        role="user",
        gap=" ",
        opening={"last": " ", "heard": " "},
        blank=True,
    ),
    "granite": Family(GRANITE, "<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>", _GRANITE),
}

_TEXTS = (
    '{"name": "deposit", "arguments": {"amount": 3, "note": "rent"}} assistant user system tool There is in it. ',
    "<function=deposit> <parameter=amount> </parameter> </function> ```json the new now balance\n\n",
)


@cache
def tokenizer(name: str, kind: str) -> PreTrainedTokenizerFast:
    """Returns a family's tokenizer: of its "base" model or of its "chat" model, both with its template."""
    family = FAMILIES[name]
    model = _blank() if family.blank else _bytes()
    eos = family.base if kind == "base" else family.chat
    made = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=eos, bos_token=family.begins, clean_up_tokenization_spaces=False
    )
    made.add_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=family.eats) for text in family.special],
        special_tokens=True,
    )
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.shown])
    made.chat_template = family.template
    return made


def _bytes() -> Tokenizer:
    made = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # about as Llama 3's
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        _TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def _blank() -> Tokenizer:
    """A blank before each text, and before each part of it that stands behind a special token."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [chr(i) for i in range(32, 127)] + ["\n", "\u2581", "\u2039", "\u203a"]
    made.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False),
    )
    return made


def call(identity: str, name: str, arguments: Json) -> Json:
    """Returns a message of the assistant's that calls a tool."""
    asked = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [asked]}
