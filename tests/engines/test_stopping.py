"""Where an answer ends: at what the model, its chat template and the settings say, as tokens wherever it is one."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from chat_families import tokenizer
from tba.assistant_turns import assistant_turn
from tba.engines.stopping import find_stops
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.environments.episode import Observation
from tba.environments.turn_encoding import TurnEncoder
from tba.errors import UserError
from tba.generation import generate
from tba.policy.causal import CausalPolicy
from tba.settings import find, override
from tba.training.tiny_models import train_bpe_tokenizer
from tba.types import Prompt, Sampling, StopReason


def config(made: Any, **more: Any) -> LlamaConfig:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(
        **shape, vocab_size=len(made), bos_token_id=None, eos_token_id=made.eos_token_id, pad_token_id=None, **more
    )


@pytest.mark.parametrize(
    ("family", "kind", "ends"),
    [
        ("qwen2.5", "base", ["<|endoftext|>", "<|im_end|>"]),
        ("qwen2.5", "chat", ["<|im_end|>"]),
        ("gemma3", "chat", ["<eos>", "<end_of_turn>"]),
        ("phi3", "chat", ["<|end|>", "<|endoftext|>"]),
        ("llama3", "base", ["<|end_of_text|>", "<|eot_id|>"]),
        ("glm4.5", "chat", ["<|endoftext|>", "<|observation|>", "<|user|>"]),
        ("zephyr", "base", ["</s>"]),
    ],
)
def test_what_ends_a_turn_in_the_template_ends_an_answer_and_is_said_where_the_model_does_not_say_so(
    family: str, kind: str, ends: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = tokenizer(family, kind)
    with caplog.at_level(logging.INFO):
        found, strings = find_stops((), made, config(made))
    assert sorted(made.convert_ids_to_tokens(sorted(found))) == sorted(ends)
    assert (strings.strings, strings.ids) == ((), frozenset())
    told = [record.getMessage() for record in caplog.records]
    own = [end for end in ends if end != made.eos_token]
    assert len(told) == bool(own)
    assert all(repr(end) in told[0] for end in own)


THINKING = "{% if m.thinking %}{{ m.thinking }}<|end|><|assistant|>{% endif %}"


@pytest.mark.parametrize("parts", [True, False])
def test_what_ends_the_parts_of_a_turn_ends_no_answer(parts: bool) -> None:
    """As gpt-oss writes it: `<|end|>` stands behind thoughts, and behind an answer that others have answered; but an
    answer ends in `<|return|>`. Where it does not stand behind thoughts, it ends a turn, too.
    """
    made = deepcopy(tokenizer("phi3", "chat"))
    made.add_tokens([AddedToken("<|return|>", special=True, normalized=False)], special_tokens=True)
    made.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>" + THINKING * parts + "{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    end, returned = made.convert_tokens_to_ids(["<|end|>", "<|return|>"])
    found, _ = find_stops((), made, config(made))
    assert found == {returned, made.eos_token_id} | ({end} if not parts else set())
    form = assistant_turn(made)
    assert (form.final_frame.token, form.user_frame.token, form.final_frame.opening) == (returned, end, "")
    for by in (end, returned):
        heard = TurnEncoder(made, True).observation(Observation("7"), end_token=by)
        assert made.decode(heard).replace(" ", "") == "<|user|>7<|end|><|assistant|>"


def test_several_tokens_that_end_a_turn_together_are_written_together() -> None:
    """As Command A writes it: an answer stands between two marks, and then its turn ends."""
    made = deepcopy(tokenizer("qwen2.5", "chat"))
    marks = ["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN|>", "<|USER|>", "<|CHATBOT|>"]
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|USER|>{{ m.content }}<|END_OF_TURN|>{% else %}"
        "<|CHATBOT|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|CHATBOT|>{% endif %}"
    )
    form = assistant_turn(made)
    encode = partial(made.encode, add_special_tokens=False)
    for frame in (form.final_frame, form.user_frame):
        assert made.decode(form.tokens("7", encode, frame)) == "<|START_RESPONSE|>7<|END_RESPONSE|><|END_OF_TURN|>"
    assert form.end_tokens == {made.convert_tokens_to_ids("<|END_OF_TURN|>")}
    heard = TurnEncoder(made, True).observation(Observation("7"), end_token=form.final_frame.token)
    assert made.decode(heard) == "<|USER|>7<|END_OF_TURN|><|CHATBOT|>"


def test_a_stop_string_that_is_a_special_token_is_its_id_and_a_number_is_a_tokens_id() -> None:
    made = tokenizer("qwen2.5", "chat")
    im_end, im_start = made.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    shown = "</tool_call>"  # a token, too, but one that an answer's text shows
    found, strings = find_stops(("<|im_start|>", "\n\n", 5, shown), made, config(made))
    assert found == {im_end, im_start, 5}
    assert strings.strings == ("\n\n", shown)
    assert strings.ids == {im_start, 5}  # what ends an answer anyway is no stop string
    for wrong in (-1, len(made)):
        with pytest.raises(UserError, match=rf"token {wrong}, and the model's are 0 to {len(made) - 1}"):
            find_stops((wrong,), made, config(made))


def test_a_command_line_takes_texts_and_ids() -> None:
    given = ["--model.path", "x", "--model.generation.stop-strings", "151643", "<|im_start|>", "###"]
    model: Any = override(find("gsm8k"), given, "tba train gsm8k").model
    assert model.generation.stop_strings == (151643, "<|im_start|>", "###")


@pytest.mark.parametrize("stop", ["<|im_start|>", "id", "none"])
def test_an_answer_ends_with_the_first_of_its_ends_and_its_text_shows_none(stop: str) -> None:
    """A random model of a base tokenizer, which gives its ends often: no answer goes on behind any of them."""
    made = tokenizer("qwen2.5", "base")
    ids = made.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>", "<|im_start|>"])
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(made)).eval()
    bias = torch.zeros(len(made))
    bias[ids] = 2.0
    model.lm_head.bias = torch.nn.Parameter(bias)
    stops: dict[str, int | str] = {"<|im_start|>": "<|im_start|>", "id": ids[2]}
    settings = EngineSettings(slots=8, max_completion_tokens=40)
    ended = ids if stop in stops else ids[:2]
    settings = replace(settings, stop_strings=(stops[stop],) if stop in stops else ())
    engine = TransformersEngine(model, made, settings)
    prompt = Prompt("toy", np.array([1, 2, 3], np.int32))
    ((*answers,),) = generate(engine, [prompt], 100, Sampling(), np.random.default_rng(0))
    last = {(int(c.tokens[-1]), c.stop_reason) for c in answers if c.stop_reason is not StopReason.LENGTH}
    reasons = [StopReason.EOS, StopReason.EOS, StopReason.STOP_STRING]
    assert last == set(zip(ended, reasons, strict=False))
    for c in answers:
        own = c.tokens if c.stop_reason is StopReason.LENGTH else c.tokens[:-1]
        assert set(ended).isdisjoint(own.tolist())
        assert c.text == made.decode(own.tolist(), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("family", "kind", "ends"),
    [
        ("qwen2.5", "base", ["<|endoftext|>", "<|im_end|>"]),
        ("glm4.5", "chat", ["<|endoftext|>", "<|observation|>", "<|user|>"]),
        ("qwen2.5", "chat", "<|im_end|>"),
        ("zephyr", "chat", "</s>"),
    ],
)
def test_a_model_that_is_saved_says_where_its_answers_end(
    family: str, kind: str, ends: list[str] | str, tmp_path: Path
) -> None:
    """Whoever samples from it elsewhere reads that in its generation settings."""
    made = tokenizer(family, kind)
    CausalPolicy(LlamaForCausalLM(config(made))).save(tmp_path / "model", made)
    found = GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id
    assert found == (made.convert_tokens_to_ids(ends) if isinstance(ends, str) else sorted(map(made.vocab.get, ends)))


def test_a_token_that_ends_an_answer_is_no_part_of_its_text_whether_it_is_special_or_not() -> None:
    made = train_bpe_tokenizer(["12+34=46"], 270)
    made.add_tokens([AddedToken("<|im_end|>", special=False, normalized=False)])
    end = made.convert_tokens_to_ids("<|im_end|>")
    _, strings = find_stops((), made, config(made))
    tokens = [*made.encode("46", add_special_tokens=False), end]
    assert strings.cut_at_end(tokens, frozenset({end}), interrupted=False) == (len(tokens), "46", StopReason.EOS)


@pytest.mark.parametrize("ids", [-1, [-1], 1000, [1000, -7], True, "x", None])
def test_what_is_no_token_ends_no_answer(ids: Any) -> None:
    """-1 is how some files say that there is none; as an index it would be the last token of the vocabulary."""
    made = tokenizer("zephyr", "base")
    generation = GenerationConfig()
    generation.eos_token_id = ids
    shape = config(made)
    assert find_stops((), made, shape, generation)[0] == {made.eos_token_id}
    generation.eos_token_id = [5, *(ids if isinstance(ids, list) else [ids])]
    assert find_stops((), made, shape, generation)[0] == {made.eos_token_id, 5}
