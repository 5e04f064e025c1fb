"""Tasks of reasoning-gym, with the real package."""

import sys
from collections.abc import Callable

import numpy as np
import pytest

from tba.errors import UserError
from tba.protocols import Reward, Task
from tba.rewards.exact_answer import ExactAnswer, grade
from tba.tasks import reasoning_gym_marks
from tba.tasks.reasoning_gym import ReasoningGym
from tba.types import Completion, Problem, Prompt, StopReason, Version

SMALL = ReasoningGym(train_problems=300, eval_problems=100)


def judged(reward: Reward, problem: Problem, *texts: str) -> list[float]:
    prompt = Prompt("a task", np.array([1], dtype=np.int32), "", problem.fields)
    return [
        judgement.reward
        for judgement in reward.judge(
            [
                (prompt, Completion(np.array([1], dtype=np.int32), text, StopReason.EOS, (Version(), Version())))
                for text in texts
            ]
        )
    ]


def test_training_and_evaluation_share_no_question_and_repeat_none() -> None:
    train, held = SMALL.problems("train"), SMALL.problems("eval")
    assert (len(train), len(held)) == (300, 100)
    assert len({p.prompt for p in [*train, *held]}) == 400
    assert isinstance(SMALL, Task)


def test_a_data_set_of_few_questions_still_shares_none() -> None:
    task = ReasoningGym("coin_flip", '{"min_trials": 3, "max_trials": 9}', train_problems=40, eval_problems=30)
    assert len({p.prompt for p in [*task.problems("train"), *task.problems("eval")]}) == 70  # of about 98


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert SMALL.problems("eval") == ReasoningGym(train_problems=300, eval_problems=100).problems("eval")
    assert SMALL.problems("eval") != ReasoningGym(train_problems=300, eval_problems=100, seed=1).problems("eval")


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "chain_sum", "spell_backward"])
def test_its_own_scorer_gives_its_own_answer_1_and_nothing_less(dataset: str) -> None:
    task = ReasoningGym(dataset, train_problems=5, eval_problems=5)
    reward = task.reward()
    for split in ("train", "eval"):
        for problem in task.problems(split):
            answer = problem.fields["answer"]
            bare, tagged, none = judged(reward, problem, answer, f"I think <answer>{answer}</answer>", "")
            assert (bare, tagged) == (1.0, 1.0)
            assert none < 1.0


@pytest.mark.parametrize("style", ["tba", "vineppo"])
@pytest.mark.parametrize("strict", [False, True])
def test_in_the_gsm8k_styles_every_worked_solution_ends_in_the_answer_and_earns_the_reward(
    style: str, strict: bool
) -> None:
    task = ReasoningGym(train_problems=200, eval_problems=50, style=style, strict=strict)
    assert task.reward() == ExactAnswer(strict)
    for problem in task.problems("train"):
        answer = problem.fields["answer"]
        assert problem.demonstration is not None
        assert problem.demonstration.endswith(f"\n#### {answer}")
        assert len(problem.demonstration) > 20 + len(answer)
        assert grade(problem.demonstration, answer, strict)
        assert judged(task.reward(), problem, problem.demonstration) == [1.0]


def test_in_the_gsm8k_styles_a_prompt_looks_as_gsm8ks_do() -> None:
    task = ReasoningGym(train_problems=5, eval_problems=5, style="tba")
    plain = ReasoningGym(train_problems=5, eval_problems=5)
    for styled, bare in zip(task.problems("train"), plain.problems("train"), strict=True):
        question = str(bare.prompt).removesuffix(" Give the result as your final answer. Do not include units.\n")
        assert styled.prompt == f"[MATH TASK] Problem:\n{question}\n\nSolution:\n"


def test_a_data_set_without_worked_solutions_demonstrates_the_bare_answer() -> None:
    (problem,) = ReasoningGym("chain_sum", train_problems=1, eval_problems=1, style="tba").problems("train")
    assert problem.demonstration == f"#### {problem.fields['answer']}"


def test_the_chat_style_asks_as_a_user() -> None:
    (problem,) = ReasoningGym("chain_sum", train_problems=1, eval_problems=1, style="chat").problems("train")
    (plain,) = ReasoningGym("chain_sum", train_problems=1, eval_problems=1).problems("train")
    assert problem.prompt == ({"role": "user", "content": str(plain.prompt).removesuffix("\n")},)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ReasoningGym("no_such").problems("train"), "cannot make 'no_such' with parameters {}: .*no_such"),
        (lambda: ReasoningGym("chain_sum", "{").problems("train"), "parameters '{', which are not JSON"),
        (lambda: ReasoningGym("chain_sum", "[]").problems("train"), "parameters '\\[\\]': give a JSON object"),
        (lambda: ReasoningGym("chain_sum", '{"seed": 1}').problems("train"), "give a JSON object without seed"),
        (lambda: ReasoningGym("chain_sum", '{"no": 1}').problems("train"), "cannot make 'chain_sum' with .*'no'"),
        (lambda: ReasoningGym("chain_sum", '{"min_terms": 0}').problems("eval"), "cannot make 'chain_sum'.*min_terms"),
        (lambda: ReasoningGym(train_problems=0), "0 train_problems, 500 eval_problems and seed 0: give at least 1"),
        (lambda: ReasoningGym(seed=-1), "seed -1: give at least 1 of each, and a seed from 0"),
        (
            lambda: ReasoningGym("coin_flip", '{"min_trials": 3, "max_trials": 3}', 5000, 5000).problems("train"),
            "coin_flip gave only .* distinct .* lower",
        ),
        (
            lambda: ReasoningGym("composite").reward(),
            "answers of reasoning_gym's composite cannot be graded: it mixes other data sets: name one of them",
        ),
        (
            lambda: ReasoningGym("graph_color", train_problems=1, eval_problems=1, style="tba").problems("train"),
            "graph_color has problems without one right answer, which style 'tba' needs",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # what Python does for a package that is not installed
    reasoning_gym_marks._create_dataset.cache_clear()
    with pytest.raises(UserError, match="needs the package reasoning-gym: `pip install reasoning-gym`"):
        ReasoningGym("chain_sum").problems("train")
