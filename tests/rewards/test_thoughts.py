r"""Graders read what follows a thought: `\boxed{42}` in one is no answer, and an unfinished one has none."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from chat_families import tokenizer
from tba.protocols import Reward
from tba.rewards.exact_answer import ExactAnswer, ExactText
from tba.rewards.functions import WeightedFunctions
from tba.rewards.math_answer import MathAnswer
from tba.rollout.prompts import PromptSettings, encode
from tba.runtime.answers_json import read_answers, write_answers
from tba.types import ELSEWHERE, Completion, Problem, Prompt, StopReason

BOXED = r"\boxed{42}"
READ = [
    (f"<think>{BOXED}</think>I do not know", "I do not know"),
    ("<think>it could be 42", ""),
    (f"<think>7</think>{BOXED}", BOXED),
    (f"[THINK]7[/THINK]{BOXED}", BOXED),
    (f"<think>7</think>{BOXED}<think>41", BOXED),
    (f"7</think>{BOXED}", BOXED),
    (BOXED, BOXED),
]
OPENED = [(f"{BOXED}</think>I do not know", "I do not know"), (BOXED, ""), (f"7</think>{BOXED}", BOXED)]


def completion(text: str) -> Completion:
    return Completion(np.array([1], np.int32), text, StopReason.EOS, (ELSEWHERE, ELSEWHERE))


def mark(reward: Reward, prompt: Prompt, text: str) -> float:
    return reward.judge([(prompt, completion(text))])[0].reward


def asked(text: str, settings: PromptSettings | None = None) -> Prompt:
    problem = Problem(text, {"answer": "42"})
    return encode([problem], "t", tokenizer("qwen3", "chat"), settings or PromptSettings()).prompts[0]


@pytest.mark.parametrize("reward", [ExactAnswer(), MathAnswer()], ids=repr)
@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [("6 * 7?", *case) for case in READ] + [("6 * 7?\n<think>\n", *case) for case in OPENED],
)
def test_graders_read_what_follows_the_thought_unless_a_setting_says_otherwise(
    reward: Reward, prompt: str, text: str, answer: str
) -> None:
    assert asked(prompt).answer_in(text) == answer
    assert mark(reward, asked(prompt), text) == float("42" in answer)
    right = BOXED in text or (isinstance(reward, ExactAnswer) and "42" in text)
    assert mark(reward, asked(prompt, PromptSettings(grade_thoughts=True)), text) == float(right)


def test_a_text_is_compared_without_its_thought_and_a_function_of_ones_own_reads_all() -> None:
    texts: list[str] = []

    def thinks(response: str) -> float:
        texts.append(response)
        return 1.0

    text = "<think>7</think>42"
    assert mark(ExactText(), asked("6 * 7?"), text) == 1
    assert mark(WeightedFunctions(((thinks, 1.0),)), asked("6 * 7?"), text) == 1
    assert texts == [text]


def test_thoughts_are_marked_as_the_template_marks_them_and_graders_elsewhere_know_it() -> None:
    """As gpt-oss writes them: `<|end|>` ends a thought, and what follows begins as an answer does."""
    made = deepcopy(tokenizer("phi3", "chat"))
    made.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.thinking %}<|system|>{{ m.thinking }}<|end|><|assistant|>"
        "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    problem = Problem(({"role": "user", "content": "6 * 7?"},), {"answer": "42"})
    (prompt,) = encode([problem], "t", made, PromptSettings()).prompts
    assert prompt.answer_in(f"<|system|>{BOXED}<|end|><|assistant|>7") == "7"
    assert prompt.answer_in(f"<|system|>{BOXED}") == ""
    ((again, _),) = read_answers(write_answers([(prompt, completion("7"))]))
    assert again.thoughts == prompt.thoughts
    assert replace(prompt, thoughts=()).answer_in(f"<think>{BOXED}") == f"<think>{BOXED}"
