r"""The grader of MATH: what it takes for the same answer, what it does not, and what it survives."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import UserError
from tba.rewards.math_answer import MathAnswer, equal_without_algebra
from tba.rewards.math_text import canonical_words, canonicalize, last_boxed
from tba.types import Completion, Prompt, StopReason, Version

# (right answer, another spelling)
SAME = [
    # fractions and decimals
    (r"\frac{1}{2}", "1/2"), (r"\frac{1}{2}", r"\dfrac12"), (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", ".5"),
    (r"\frac{1}{2}", r"\frac{2}{4}"), (r"\frac{1}{2}", r"2^{-1}"), (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    (r"-\frac{3}{4}", "-0.75"), (r"\frac{1}{3}", r"0.\overline{3}"), (r"\frac{7}{12}", r"0.58\overline{3}"),
    (r"\frac \pi4", r"\frac{\pi}{4}"), (r"\frac{\pi}{2}", r"\pi/2"), ("3", "3.0"), ("3", "+3"), ("0", "-0"),
    # mixed numbers
    (r"1\frac{1}{2}", r"\frac{3}{2}"), (r"\frac{3}{2}", r"1\dfrac12"), (r"4\frac{1}{5}", "4 1/5"),
    (r"2\frac{1}{4}", "2.25"),
    # roots, powers, combinatorics
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"2\sqrt{3}", r"2\sqrt3"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"), ("1024", r"2^{10}"), (r"\binom{5}{2}", "10"), ("120", "5!"),
    ("5000", r"5.0\times 10^3"),
    # intervals and inequalities
    (r"[2,\infty)", r"[2,+\infty)"), ("(0,1]", r"\left(0, 1\right]"), ("[0,1]", r"x \in [0,1]"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"), ("(0,1]", r"0 < x \le 1"), (r"[2,\infty)", r"x\ge 2"),
    (r"x\geq 2", r"x \ge 2"),
    # sets, several roots, their order
    (r"\{1,2\}", r"\{2,1\}"), ("1,2", "2, 1"), ("1,2", r"1 \text{ and } 2"), ("1,2", r"x=1 \text{ or } x=2"),
    ("1,2", r"\{1,2\}"), (r"2 \pm \sqrt{3}", r"2+\sqrt3, 2-\sqrt3"), (r"-\frac{1}{2}, 3", r"3,-\frac12"),
    (r"\emptyset", r"\varnothing"),
    # percent, money, units, angles
    (r"50\%", "50"), ("50", r"50\%"), (r"50\%", "0.5"), (r"\$18.90", "18.9"), ("18.90", r"\$18.90"),
    ("5", r"5\text{ cm}"), (r"5\text{ cm}", "5"), ("5", r"5 \mathrm{~cm}"), ("12", r"12\text{ square units}"),
    (r"90^\circ", "90"), ("90", "90°"), ("90", r"90\text{ degrees}"),
    (r"6\text{ feet }2\text{ inches}", r"6 \text{ ft } 2 \text{ in}"), (r"5\text{ m}", r"5\text{ meters}"),
    (r"12\text{ cm}^2", r"12 \text{ square centimeters}"), (r"60\text{ mph}", r"60\text{ miles/hour}"),
    (r"5\text{ m}", "5 m"), ("5m", "5"), ("5", "5 m"), (r"12\text{ hours}", "12 h"),
    (r"\$5", r"5\text{ dollars}"), (r"\$5", r"5\text{ dollars per hour}"), (r"9\text{ a.m.}", "9"),
    # numerals of programs and people, emphasis
    ("1000", "1e3"), ("1500", "1.5e3"), ("0.001", "1e-3"), ("1e3", "1000"), ("5000", "5 000"), ("1234050", "1 234 050"),
    ("5", "**5**"), ("5", "*5*"), (r"\frac{1}{2}", "**1/2**"),
    # thousands
    ("10000", "10,000"), (r"10,\!000", "10000"), ("10000", "10{,}000"), ("10000", r"10\,000"),
    # words and choices
    (r"\text{even}", "even"), (r"\text{east}", r"\text{East}"), (r"\text{(C)}", "C"), (r"\text{(C)}", "(C)"),
    (r"\text{June 20}", "June 20"), (r"\text{no solution}", "no solution"), (r"11\text{:}30", "11:30"),
    # matrices, points, complex numbers
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\[4pt] 2 \end{pmatrix}"),
    (r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}", r"\begin{pmatrix} \frac{1}{2} \\ 2 \end{pmatrix}"),
    (r"(3,\frac{\pi}{2})", r"\left(3, \pi/2\right)"), ("3+4i", "4i+3"),
    # equations and algebra
    ("5", "x=5"), ("x=5", "5"), ("y=2x+3", "2x+3"), ("x^2+2x+1", "(x+1)^2"), ("(x-1)(x+2)", "(x+2)(x-1)"),
    (r"\tan x", r"\frac{\sin x}{\cos x}"),
    # bases
    ("1101_2", "1101_{2}"), ("4210_5", "4210"),
    # what stands around an answer
    ("3", "$3$"), ("3", "3."), ("3", r"\,3"), ("3", "{3}"), ("3", r"\text{3}"), ("5", r"\approx 5"),
]  # fmt: skip

# (right answer, a wrong one)
OTHER = [
    (r"\frac{1}{3}", "0.33"), (r"\frac{1}{3}", "0.333333"), (r"\frac12", r"\frac21"), ("-3", "3"), ("3", "-3"),
    ("10", "100"), ("0.5", "0.55"), ("18.90", "18.80"), (r"1\frac12", "11/2"), ("12", "1 2"), ("5525", "525"),
    (r"\sqrt2", "1.41"), (r"\sqrt{2}", "1.414214"), (r"2\sqrt3", r"3\sqrt2"), (r"2\pi", "6.28"), ("10^6", "10^5"),
    (r"\frac{1}{2004!}", r"\frac{1}{2005!}"), ("10^{-9}", "10^{-8}"),
    ("[0,1]", "(0,1)"), ("[0,1]", "[0,1)"), (r"(-\infty,2)", r"(2,\infty)"), ("x>2", r"x\ge 2"), ("x>2", "x<2"),
    ("(1,2)", "(2,1)"), ("(3,4)", "3"), (r"\{1,2\}", r"\{1,3\}"), ("1,2", "1"), ("1", "1,2"), ("1,2", "1,2,3"),
    (r"2 \pm \sqrt{3}", r"2+\sqrt3"), ("5", r"5 \text{ or } 6"), ("0", r"\emptyset"),
    (r"5\text{ cm}", r"5\text{ inches}"), ("5 cm", "5 inches"), (r"5\text{ m}", r"5\text{ cm}"),
    (r"6\text{ feet }2\text{ inches}", r"6\text{ feet }3\text{ inches}"), ("6 feet 2 inches", "6 feet 3 inches"),
    (r"6\text{ feet }2\text{ inches}", "12"), (r"6\text{ feet}", r"6\text{ feet }2\text{ inches}"),
    (r"5\text{ volts}", r"5\text{ ohms}"), (r"5\ \text{acres}", r"5\ \text{miles}"), (r"5\,\Omega", r"5\text{ V}"),
    (r"3\text{ p.m.}", r"3\text{ a.m.}"), (r"\$5", r"5\text{ cents}"), (r"5\text{ euros}", r"\$5"),
    (r"20^\circ\text{C}", r"20^\circ\text{F}"), ("5 cm", "5 m"), ("5 km", "5 m"), ("5 kg", "5 g"), ("5 m", "5 s"),
    (r"5\text{ cm}", "5m"), (r"5\text{ m}^2", "5s^2"), ("x = 5 h", r"5\text{ min}"), ("60 km/h", "60 km"),
    (r"12\text{ cm}^2", r"12\text{ cm}^3"), (r"5\text{ km}", r"5\text{ km/h}"),
    ("1000", "1e4"), ("1000", "e3"), ("5000", "5 001"), ("5 000", "5"), ("12345", "12 345"), ("5", "**6**"),
    ("25", "*2*5"),
    (r"50\%", "5"), (r"50\%", "5000"), ("90", r"91^\circ"), ("100", r"200\text{ cm}"),
    (r"\text{even}", "odd"), (r"\text{(A)}", "B"), ("A", "B"), (r"\text{Evelyn}", "Carla"), ("2:30", "2:31"),
    ("3", r"\text{all real numbers}"), (r"\text{no solution}", "0"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"), ("3+4i", "3-4i"),
    ("x=5", "x=6"), ("5", "y=6"), ("x^2+2x+1", "x^2+1"), ("x+1", "x-1"), ("x+1", "y+1"), ("3", "3x"),
    (r"\sin x", r"\cos x"), ("1101_2", "1101_3"), ("-221_3", "-221_4"), ("1101_2", "1100_2"),
    ("3", ""), ("3", r"\frac{"), ("3", "}{"), ("3", r"\begin{pmatrix}"), ("3", "?" * 50), ("3", "3" * 3000),
]  # fmt: skip


@pytest.fixture(scope="module")
def reward() -> Iterator[MathAnswer]:
    reward = MathAnswer(processes=2, seconds=20.0)
    yield reward
    reward.close()


def answered(text: str, answer: str) -> tuple[Prompt, Completion]:
    prompt = Prompt("math", np.array([1], dtype=np.int32), "?", {"answer": answer})
    return prompt, Completion(np.array([1], dtype=np.int32), text, StopReason.EOS, (Version(), Version()))


def test_other_spellings_of_the_right_answer_are_right(reward: MathAnswer) -> None:
    marks = reward.grade([(given, right) for right, given in SAME])
    assert [pair for pair, mark in zip(SAME, marks, strict=True) if mark is not True] == []
    assert len(SAME) > 80


def test_wrong_answers_are_wrong_however_they_are_written(reward: MathAnswer) -> None:
    marks = reward.grade([(given, right) for right, given in OTHER])
    assert [pair for pair, mark in zip(OTHER, marks, strict=True) if mark is not False] == []
    assert len(OTHER) > 50


def test_every_right_answer_is_equal_to_itself_by_algebra_too(reward: MathAnswer) -> None:
    hard = [[right, right] for right, _ in (*SAME, *OTHER)]
    assert reward.children.ask(hard) == [True] * len(hard)


def test_a_response_is_marked_by_its_last_box_in_order(reward: MathAnswer) -> None:
    texts = [
        r"First \boxed{3}. No: $\boxed{\frac{1}{2}}$.",
        r"So $x = \boxed{0.5}$, which is half of one.",
        r"The answer is 1/2.",
        r"\boxed{\frac{1}{2}} or rather \boxed{\frac{1}{3}}",
        r"\fbox{1/2}",
        r"\boxed{\frac{1}{2}",
        r"\boxed{}",
    ]
    judged = reward.judge([answered(text, r"\frac{1}{2}") for text in texts])
    assert [j.reward for j in judged] == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert all(j.parts == {"ungraded": 0.0} for j in judged)


def test_a_problem_without_an_answer_is_refused(reward: MathAnswer) -> None:
    with pytest.raises(UserError, match="as its field 'answer'"):
        reward.judge([answered(r"\boxed{1}", "")])


def test_an_answer_that_takes_for_ever_is_wrong_and_counted_and_the_others_get_their_marks() -> None:
    reward = MathAnswer(processes=1, seconds=2.0)
    endless = r"\boxed{9^{9^{9^{9}}}}"
    judged = reward.judge([answered(t, "10") for t in (r"\boxed{10.0}", endless, r"\boxed{9+1}", r"\boxed{9}")])
    assert [j.reward for j in judged] == [1.0, 0.0, 1.0, 0.0]
    assert [j.parts["ungraded"] for j in judged] == [0.0, 1.0, 0.0, 0.0]
    assert reward.children.counts.total() == 1
    reward.close()


def test_a_grader_that_is_killed_is_replaced() -> None:
    reward = MathAnswer(processes=1)
    assert reward.grade([(r"\sqrt{12}", r"2\sqrt{3}")]) == [True]
    (child,) = reward.children.members
    child.process.kill()
    child.process.wait()
    assert reward.grade([(r"\sqrt{8}", r"2\sqrt{2}"), (r"\sqrt{8}", r"2\sqrt{3}")]) == [True, False]
    assert child not in reward.children.members
    reward.close()


HOLDER = """
import signal
from tba.rewards.math_answer import MathAnswer
reward = MathAnswer(processes=1, seconds=1.0)
assert reward.grade([("2^3", "4+4")]) == [True]
print(*[child.process.pid for child in reward.children.members], flush=True)
reward.children.members[0].stdin.write(b'["9^{9^{9^{9}}}", "1"]\\n')  # busy with what never ends
reward.children.members[0].stdin.flush()
signal.pause()
"""


def test_no_grader_outlives_a_run_that_is_killed_not_even_a_busy_one() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        pid = int(holder.stdout.readline())
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    pause, limit, stat = threading.Event(), time.monotonic() + 60, Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < limit, f"process {pid} is still there"
        pause.wait(0.05)


def test_what_is_plain_needs_no_process() -> None:
    reward = MathAnswer(processes=1)
    plain = [(r"\dfrac12", r"\frac{1}{2}"), (None, "3"), ("", "3"), ("odd", r"\text{even}"), ("1_3", "1_2")]
    assert reward.grade(plain) == [True, False, False, False, False]
    assert len(reward.children) == 0
    assert equal_without_algebra("0.5", r"\frac{1}{2}") is True
    assert equal_without_algebra(r"\sqrt{12}", r"2\sqrt{3}") is None


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match=r"by 0 processes in 5\.0 s each"):
        MathAnswer(processes=0)
    with pytest.raises(UserError, match="seconds above 0"):
        MathAnswer(seconds=0)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
        (r"\boxed{\left\{1,\frac12\right\}}", r"\left\{1,\frac12\right\}"),
        (r"$\boxed{\left\{1\right.}$", r"\left\{1\right."),  # a brace that is not closed, but escaped
        (r"\boxed 7.", "7"),
        (r"\boxed{6} \boxed $", "6"),
        (r"\boxed{1 \boxed{2} 3}", "2"),
        (r"\boxed{" * 5000 + r"\boxed{8}", "8"),
        (r"\fbox{x}", "x"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxedness{1}", None),
        (r"\boxed", None),
        ("none", None),
    ],
)
def test_the_last_whole_box_is_read(text: str, held: str | None) -> None:
    assert last_boxed(text) == held


@given(st.text(r"\{}boxed fract1 2,()$._", max_size=60))
def test_no_text_can_break_the_reading_of_answers(text: str) -> None:
    last_boxed(text)
    canonical_words(text)
    assert isinstance(equal_without_algebra(text, "3"), bool | None)


@given(st.sampled_from([a for pair in (*SAME, *OTHER) for a in pair if len(a) < 200]))
def test_a_canonical_spelling_is_its_own(answer: str) -> None:
    assert canonicalize(canonicalize(answer)) == canonicalize(answer)


def test_words_are_told_from_mathematics() -> None:
    assert [canonical_words(a) for a in (r"\text{Even}", "June 20", "(C)", r"\text{no solution}")] == [
        *("even", "june 20", "C", "no solution")
    ]
    assert [canonical_words(a) for a in (r"\sin x", "2x", r"a \cup b", "3", "x+1", "xy", "")] == [None] * 7
