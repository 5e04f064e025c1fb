"""Tools: how a turn calls them, what goes wrong, and how three families' chat templates write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, PreTrainedTokenizerFast

import account
from chat_families import deepseek
from chat_families import tokenizer as families_tokenizer
from tba.chat_prompts import chat_markup
from tba.engines.stopping import find_stops
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.environments.engine import EpisodeEngine
from tba.environments.episode import Episode, EpisodeFailed, Observation
from tba.environments.guess_number import GuessNumber
from tba.environments.hosts import EpisodeLimits, Hosts
from tba.environments.task import EnvironmentTask
from tba.environments.tools import Call, bind_arguments, calls_in, schemas_of
from tba.environments.turn_encoding import TurnEncoder
from tba.errors import UserError
from tba.generation import generate
from tba.markup import FAMILY_MARKS
from tba.protocols import Environment
from tba.rollout.prompts import PromptSettings, encode
from tba.training.tiny_models import ScratchModel, train_bpe_tokenizer
from tba.types import Completion, Prompt, Sampling


class Account(account.Account):
    """An account, and what more its tools do to it."""

    async def history(self, order: Literal["old", "new"]) -> list[int]:
        """Tell the balances.

        Args:
            order: which first
        """
        return [self.balance, 0] if order == "new" else [0, self.balance]

    def fail(self) -> None:
        """Raise an error."""
        raise LookupError("nobody is there")

    def hoard(self) -> None:
        """Take all memory."""
        raise MemoryError

    def get_reward(self, answer: str | None) -> float:
        return self.balance if answer == str(self.balance) else -1.0

    def _hidden(self) -> None: ...


def qwen(*calls: object) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def deposit(**arguments: object) -> dict[str, object]:
    return {"name": "deposit", "arguments": arguments}


@pytest.mark.parametrize(
    "turn",
    [
        '<tool_call>\n{"name": "deposit", "arguments": {"amount": 3}}\n</tool_call>',  # Qwen
        'I put it in.\n<tool_call>{"name": "deposit", "arguments": {"amount": 3}}</tool_call>',
        '<tool_call>[{"name": "deposit", "arguments": {"amount": 3}}]</tool_call>',  # SmolLM2
        '<think>\n<tool_call>{"name": "fail"}</tool_call>?\n</think>\n\n<tool_call>'  # Qwen3
        '{"name": "deposit", "arguments": {"amount": 3}}',
        '{"name": "deposit", "parameters": {"amount": 3}}',  # Llama 3
        '<|python_tag|>{"name": "deposit", "parameters": {"amount": 3}}',
        '{"type": "function", "name": "deposit", "parameters": {"amount": 3}}',
        '{"type": "function", "function": {"name": "deposit", "arguments": {"amount": 3}}}',
        '{"arguments": {"amount": 3}, "name": "deposit"}',
        '<function=deposit>{"amount": 3}</function>',
        '{"name": "deposit", "arguments": "{\\"amount\\": 3}"}',
        '<tool_call>{"arguments": "{\\"amount\\": 3}", "name": "deposit"}</tool_call>',
        '[TOOL_CALLS] [{"name": "deposit", "arguments": {"amount": 3}}]',  # Mistral
        'Yes.[TOOL_CALLS]deposit[ARGS]{"amount": 3}',
        '<|tool_call|>[{"name": "deposit", "arguments": {"amount": 3}}]',  # Granite
        deepseek("<:tool calls begin:><:tool call begin:>function<:tool sep:>deposit\n")  # DeepSeek V3
        + '```json\n{"amount": 3}\n```'
        + deepseek("<:tool call end:><:tool calls end:>"),
        deepseek('<:tool calls begin:><:tool call begin:>deposit<:tool sep:>{"amount": 3}<:tool call end:>'),  # V3.1
    ],
)
def test_a_call_is_read_in_the_forms_of_the_families(turn: str) -> None:
    assert calls_in(turn) == [Call("deposit", {"amount": 3})]
    episode = Episode(Account, {}, seed=4, turns=3)
    assert episode.say(turn) == Observation("7 now", (("deposit", "7 now"),))


GLM = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
CODER = "<parameter={}>\n{}\n</parameter>\n"


@pytest.mark.parametrize(
    ("form", "pair"),
    [
        ("<tool_call>deposit\n{}</tool_call>", GLM),
        ("\n<think></think>\n<tool_call>deposit\n{}</tool_call>", GLM),
        ("<tool_call>\n<function=deposit>\n{}</function>\n</tool_call>", CODER),
        ("<function=deposit>\n{}</function>", CODER),
    ],
)
@pytest.mark.parametrize(
    ("amount", "note", "said"),
    [
        ("3", "rent", "7 now, rent"),
        ("3", "12", "7 now, 12"),  # a text, since its parameter takes one
        ("3", "null", "7 now, null"),
        ("3", '{"a": 1}', '7 now, {"a": 1}'),
        ("3", "one\n two", "7 now, one\n two"),
        ("three", "", "error: amount is 'three', it must be a whole number"),
        ("3.5", "", "error: amount is 3.5, it must be a whole number"),
    ],
)
def test_arguments_that_are_written_as_texts_are_read_by_their_parameters_types(
    form: str, pair: str, amount: str, note: str, said: str
) -> None:
    turn = form.format(pair.format("amount", amount) + pair.format("note", note))
    episode = Episode(Account, {}, seed=4, turns=3)
    told = episode.say(turn)
    assert told is not None
    assert told.results == (("deposit", said),)


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (bool, "true", True),
        (bool, "False", False),  # as Qwen3-Coder's template writes it
        (int | None, "None", None),
        (str | None, "null", None),
        (str, "True", "True"),
        (list[int], "[1, 2]", [1, 2]),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (float, "1", 1),
        (Literal["1", "2"], "2", "2"),
        (Any, "[1", "[1"),
        (Any, "4", 4),
    ],
)
def test_a_text_is_what_its_parameter_takes(hint: Any, text: str, value: Any) -> None:
    def tool(x: object) -> None: ...

    tool.__annotations__["x"] = hint
    assert bind_arguments({"tool": tool}, Call("tool", {"x": text}, has_texts=True)) == {"x": value}


CALLED = qwen(deposit(amount=3))


@pytest.mark.parametrize(
    "turn",
    [
        f"<think>\nI could {CALLED}",  # a thought without an end
        f"Well.<think>{CALLED}",
        f"<think>a</think><think>{CALLED}",
        f"[THINK]{CALLED}",
        f"{CALLED}</think>It is 4.",  # one that the prompt has begun
        f"[THINK]{CALLED}[/THINK]It is 4.",
    ],
)
def test_what_is_thought_is_not_executed(turn: str) -> None:
    assert calls_in(turn) == []
    episode = Episode(Account, {}, seed=4, turns=3)
    assert episode.say(turn) is None
    assert episode.judgement().parts == {"turns": 1.0, "wrong_calls": 0.0}


def test_a_call_before_a_thought_without_an_end_is_made() -> None:
    assert calls_in(f"{CALLED}<think>And now <tool_call>") == [Call("deposit", {"amount": 3})]


def test_several_calls_in_other_forms_are_made_in_order() -> None:
    two = [Call("deposit", {"amount": 1}), Call("fail", {})]
    assert calls_in('{"name": "deposit", "parameters": {"amount": 1}}; {"name": "fail", "parameters": {}}') == two
    assert calls_in('[TOOL_CALLS]deposit[ARGS]{"amount": 1}[TOOL_CALLS]fail[ARGS]{}') == two
    begin, sep, end = map(deepseek, ("<:tool call begin:>", "<:tool sep:>", "<:tool call end:>"))
    assert calls_in(f'{begin}deposit{sep}{{"amount": 1}}{end}{begin}fail{sep}{{}}{end}') == two
    named = '[TOOL_CALLS] [{"name": "deposit", "arguments": {"amount": 1}, "id": "abc123def"}]'
    told = Episode(Account, {}, seed=4, turns=3).say(named)
    assert told == Observation("5 now", (("deposit", "5 now"),), ("abc123def",))
    args = '[TOOL_CALLS]deposit[CALL_ID]abc123def[ARGS]{"amount": 1}'
    assert Episode(Account, {}, seed=4, turns=3).say(args) == told


def test_a_call_whose_name_the_template_refuses_is_answered_without_it() -> None:
    """Mistral's template wants nine letters; what a policy writes must not silence what its tools say."""
    made = families_tokenizer("mistral", "chat")
    encoder = TurnEncoder(made, True, schemas_of(Account()))

    def told(*calls: str) -> str:
        return made.decode(encoder.observation(Observation("2", (("deposit", "2"),), calls)), skip_special_tokens=False)

    assert '"call_id": "abc123def"' in told("abc123def")
    assert "2" in told("no")
    assert told("no") == told()


@pytest.mark.parametrize("family", ["mistral", "granite", "llama3"])
def test_marks_that_are_special_tokens_are_text_for_who_reads_a_turn(family: str) -> None:
    made = families_tokenizer(family, "chat")
    mark = {"mistral": "[TOOL_CALLS]", "granite": "<|tool_call|>", "llama3": "<|python_tag|>"}[family]
    tokens = made.encode(f'{mark}[{{"name": "deposit", "arguments": {{}}}}]{made.eos_token}', add_special_tokens=False)
    _, strings = find_stops((), made, GPT2Config(vocab_size=len(made)))
    text = strings.text(tokens)  # as the reward is given it
    assert mark in text
    assert made.eos_token not in text
    assert [c.name for c in calls_in(TurnEncoder(made, True, schemas_of(Account())).turn_text(tokens, text))] == [
        "deposit"
    ]
    assert TurnEncoder(made, True).turn_text(tokens) == text


def test_a_thought_that_the_prompt_has_begun_and_the_turn_does_not_end_is_a_thought() -> None:
    made = tokenizer(
        QWEN.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"), "<eos>"
    )
    encoder = TurnEncoder(made, True, schemas_of(Account()))

    def said(text: str) -> str:
        return encoder.turn_text(made.encode(text))

    assert calls_in(said(CALLED)) == []
    assert calls_in(said(f"Yes.</think>{CALLED}")) == [Call("deposit", {"amount": 3})]


@pytest.mark.parametrize(
    ("family", "kind", "by", "written"),
    [
        ("gemma3", "chat", "<end_of_turn>", "\n<start_of_turn>user\n"),
        ("gemma3", "chat", "<eos>", "\n<start_of_turn>user\n"),
        ("phi3", "chat", "<|end|>", "<|user|>"),  # whose tokens take the blanks behind them
        ("qwen2.5", "base", "<|im_end|>", "\n<|im_start|>user\n"),
        ("qwen2.5", "base", "<|endoftext|>", "\n<|im_start|>user\n"),
        ("glm4.5", "chat", "<|user|>", "\n"),
        ("glm4.5", "chat", "<|endoftext|>", "<|user|>\n"),  # else nobody would say who speaks
    ],
)
def test_a_turn_has_one_end_and_what_follows_it_is_what_the_template_writes(
    family: str, kind: str, by: str, written: str
) -> None:
    made = families_tokenizer(family, kind)
    token = made.convert_tokens_to_ids(by)
    heard = TurnEncoder(made, True).observation(Observation("It is"), end_token=token).tolist()
    assert made.decode(heard, skip_special_tokens=False).replace(" ", "").startswith(f"{written}Itis")


def test_several_calls_of_a_turn_are_made_in_order_and_each_has_its_own_result() -> None:
    episode = Episode(Account, {}, seed=4, turns=3)
    said = episode.say(qwen(deposit(amount=1, note="rent"), {"name": "history", "arguments": {"order": "new"}}))
    assert said is not None
    assert said.results == (("deposit", "5 now, rent"), ("history", "[5, 0]"))
    assert said.text == "5 now, rent\n[5, 0]"
    episode.close()


WRONG = {
    qwen({"name": "withdraw", "arguments": {}}): "there is no tool 'withdraw': the tools are deposit, history",
    qwen({"name": "_hidden", "arguments": {}}): "there is no tool '_hidden'",
    qwen({"name": "get_reward", "arguments": {}}): "there is no tool 'get_reward'",
    qwen(deposit()): "deposit lacks the argument amount",
    qwen(deposit(amount="3")): "amount is '3', it must be a whole number",
    qwen(deposit(amount=True)): "amount is True, it must be a whole number",
    qwen(deposit(amount=1, to="me")): "deposit has no argument 'to': it takes amount, note",
    qwen(deposit(amount=1, note="\ud800")): "note has characters that are none",
    qwen({"name": "history", "arguments": {"order": "odd"}}): "order is 'odd', it must be 'old' or 'new'",
    qwen({"name": "deposit", "arguments": [1]}): "the arguments of deposit are not an object",
    qwen({"arguments": {}}): 'a call is an object with a "name"',
    qwen(7): 'a call is an object with a "name"',
    "<tool_call>deposit(amount=3)</tool_call>": "the call cannot be read: it is not JSON",
    '{"name": "deposit", "parameters": {"amount": 3}': "the call cannot be read: it is not JSON",
    "<tool_call>" + "[" * 100_000: "the call cannot be read",
    qwen({"name": "fail", "arguments": {}}): "LookupError: nobody is there",
    '{"type": "function", "name": "deposit", "parameters": {"amount": 3}': "the call cannot be read: it is not JSON",
    '{"arguments": {"amount": 3}, "name": "deposit"': "the call cannot be read: it is not JSON",
    '{"name": "deposit", "arguments": "amount=3"}': "the arguments of deposit are not an object",
    '{"name": "deposit", "arguments": "[3]"}': "the arguments of deposit are not an object",
    "<|python_tag|>deposit.call(amount=3)": "the call cannot be read: it is not JSON",
    "[TOOL_CALLS]deposit(amount=3)": "the call cannot be read: it is not JSON",
    "[TOOL_CALLS]deposit[ARGS]{": "the arguments of deposit are not an object",
    "<tool_call>deposit\n<arg_key>amount</arg_key>": "the call cannot be read: it is not of arguments alone",
    "<tool_call><function=deposit><parameter=amount>3</function>": "the call cannot be read: it is not of arguments",
    "<tool_call>withdraw</tool_call>": "there is no tool 'withdraw'",
    "<tool_call>null</tool_call>": 'a call is an object with a "name"',
    deepseek("<:tool call begin:>deposit<:tool sep:>amount=3<:tool call end:>"): "the arguments of deposit are not",
    deepseek("<:tool call begin:>"): "there is no tool ''",
}


@pytest.mark.parametrize("turn", WRONG, ids=range(len(WRONG)))
def test_whatever_is_wrong_with_a_call_is_said_to_the_policy_and_ends_nothing(turn: str) -> None:
    episode = Episode(Account, {}, seed=4, turns=3)
    said = episode.say(turn)
    assert said is not None
    ((_, result),) = said.results
    assert result.startswith("error: " + WRONG[turn]), result
    assert not episode.is_over
    assert episode.say(qwen(deposit(amount=2))) == Observation("6 now", (("deposit", "6 now"),))
    assert episode.judgement().parts == {"turns": 2.0, "wrong_calls": float("LookupError" not in result)}


PIECES = [
    *FAMILY_MARKS,
    "<function=deposit>",
    "</function>",
    "<parameter=amount>",
    "</parameter>",
    "```json\n",
    "```",
    "[ARGS]",
]
PIECES += [
    "deposit",
    '{"name": "deposit", "arguments": ',
    '{"amount": 3}',
    "}",
    "[",
    "]",
    "\n",
    ";",
    " ",
    '"',
    "7",
    "\\",
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=14).map("".join))
def test_any_turn_is_calls_that_are_made_or_told_wrong_or_an_answer(turn: str) -> None:
    """The account holds what the calls that were made have put in, and nothing else happened."""
    episode = Episode(Account, {}, seed=4, turns=3)
    calls, said = calls_in(turn), episode.say(turn)
    if not calls:
        assert said is None
        return
    assert said is not None
    results = [result for _, result in said.results]
    assert len(results) == len(calls)
    wrong = sum(result.startswith("error: ") for result in results)
    assert episode.judgement().parts == {"turns": 1.0, "wrong_calls": float(wrong)}
    amounts = [c.arguments["amount"] for c, r in zip(calls, results, strict=True) if not r.startswith("error: ")]
    assert vars(episode)["_environment"].balance == 4 + sum(map(int, amounts))


def test_what_a_degenerate_model_says_is_read_in_time_that_grows_with_its_length() -> None:
    """Regular expressions that try all ways to split blanks would take hours for these."""
    begin, sep = map(deepseek, ("<:tool call begin:>", "<:tool sep:>"))
    blanks = "\n" * 200_000
    for turn in ("{}" + blanks + "x", f"{begin}a{sep}b{blanks}```json{blanks}c", f"[TOOL_CALLS]{blanks}a{blanks}b"):
        assert all(call.error or call.arguments == "" or isinstance(call.arguments, str) for call in calls_in(turn))
    for turn in (f"<tool_call>a<arg_key>{blanks}x", f"<tool_call><function=a>{blanks}<parameter=b>{blanks}x"):
        assert [call.error != "" for call in calls_in(turn)] == [True]


def test_a_tool_without_memory_fails_its_episode() -> None:
    with pytest.raises(EpisodeFailed, match="hoard"):
        Episode(Account, {}, seed=4, turns=3).say(qwen({"name": "hoard", "arguments": {}}))


@pytest.mark.parametrize("answer", ["4", "It is five.", "", '{"balance": 4}', "name: deposit"])
def test_a_turn_without_a_call_is_the_answer_and_the_last(answer: str) -> None:
    episode = Episode(Account, {}, seed=4, turns=3)
    assert episode.say(answer) is None
    assert episode.is_over
    assert episode.judgement().reward == (4 if answer == "4" else -1)
    cut_off = Episode(Account, {}, seed=4, turns=1)
    assert cut_off.say(qwen(deposit(amount=1))) is None
    assert cut_off.judgement().reward == -1


def test_tools_are_public_methods_and_one_that_cannot_be_described_is_refused() -> None:
    schemas = schemas_of(Account())
    assert [schema["function"]["name"] for schema in schemas] == ["deposit", "history", "fail", "hoard"]
    assert schemas[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "amount": {"type": "integer", "description": "how much"},
            "note": {"type": "string", "description": "what for"},
        },
        "required": ["amount"],
    }

    class Untyped(Account):
        def deposit(self, amount):
            """Put money in."""

    with pytest.raises(UserError, match=r"Untyped\.deposit cannot be described as a tool"):
        EnvironmentTask(Untyped, worlds=1, held_out=1, prompt=({"role": "user", "content": ""},)).problems("train")
    with pytest.raises(UserError, match=r"no step\(\) and no tools"):
        Episode(type("Nothing", (), {"reset": lambda self: None}), {}, 1, 1)


# What the templates of three families do that matters here, in as few words: where tools are described, and how what
# they give is written (Qwen: results together in one message of the user; Llama: by ipython, as JSON; SmolLM2: it knows
# no tools, and writes any role).
QWEN = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if loop.first and tools %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{{ m.content }}<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nA friend.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (  # a template that refuses what it does not know
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESULTS = Observation('2\n"a"', (("deposit", "2"), ("history", '"a"')))


def tokenizer(template: str, end: str) -> PreTrainedTokenizerFast:
    made = train_bpe_tokenizer(["what is said"], 300)
    made.add_special_tokens({"eos_token": end})
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "end", "written"),
    [
        (
            QWEN,
            "<|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n"
            '"a"\n</tool_response><|im_end|>\n<|im_start|>assistant\n',
        ),
        (
            LLAMA,
            "<|eot_id|>",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"\\"a\\""<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            SMOLLM2,
            "<|im_end|>",
            '\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n"a"<|im_end|>\n<|im_start|>assistant\n',
        ),
        (STRICT, "<end>", '<user>2\n"a"<end><assistant>'),
    ],
    ids=["qwen", "llama", "smollm2", "strict"],
)
def test_a_template_writes_tools_and_what_they_give(template: str, end: str, written: str) -> None:
    """After the end of a turn, which the policy has sampled, exactly what the template writes behind it."""
    tools, model = schemas_of(Account()), tokenizer(template, end)
    told = chat_markup(model, [{"role": "user", "content": "Go."}], tools)
    assert all(told.count(f'"name": "{name}"') == 1 for name in ("deposit", "history", "fail"))
    assert "how much" in told
    encoder = TurnEncoder(model, True, tools)
    assert model.decode(encoder.observation(RESULTS)) == written
    assert model.decode(encoder.observation(RESULTS, has_end=False)) == end + written


def test_without_a_chat_what_tools_give_follows_as_it_is() -> None:
    model = tokenizer(QWEN, "<|im_end|>")
    assert model.decode(TurnEncoder(model, False, schemas_of(Account())).observation(RESULTS)) == '2\n"a"'


def test_what_a_tokenizer_cannot_write_fails_the_episode_whose_tools_gave_it() -> None:
    class Picky:
        eos_token_id = None

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise KeyError(text)

        def decode(self, token_ids: object, *, skip_special_tokens: bool = False) -> str:
            return ""

    encoder = TurnEncoder(Picky(), chat=False)
    with pytest.raises(EpisodeFailed, match="cannot write"):
        encoder.observation(RESULTS)
    with pytest.raises(UserError, match="cannot write"):
        encoder.observation(Observation("2"))


@dataclass(frozen=True)
class Calling:
    environment: Callable[[], Environment] = Account
    turns: int = 3


@pytest.mark.parametrize(("template", "end"), [(QWEN, "<|im_end|>"), (SMOLLM2, "<|im_end|>")], ids=["qwen", "smollm2"])
def test_what_is_trained_is_what_was_sampled_and_results_are_masked(template: str, end: str) -> None:
    """A model without any training talks to tools: each turn is an answer, or a call that cannot be read."""
    model = tokenizer(template, end)
    made = EnvironmentTask(
        Account, "account", prompt=({"role": "user", "content": "Pay. "},), worlds=2, held_out=1, turns=3
    )
    problems = made.problems("train")
    prompts: list[Prompt] = encode(problems, made.name, model, PromptSettings(max_tokens=4096)).prompts
    assert all("deposit" in prompt.text and "There is" in prompt.text for prompt in prompts)
    model.add_tokens(["<tool_call>"])
    (call,) = model.encode("<tool_call>", add_special_tokens=False)
    network = ScratchModel(hidden_size=16, layers=1, heads=2, max_positions=4096).start(model)
    bias = torch.zeros(len(model))
    bias[call], bias[model.eos_token_id] = 5.0, 5.0
    network.lm_head.bias = torch.nn.Parameter(bias)
    settings = EngineSettings(slots=4, max_completion_tokens=400)
    engine = EpisodeEngine(
        TransformersEngine(network, model, settings), Calling(), TurnEncoder(model, True, problems[0].tools)
    )
    several = 0
    for row in generate(engine, prompts, 8, Sampling(), np.random.default_rng(0)):
        for completion in row:
            assert completion.judgement is not None
            assert completion.judgement.reward == -1
            if completion.mask is None:
                continue
            several += 1
            edges = np.flatnonzero(np.diff(completion.mask.astype(int))) + 1
            parts = np.split(completion.tokens, edges)
            heard = [model.decode(part) for part in parts[1::2]]
            assert all("error: the call cannot be read" in text or "error: there is no tool" in text for text in heard)
            again = [model.encode(text, add_special_tokens=False) for text in heard]
            assert [part.tolist() for part in parts[1::2]] == again
            assert all(call in part for part in parts[0:-1:2])
            assert completion.log_behavior is not None
            assert (completion.log_behavior[~completion.mask] == 0).all()
            assert (completion.log_behavior[completion.mask] < 0).all()
    assert several >= 4


def test_episodes_that_flow_in_processes_are_those_that_are_played_here_one_prompt_after_another() -> None:
    """With as many turns and the same draws; only who waits for whom differs."""
    model = tokenizer(QWEN, "<|im_end|>")
    network = ScratchModel(hidden_size=16, layers=1, heads=2, max_positions=4096).start(model)
    bias = torch.zeros(len(model))
    bias[model.eos_token_id] = 4.0
    network.lm_head.bias = torch.nn.Parameter(bias)
    made = EnvironmentTask(GuessNumber, "guess", turns=4, worlds=3, held_out=1)
    prompts = encode(made.problems("train"), made.name, model, PromptSettings()).prompts
    engine = TransformersEngine(network, model, EngineSettings(slots=5, max_completion_tokens=200))
    encoder = TurnEncoder(model, False)
    here = generate(EpisodeEngine(engine, made, encoder), prompts, 4, Sampling(), np.random.default_rng(0))
    worlds = Hosts(made, EpisodeLimits(3))
    flow = EpisodeEngine(engine, made, encoder, worlds).flow(4, Sampling(), np.random.default_rng(0))
    found: dict[int, list[Completion]] = {}
    submitted = 0
    while len(found) < 3:
        more = prompts[submitted : submitted + 1]
        submitted += len(more)
        flow.submit(more)
        found |= dict(flow.next(until_needed=submitted < 3))
    worlds.end()
    for i, row in enumerate(here):
        assert [c.tokens.tolist() for c in found[i]] == [c.tokens.tolist() for c in row]
        assert [c.judgement for c in found[i]] == [c.judgement for c in row]
        assert all(c.judgement is not None for c in row)
        for one, other in zip(found[i], row, strict=True):
            assert one.mask is not None
            assert other.mask is not None
            assert one.mask.tolist() == other.mask.tolist()
