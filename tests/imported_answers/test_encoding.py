"""Text from elsewhere as the run's tokens, to the task's own prompts."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from chat_families import tokenizer as families_tokenizer
from tba.engines.stopping import StopStrings
from tba.environments.episode import Observation
from tba.environments.recorded import chat_writer
from tba.environments.turn_encoding import TurnEncoder
from tba.imported_answers.encoding import EncodedAnswer, Encoder, TaskPrompts
from tba.imported_answers.parsing import ImportedAnswer, parse_answer
from tba.models.warm_start import demonstration_pairs
from tba.tables import Refusal
from tba.training.tiny_models import character_tokenizer, train_bpe_tokenizer
from tba.types import ELSEWHERE, Completion, Problem, Prompt, Sampling, StopReason, Trajectory, Version

TOKENIZER = character_tokenizer("0123456789+= Q:uera\n[]sint")
EOS = TOKENIZER.eos_token_id


def prompt(text: str, **fields: Any) -> Prompt:
    return Prompt("sums", np.array(TOKENIZER.encode(text), dtype=np.int32), text, fields)


TRAIN = [prompt("Q: 1+1=\n", question="1+1=", answer="2"), prompt("Q: 2+2=\n", question="2+2=", answer="4")]
HELD_OUT = [prompt("Q: 3+3=\n", question="3+3=", answer="6")]
ENCODER = Encoder(
    "sums",
    TOKENIZER,
    TaskPrompts(TRAIN),
    TaskPrompts(HELD_OUT),
    False,
    max_prompt_tokens=20,
    max_tokens=5,
    turn_writer=chat_writer(TOKENIZER),
)


def encoded(*answer: Any, encoder: Encoder = ENCODER, **fields: Any) -> EncodedAnswer:
    encoded_answer = encoder.encode(ImportedAnswer(*answer, **fields))
    assert isinstance(encoded_answer, EncodedAnswer), encoded_answer
    return encoded_answer


def refused(*answer: Any, encoder: Encoder = ENCODER) -> str:
    refusal = encoder.encode(ImportedAnswer(*answer))
    assert isinstance(refusal, Refusal), refusal
    return refusal.reason


USER = ({"role": "user", "content": "1+1="},)


@pytest.mark.parametrize("asked", ["Q: 1+1=\n", "Q: 1+1=", "1+1=", " 1+1=\n", USER])
def test_a_prompt_of_the_task_is_found_by_its_text_or_by_what_it_asks(asked: Any) -> None:
    encoded_answer = encoded(asked, "2", fields={"answer": "3"})
    assert encoded_answer.prompt is TRAIN[0]  # with its own fields: a line cannot say what is right
    assert encoded_answer.is_task_prompt


@pytest.mark.parametrize("asked", ["Q: 3+3=\n", "3+3=", ({"role": "user", "content": "3+3="},)])
def test_answers_to_prompts_that_are_held_out_are_refused(asked: Any) -> None:
    assert "held out" in refused(asked, "6")


def test_a_prompt_that_the_task_lacks_is_taken_with_the_fields_of_its_line() -> None:
    encoded_answer = encoded("4+4=", "8", fields={"answer": "8"})
    assert not encoded_answer.is_task_prompt
    assert encoded_answer.prompt.text == "4+4="
    assert encoded_answer.prompt.fields == {"answer": "8"}
    assert encoded_answer.prompt.task == "sums"


def test_all_answers_to_a_prompt_that_the_task_lacks_are_marked_by_the_fields_of_the_first() -> None:
    fresh = replace(ENCODER, new_prompts={})
    prompt = encoded("5+5=", "10", encoder=fresh, fields={"answer": "10"}).prompt
    assert encoded("5+5=", "11", encoder=fresh, fields={"answer": "11"}).prompt is prompt


def test_a_question_that_two_prompts_ask_names_neither() -> None:
    twice = replace(ENCODER, train=TaskPrompts([*TRAIN, prompt("u: 1+1=\n", question="1+1=")]))
    assert not encoded("1+1=", "2", encoder=twice).is_task_prompt
    assert encoded("u: 1+1=\n", "2", encoder=twice).is_task_prompt


def test_an_answer_ends_in_the_end_of_text_unless_it_was_cut_off() -> None:
    whole, cut = encoded("1+1=", "12").completion, encoded("1+1=", "12", True).completion
    assert whole.tokens.tolist() == [*TOKENIZER.encode("12"), EOS]
    assert cut.tokens.tolist() == TOKENIZER.encode("12")
    assert (whole.stop_reason, cut.stop_reason) == (StopReason.EXTERNAL, StopReason.LENGTH)
    for completion in (whole, cut):
        assert completion.text == "12"
        assert (completion.log_behavior, completion.sampling) == (None, None)
        assert completion.versions == (ELSEWHERE, ELSEWHERE)


def test_an_end_of_text_that_the_log_spells_is_no_second_one() -> None:
    assert encoded("1+1=", "12<eos>").completion.tokens.tolist() == encoded("1+1=", "12").completion.tokens.tolist()


@pytest.mark.parametrize("answer", ["one", "1<eos>2", "<eos>", "<pad>1", "π"])
def test_an_answer_whose_tokens_would_say_something_else_is_refused(answer: str) -> None:
    assert "cannot write" in refused("1+1=", answer)


def test_longer_than_the_run_can_answer_or_ask_is_refused() -> None:
    assert encoded("1+1=", "1111").completion.tokens.size == 5
    assert refused("1+1=", "11111") == "an answer longer than 5 tokens"
    assert refused("1+1=", "1" * 10**7) == "an answer longer than 5 tokens"
    assert refused("1+1=" * 6, "1") == "a prompt longer than 20 tokens"


def test_what_the_model_has_no_positions_for_is_refused() -> None:
    """The prompt has 8 tokens, the answer two."""
    assert encoded("1+1=", "2", encoder=replace(ENCODER, positions=10)).is_task_prompt
    assert (
        refused("1+1=", "2", encoder=replace(ENCODER, positions=9))
        == "longer with its prompt than the model's 9 positions"
    )


def test_tools_and_calls_of_a_chat_are_part_of_its_prompt() -> None:
    tokenizer = character_tokenizer("0123456789+= Q:uera\n[]sint")
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.name }}{% endfor %}"
        " {% endfor %}"
    )
    messages = (
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "sun"}]},
    )
    messages = (*messages, {"role": "tool", "content": "2"})
    chat_encoder = replace(ENCODER, tokenizer=tokenizer, max_prompt_tokens=40, new_prompts={})
    assert encoded(messages, "2", encoder=chat_encoder, tools=({"name": "ten"},)).prompt.text == "[ten]1+1= sun 2 "
    assert encoded(messages, "2", encoder=chat_encoder).prompt.text == "1+1= sun 2 "
    encoded_answer = ENCODER.encode(
        ImportedAnswer(({"role": "user", "content": "9+9="},), "2", tools=({"name": "ten"},))
    )
    assert isinstance(encoded_answer, Refusal)  # without a template there is no place for a tool


BPE = replace(
    ENCODER,
    tokenizer=train_bpe_tokenizer(["one and one is two", "Q: 1+1= 2 3 4"] * 5, 300),
    train=TaskPrompts([]),
    held_out=TaskPrompts([]),
    max_prompt_tokens=64,
    max_tokens=64,
)
TEXT = st.text(max_size=12) | st.lists(
    st.sampled_from(["1", "+", " ", "<eos>", "<pad>", "é", "e\u0301", "\0", "\U0001d538"])
).map("".join)


@pytest.mark.parametrize("encoder", [ENCODER, BPE], ids=["characters", "bpe"])
@settings(max_examples=150, deadline=None)
@given(prompt=TEXT.filter(bool), response=TEXT.filter(bool), truncated=st.booleans())
def test_any_text_is_refused_or_its_tokens_say_it(
    encoder: Encoder, prompt: str, response: str, truncated: bool
) -> None:
    encoded_answer = encoder.encode(ImportedAnswer(prompt, response, truncated))
    if isinstance(encoded_answer, Refusal):
        assert encoded_answer.reason
        return
    tokens, eos = encoded_answer.completion.tokens.tolist(), encoder.tokenizer.eos_token_id
    text = encoder.tokenizer.decode(tokens, skip_special_tokens=True)
    assert text == encoded_answer.completion.text
    assert eos not in tokens[:-1]
    assert (tokens[-1] == eos) != truncated
    assert len(tokens) <= encoder.max_tokens
    assert encoded_answer.prompt.key == Prompt(encoder.task, encoded_answer.prompt.tokens, "").key


def blank_before_texts() -> PreTrainedTokenizerFast:
    """A tokenizer of SentencePiece's kind, as those of Llama 2 and Mistral 0.1."""
    return PreTrainedTokenizerFast(
        tokenizer_object=families_tokenizer("llama2", "base").backend_tokenizer, bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("1+1=", "2"), ("1+1=", " 2"), ("say ", "it"), ("a\n", "b\n c"), ("There", " is"), ("The", "re is"), ("a", "\nb")],
)
def test_an_answer_to_a_text_goes_on_from_it_where_the_tokenizer_puts_a_blank_before_texts(
    asked: str, answer: str
) -> None:
    """Imports, demonstrations and what environments say are read behind a prompt as they are written."""
    tokenizer = blank_before_texts()
    encoder = replace(BPE, tokenizer=tokenizer, new_prompts={})
    encoded_answer = encoded(asked, answer, encoder=encoder)
    prompt, completion = encoded_answer.prompt.tokens.tolist(), encoded_answer.completion.tokens.tolist()
    assert tokenizer.decode([*prompt, *completion]) == f"{asked}{answer}</s>"
    (pair,) = demonstration_pairs([Problem(asked, {}, answer)], tokenizer)
    assert pair.response == completion[:-1]
    encoder = TurnEncoder(tokenizer, chat=False)
    turn, heard = encoder.turn(answer).tolist()[:-1], encoder.observation(Observation(answer)).tolist()
    assert tokenizer.decode([*prompt, *turn, *heard]) == asked + answer + answer


def test_an_answer_that_reads_back_with_another_blank_is_refused() -> None:
    tokenizer = blank_before_texts()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "")
    encoder = replace(BPE, tokenizer=tokenizer, new_prompts={})
    assert "cannot write" in refused("1+1=", " 2", encoder=encoder)


@pytest.mark.parametrize("answer", ["<think>two</think>42", "two</think>42"])
def test_marks_of_thoughts_that_are_special_tokens_are_text_of_an_answer_and_can_be_imported(answer: str) -> None:
    tokenizer = train_bpe_tokenizer(["two 42 Q: 1+1="] * 5, 300)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    think, unthink = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    completion = encoded("1+1=", answer, encoder=replace(BPE, tokenizer=tokenizer, new_prompts={})).completion
    assert completion.text == answer
    assert [t for t in completion.tokens if t in (think, unthink)] == [think, unthink][-answer.count(">") :]
    strings = StopStrings(("o</th",), tokenizer)
    assert strings.text(completion.tokens.tolist()) == answer
    assert strings.cut(completion.tokens.tolist())[1:] == (answer.partition("o</th")[0], True)


TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}{{ 's:' if add_generation_prompt }}"


def chatting() -> Encoder:
    """The same task put as chats, by a tokenizer with a template."""
    tokenizer = character_tokenizer("0123456789+= :\n[]serutainy")
    tokenizer.chat_template = TEMPLATE
    text = "[user]1+1=\ns:"
    prompt = Prompt("sums", np.array(tokenizer.encode(text), dtype=np.int32), text, {"answer": "2"})
    return replace(ENCODER, tokenizer=tokenizer, train=TaskPrompts([prompt]), held_out=TaskPrompts([]), chat=True)


def test_a_chat_and_its_bare_question_are_the_same_prompt_where_the_task_chats() -> None:
    encoder = chatting()
    assert encoded(USER, "2", encoder=encoder).is_task_prompt
    assert encoded("1+1=", "2", encoder=encoder).is_task_prompt
    new_answer = encoded("7+1=", "8", encoder=encoder)
    assert (new_answer.prompt.text, new_answer.is_task_prompt) == ("[user]7+1=\ns:", False)


def test_turns_before_the_question_are_part_of_the_prompt_and_need_a_template() -> None:
    turns = (*USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="})
    wide = replace(chatting(), max_prompt_tokens=99)
    assert encoded(turns, "4", encoder=wide).prompt.text.startswith("[user]1+1=\n[assistant]2\n[user]2+2=")
    assert "no chat template" in refused(turns, "4")


def asked(*messages: Any) -> ImportedAnswer:
    roles = ("user", "assistant") * len(messages)
    chat = [m if isinstance(m, dict) else {"role": r, "content": m} for r, m in zip(roles, messages, strict=False)]
    answer = parse_answer({"messages": chat})
    assert isinstance(answer, ImportedAnswer)
    return answer


def test_a_chat_of_several_turns_is_one_completion_in_which_what_is_said_between_them_is_masked() -> None:
    encoder = chatting()
    encoder = replace(encoder, max_tokens=99, turn_writer=chat_writer(encoder.tokenizer))
    tokens = partial(encoder.tokenizer.encode, add_special_tokens=False)
    first, second, between = [*tokens("2"), EOS], [*tokens("3"), EOS], tokens("\n[user]+1=\ns:")
    found = encoder.encode(asked("1+1=", "2", "+1=", "3"))
    assert isinstance(found, EncodedAnswer)
    assert found.is_task_prompt
    assert found.completion.tokens.tolist() == [*first, *between, *second]
    assert found.completion.mask is not None
    assert found.completion.mask.tolist() == [True] * 2 + [False] * len(between) + [True] * 2
    unweighted = {"role": "assistant", "content": "3", "weight": 0}
    found = encoder.encode(asked("1+1=", "2", "+1=", unweighted, "+1=", "4"))
    assert isinstance(found, EncodedAnswer)
    assert found.completion.turns == [(0, 2), (4 + 2 * len(between), 6 + 2 * len(between))]
    assert encoder.encode(asked("1+1=", "2", "+1=", "3" * 99)) == Refusal(
        "an answer longer than 99 tokens", f"{len(between) + 102} tokens"
    )


def test_a_prompt_of_the_task_with_a_history_wins_over_one_without() -> None:
    encoder = chatting()
    text = "[user]1+1=\n[assistant]2\n[user]+1=\ns:"
    long = Prompt("sums", np.array(encoder.tokenizer.encode(text), dtype=np.int32), text, {"answer": "3"})
    short = encoder.train.find(["[user]1+1=\ns:"], "")
    assert short is not None
    both = replace(encoder, train=TaskPrompts([short, long]))
    found = both.encode(asked("1+1=", "2", "+1=", "3"))
    assert isinstance(found, EncodedAnswer)
    assert found.prompt is long
    assert (found.completion.text, found.completion.mask) == ("3", None)
    held_out = replace(encoder, held_out=TaskPrompts([long]))
    refusal = held_out.encode(asked("1+1=", "2", "+1=", "3"))
    assert isinstance(refusal, Refusal)
    assert "held out" in refusal.reason


def trajectory(prompt: Prompt, tokens: list[int], text: str) -> Trajectory:
    behaviour = np.full(len(tokens), -0.5, dtype=np.float32)
    completion = Completion(
        np.array(tokens, dtype=np.int32), text, StopReason.EOS, (Version(0, 7), Version(0, 8)), Sampling(), behaviour
    )
    return Trajectory("u", prompt, completion, 1.0, behaviour, Version(0, 5))


def test_a_trajectory_of_another_run_keeps_its_tokens_and_behaviour_but_not_its_version() -> None:
    old = trajectory(prompt("Q: 1+1=\n"), [*TOKENIZER.encode("2"), EOS], "2")
    adopted = ENCODER.adopt(old)
    assert isinstance(adopted, EncodedAnswer)
    assert adopted.prompt is TRAIN[0]
    assert adopted.completion.tokens.tolist() == old.completion.tokens.tolist()
    assert adopted.completion.log_behavior is old.completion.log_behavior
    assert adopted.completion.versions == (ELSEWHERE, ELSEWHERE)
    refused = ENCODER.adopt(replace(old, prompt=HELD_OUT[0]))
    assert isinstance(refused, Refusal)
    assert "held out" in refused.reason


def test_an_episode_of_several_segments_is_kept_whole_where_each_of_them_fits_the_model() -> None:
    def episode(tokens: list[int], text: str) -> Trajectory:
        old = trajectory(prompt("Q: 1+1=\n"), tokens, text)
        mask = np.arange(len(tokens)) != 1
        begins = np.array([1], np.int32)
        return replace(old, completion=replace(old.completion, mask=mask, begins=begins))

    old = episode(TOKENIZER.encode("23456"), "23456")
    prompt_length = len(old.prompt.tokens)
    adopted = replace(ENCODER, positions=prompt_length + 1).adopt(old)
    assert isinstance(adopted, EncodedAnswer)
    assert adopted.completion.begins is old.completion.begins
    assert adopted.completion.digest == old.completion.digest
    refused = replace(ENCODER, positions=prompt_length).adopt(old)
    assert isinstance(refused, Refusal)
    assert f"{prompt_length + 1} tokens" in refused.detail
    other = ENCODER.adopt(episode([5000, 5001, 5002], "2"))
    assert isinstance(other, Refusal)
    assert "several turns" in other.reason


def test_a_trajectory_of_another_tokenizer_is_taken_by_its_text() -> None:
    old = trajectory(prompt("Q: 1+1=\n"), [5000, 5001], "2")
    answer = ENCODER.adopt(old)
    assert isinstance(answer, ImportedAnswer)
    assert (answer.prompt, answer.response, answer.is_truncated) == ("Q: 1+1=\n", "2", False)
    assert encoded("Q: 1+1=\n", "2").is_task_prompt


def test_a_prompt_that_begins_with_the_tokenizers_own_token_is_one_whether_asked_or_taken_over() -> None:
    """Llama's tokenizers put <s> before texts: a new prompt has it, and one of another run keeps all of its tokens."""
    tokenizer = character_tokenizer("0123456789+= :\nQ")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    encoder = replace(ENCODER, tokenizer=tokenizer, train=TaskPrompts([]), held_out=TaskPrompts([]))
    encoded_answer = encoded("Q: 7+1=\n", "8", encoder=encoder)
    assert encoded_answer.prompt.tokens.tolist() == [begin, *tokenizer.encode("Q: 7+1=\n", add_special_tokens=False)]
    assert encoded_answer.completion.tokens.tolist() == [
        *tokenizer.encode("8", add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    old = trajectory(encoded_answer.prompt, encoded_answer.completion.tokens.tolist(), "8")
    adopted = encoder.adopt(old)
    assert isinstance(adopted, EncodedAnswer)
    assert adopted.prompt.key == encoded_answer.prompt.key
    assert adopted.completion.log_behavior is old.completion.log_behavior
