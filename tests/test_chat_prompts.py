"""Prompts as chat templates write them: what a template does not take, its arguments, its errors, and its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tba import chat_prompts, templates
from tba.chat_prompts import chat_markup, prompt_tokens, with_arguments
from tba.errors import UserError
from tba.models.warm_start import demonstration_pairs
from tba.rollout.prompts import PromptSettings, encode
from tba.training.tiny_models import character_tokenizer
from tba.types import Problem


def test_what_a_chat_template_raises_is_one_sentence() -> None:
    tokenizer: PreTrainedTokenizerBase = character_tokenizer("ab")
    for template in ("{{ 1 // 0 }}", "{% for", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}{{ x.y.z }}"):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match="the tokenizer's chat template cannot write prompts"):
            chat_markup(tokenizer, [{"role": "user", "content": "a"}])


GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
FORGETFUL = "{% for m in messages if m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Why?"}


def with_template(template: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = character_tokenizer("ab")
    tokenizer.chat_template, tokenizer.bos_token = template, "<bos>"
    return tokenizer


def test_a_system_message_that_a_template_does_not_take_begins_the_first_of_the_user_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat_prompts._warn_of_moved_system_message.cache_clear()
    gemma, turn = with_template(GEMMA_2), "<start_of_turn>{}\n{}<end_of_turn>\n".format
    answered = {"role": "assistant", "content": "So."}
    begun = "<bos>" + turn("user", "Be brief.\n\nWhy?")
    assert chat_markup(gemma, [SYSTEM, USER]) == begun + "<start_of_turn>model\n"
    assert chat_markup(gemma, [SYSTEM, USER, answered, USER]).startswith(
        begun + turn("assistant", "So.") + turn("user", "Why?")
    )
    assert chat_markup(gemma, [SYSTEM]) == "<bos>" + turn("user", "Be brief.") + "<start_of_turn>model\n"
    assert chat_markup(gemma, [USER]) == gemma.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert chat_markup(gemma, [{**SYSTEM, "content": " "}, USER]) == chat_markup(gemma, [USER])
    assert chat_markup(with_template(FORGETFUL), [SYSTEM, USER]) == "<user>Be brief.\n\nWhy?"
    assert "Be brief.\n\n" in chat_markup(gemma, [SYSTEM, USER], [{"name": "look_up"}])
    assert "look_up" in chat_markup(gemma, [SYSTEM, USER], [{"name": "look_up"}])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "takes no system message" in caplog.text
    with pytest.raises(UserError, match="Conversation roles must alternate"):
        chat_markup(gemma, [SYSTEM, USER, USER])


def test_a_template_that_takes_a_system_message_is_given_it_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    chatml = with_template(CHATML)
    for messages in ([SYSTEM, USER], [{"role": "system", "content": ""}, USER], [USER]):
        assert chat_markup(chatml, messages) == chatml.apply_chat_template(messages, tokenize=False)
    assert not caplog.records


QWEN_3 = (
    "\n{% macro begin() %}{% if enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{% endif %}{% endmacro %}{{ note }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{{ begin() }}"
    "{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}{% endif %}"
)


def test_template_arguments_are_what_transformers_is_given_by_name_and_are_saved_with_the_tokenizer(
    tmp_path: Path,
) -> None:
    plain, words = with_template(QWEN_3), 'it\'s "so"\n\u00df'
    given = [f"note={json.dumps(words)}", "enable_thinking=false"]
    right = plain.apply_chat_template(
        [USER], tokenize=False, add_generation_prompt=True, enable_thinking=False, note=words
    )
    own = with_arguments(with_template(QWEN_3), given)
    assert chat_markup(own, [USER]) == right == f"\n{words}Why?[a]<think></think><no>"
    own.save_pretrained(tmp_path)
    again = with_arguments(AutoTokenizer.from_pretrained(tmp_path), given)
    assert chat_markup(again, [USER]) == right
    assert again.chat_template == own.chat_template
    assert chat_markup(with_arguments(again, ["enable_thinking=true"]), [USER]) == f"\n{words}Why?[a]"
    for value, written in (("null", "None"), ("2", "2"), ("[1,true]", "[1, True]"), ("free text", "free text")):
        assert chat_markup(with_arguments(with_template(QWEN_3), [f"note={value}"]), [USER]) == f"\n{written}Why?[a]"


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("enable_thinking", "give name=value"),
        ("a b=1", "give name=value"),
        ("thinking=false", "the model's chat template does not read thinking"),
    ],
)
def test_an_argument_that_would_change_nothing_is_refused(argument: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        with_arguments(with_template(QWEN_3), [argument])
    with pytest.raises(UserError, match="a tokenizer with one chat template"):
        with_arguments(character_tokenizer("ab"), [argument])


@pytest.mark.parametrize("after", [False, True], ids=["begins", "begins and ends"])
def test_a_prompt_begins_as_the_tokenizer_begins_texts_and_does_not_end_as_they_do(after: bool) -> None:
    """Llama's tokenizers put a token before a text, some one after it; a chat's template has its own."""
    tokenizer: Any = character_tokenizer("ab")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin, end = ("<s>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)
    single = "<s> $A <eos>" if after else "<s> $A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[begin, end])
    a = tokenizer.convert_tokens_to_ids("a")
    assert tokenizer("aa")["input_ids"] == [begin[1], a, a, *([end[1]] if after else [])]
    assert prompt_tokens(tokenizer, ["aa", "<s>aa"]) == [[begin[1], a, a]] * 2
    assert prompt_tokens(tokenizer, ["aa", "<s>aa"], chat=True) == [[a, a], [begin[1], a, a]]
    chat = ({"role": "user", "content": "a"},)
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    problems = [Problem("ab", demonstration="a"), Problem(chat, demonstration="a"), Problem("a", demonstration="b")]
    cut = encode([Problem("aab")], "t", tokenizer, PromptSettings(max_tokens=3, when_too_long="truncate_left"))
    assert [prompt.tokens.tolist() for prompt in cut.prompts] == [[begin[1], a, a + 1]]
    with pytest.raises(UserError, match="is empty"):
        encode([Problem("")], "t", tokenizer, PromptSettings())
    asked = [prompt.tokens.tolist() for prompt in encode(problems, "t", tokenizer, PromptSettings()).prompts]
    assert asked == [[begin[1], a, a + 1], [begin[1], a], [begin[1], a]]
    assert [(list(pair.prompt), pair.response) for pair in demonstration_pairs(problems, tokenizer)] == [
        (prompt, [answer]) for prompt, answer in zip(asked, (a, a, a + 1), strict=True)
    ]


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "TEMPLATE_SECONDS", 0.2)
    tokenizer, chat = character_tokenizer("ab"), [{"role": "user", "content": "a"}]
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "xyz")
    tokenizer.chat_template = loops + "{% endfor %}" * 3
    with pytest.raises(UserError, match=r"template cannot write a prompt \(no end after 0.2 s\): give another"):
        chat_markup(tokenizer, chat)
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert [chat_markup(tokenizer, chat) for _ in range(3)] == ["a"] * 3
