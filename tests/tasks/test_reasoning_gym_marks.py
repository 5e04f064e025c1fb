"""Code in answers to every data set of the real reasoning-gym: it never runs, and honest answers keep their scores."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

from tba.errors import UserError
from tba.rewards.confined import can_confine
from tba.tasks import reasoning_gym_marks
from tba.tasks.reasoning_gym_marks import (
    EVALUATED_FORMS,
    READ_DATASETS,
    REFUSED_DATASETS,
    SLOW_DATASETS,
    ReasoningGymScore,
    Source,
    entry,
    mark,
    require_markable,
)
from tba.types import Completion, Judgement, Prompt, StopReason, Version

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # the package leaves its files to the collector

SMALLER = {"futoshiki": '{"max_board_size": 4}'}  # problems that are quicker to make
MARKED = sorted(READ_DATASETS | SLOW_DATASETS | EVALUATED_FORMS.keys())
AWAY = sorted(SLOW_DATASETS | EVALUATED_FORMS.keys())
FORMULAS = ["simple_integration", "intermediate_integration"]
REACHES = {
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn"),
    *("open", "os.remove", "os.mkdir", "shutil.rmtree", "socket.__new__", "ctypes.dlopen"),
}

heard: list[tuple[str, str]] | None = None


def hear(event: str, arguments: tuple[object, ...]) -> None:
    if heard is not None:
        heard.append((event, repr(arguments[:1])))


sys.addaudithook(hear)  # for the rest of the process; it listens only while `heard` is a list


def source(dataset: str) -> Source:
    return Source(dataset, SMALLER.get(dataset, "{}"), 11, 20)


def right(dataset: str, index: int = 0) -> str | None:
    answer: str | None = entry(source(dataset), index)["answer"]
    return answer


def quietly(dataset: str, index: int, answer: str) -> float | None:
    """The mark in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python about the answers' syntax
        return mark(source(dataset), index, answer)


def judged(reward: ReasoningGymScore, asked: list[tuple[str, int, str]]) -> list[Judgement]:
    tokens, versions = np.array([1], dtype=np.int32), (Version(), Version())
    return reward.judge(
        [
            (
                Prompt("gym", tokens, "", {"split": dataset, "index": index}),
                Completion(tokens, f"<answer>{answer}</answer>", StopReason.EOS, versions),
            )
            for dataset, index, answer in asked
        ]
    )


def codes(file: Path, answer: str | None) -> list[str]:
    """Texts that make a file where they are evaluated, in the forms that answers have."""
    command = f"touch {file}"
    call = f"__import__('os').system('{command}')"
    without_quotes = "+".join(f"chr({ord(c)})" for c in call)
    return [
        call,
        f"[{call}]",
        f"[[{call}]]",
        f"[['Q', {call}]]",
        f"['A', *[{call}]]",
        f'{{"a": "{call}"}}',
        f"{{{call}: 1}}",
        f"f'{{{call}}}'",
        f"(lambda: {call})()",
        f"x + {call}",
        f"eval({without_quotes})",
        f"2*x + exec({without_quotes})",
        f"1 + sympify({without_quotes})",
        f"[].__class__.__base__.__subclasses__(), {call}",
        f"open('{file}', 'w')",
        f"[open('{file}', 'w')]",
        f"!!python/object/apply:os.system ['{command}']",
        f"cos\nsystem\n(S'{command}'\ntR.",
        f"24 if {call} else 24",
        f"{answer}\n{call}",
        f"{call} or {answer}",
        f"A={call},B=2",
        f"\\frac{{{call}}}{{1}}",
    ]


@pytest.fixture(scope="module")
def away() -> Iterator[dict[str, ReasoningGymScore]]:
    """What marks each data set that is marked in children: one confined child, and one that is only limited."""
    tables = (EVALUATED_FORMS, SLOW_DATASETS)
    kinds = [ReasoningGymScore({d: source(d) for d in table}, processes=1, seconds=100.0) for table in tables]
    yield {dataset: reward for reward in kinds for dataset in reward.sources}
    for reward in kinds:
        assert dict(reward.children.counts) == {"timed_out": 0, "crashed": 0}
        reward.close()


def test_every_data_set_of_the_package_is_named_once_and_a_new_one_is_refused() -> None:
    tables = [READ_DATASETS, SLOW_DATASETS, EVALUATED_FORMS.keys(), REFUSED_DATASETS.keys()]
    assert sorted(DATASETS) == sorted(name for table in tables for name in table)
    assert len(DATASETS) == 106
    with pytest.raises(UserError, match="answers of reasoning_gym's 'brand_new' cannot be graded: nobody has checked"):
        require_markable("brand_new")
    with pytest.raises(UserError, match="reasoning_gym's composite cannot be graded: it mixes other data sets"):
        require_markable("composite")
    with pytest.raises(UserError, match="running code that a language model wrote"):
        require_markable("codeio")


def test_the_data_sets_that_evaluate_an_answer_are_those_that_are_said_to() -> None:
    """Python says what it compiles: an answer's own number must not be in it."""
    global heard
    evaluated = set()
    for dataset in MARKED:
        for answer in ("7919", "[7919]", "[[7919, 7907]]", "7919 + 7907", "7919*x", "['A', '7919']"):
            entry(source(dataset), 0)
            heard = []
            quietly(dataset, 0, answer)
            said, heard = heard, None
            evaluated |= {dataset for event, what in said if event in ("compile", "exec") and "7919" in what}
            assert dataset in EVALUATED_FORMS or not [event for event, _ in said if event in REACHES]
    assert evaluated == set(EVALUATED_FORMS)


def test_code_given_to_a_data_set_that_marks_here_stays_text(tmp_path: Path) -> None:
    global heard
    file = tmp_path / "file"
    reward = ReasoningGymScore({dataset: source(dataset) for dataset in READ_DATASETS})
    for dataset in sorted(READ_DATASETS):
        asked = [(dataset, 0, code) for code in [*codes(file, right(dataset)), "9**9**9**9", "[[9**9**9**9]]"]]
        heard = []
        found = judged(reward, asked)
        said, heard = heard, None
        assert not [(dataset, event) for event, _ in said if event in REACHES]
        assert all(0 <= judgement.reward <= 1 for judgement in found)
    assert not file.exists()
    assert len(reward.children) == 0


def test_code_given_to_a_data_set_that_evaluates_is_refused_and_scores_as_no_answer(
    tmp_path: Path, away: dict[str, ReasoningGymScore]
) -> None:
    file = tmp_path / "file"
    for dataset in AWAY:
        found = judged(away[dataset], [(dataset, 0, code) for code in codes(file, right(dataset))])
        nothing = judged(away[dataset], [(dataset, 0, "")])[0].reward
        if dataset in EVALUATED_FORMS:
            assert {(j.reward, j.parts["unreadable"]) for j in found} == {(nothing, 1.0)}
        assert max(j.reward for j in found) < 1
    assert not file.exists()


@pytest.mark.skipif(not can_confine(), reason="this system has no seccomp")
@pytest.mark.parametrize("dataset", ["n_queens", "countdown"])
def test_code_that_gets_as_far_as_the_scorer_ends_its_child_and_does_nothing(dataset: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    reward = ReasoningGymScore({dataset: source(dataset)}, processes=1, seconds=100.0)
    answer = str(right(dataset))
    code = codes(file, "")[0]
    assert reward.marks([(dataset, 0, answer), (dataset, 0, code), (dataset, 0, answer)]) == [1.0, None, 1.0]
    assert reward.children.counts == {"timed_out": 0, "crashed": 1}
    assert not file.exists()
    reward.close()


def test_what_would_never_end_ends_at_its_limit() -> None:
    sources = {dataset: source(dataset) for dataset in ("simple_integration", "coin_flip")}
    reward = ReasoningGymScore(sources, processes=2, seconds=2.0)
    asked = [("simple_integration", 0, "9**9**9**9"), ("coin_flip", 0, "1e999999999")]
    assert [(j.reward, j.parts["ungraded"]) for j in judged(reward, asked)] == [(0.0, 1.0), (0.0, 1.0)]
    assert reward.children.counts["timed_out"] + reward.children.counts["crashed"] == 2
    reward.close()


def test_honest_answers_score_in_a_child_as_they_do_in_the_package(
    away: dict[str, ReasoningGymScore],
) -> None:
    for dataset in AWAY:
        for index in range(2):
            answer = right(dataset, index)
            texts = ["", "1", "I do not know", "R U", "F+1", "[[1, 0], [0, 1]]", "['A', 'B']"]
            if answer is not None:
                texts += [answer, f"{answer} + 1", answer.replace("1", "2"), str(answer.split())]
            if dataset in FORMULAS:
                texts += ["sin(x)*exp(x)/sqrt(x + 1) + C", "-x**2/2 + 3*log(abs(x)) + 0.5", "(x, 1)", "y"]
            for text, judgement in zip(texts, judged(away[dataset], [(dataset, index, t) for t in texts]), strict=True):
                assert (dataset, text, judgement.reward) == (dataset, text, quietly(dataset, index, text.strip()) or 0)
                assert text != answer or judgement.reward == 1.0
                assert judgement.parts["ungraded"] == 0.0
    assert judged(away["countdown"], [("countdown", 0, f"({right('countdown')})")])[0].reward == 1.0


def test_the_right_answer_scores_1_wherever_the_package_gives_one() -> None:
    scores = {name: mark(source(name), 0, answer) for name in sorted(READ_DATASETS) if (answer := right(name))}
    assert set(scores.values()) == {1.0}
    assert len(scores) >= 85


@pytest.mark.parametrize(
    ("dataset", "answer"), [("prime_factorization", "x"), ("calendar_arithmetic", "9" * 4000), ("boxnet", "1")]
)
def test_an_answer_at_which_a_scorer_raises_is_counted_and_scores_0(dataset: str, answer: str) -> None:
    reward = ReasoningGymScore({dataset: source(dataset)})
    found = judged(reward, [(dataset, index, answer) for index in range(20)])
    assert 1.0 in {j.parts["ungraded"] for j in found}
    assert {j.reward for j in found if j.parts["ungraded"]} == {0.0}


def test_a_score_is_believed_only_if_it_is_a_number_from_0_to_1() -> None:
    said = [0, 1, 0.5, 1.5, -0.1, float("nan"), float("inf"), 10**400, True, None, "1", [1], {"score": 1}]
    assert [reasoning_gym_marks._valid_score(score) for score in said] == [0.0, 1.0, 0.5, *[None] * 10]


def test_without_confinement_what_evaluates_is_refused_and_the_rest_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym_marks, "can_confine", lambda: False)
    for dataset in EVALUATED_FORMS:
        with pytest.raises(UserError, match=f"scorer of {dataset} evaluates answers as code, and this system has no"):
            require_markable(dataset)
    for dataset in READ_DATASETS | SLOW_DATASETS:
        require_markable(dataset)


def test_another_version_of_the_package_is_refused_until_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym_marks, "REVIEWED_VERSION", "0.1.26")
    with pytest.raises(UserError, match=r"0\.1\.25 is installed, .* reviewed in 0\.1\.26 only: `pip install"):
        require_markable("chain_sum")
