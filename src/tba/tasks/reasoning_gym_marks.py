"""Grades answers by reasoning-gym's own scorers, some of which evaluate an answer as Python or as a formula.

Invariant: an answer is never run as code, and is graded in bounded time. The tables below name each data set of the
package version that was reviewed, by what its scorer does with an answer. Only scorers that read it in bounded time run
in this process; the others run in child processes, which are replaced when they take too long. An answer that a scorer
evaluates must have a plain form in which nothing but mathematics can be named or called, and it is evaluated in a child
that the kernel allows to compute and nothing else (`tba.rewards.confined`). What a child returns is a number from 0 to
1, or is ignored.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from tba.errors import UserError
from tba.rewards.children import Children, claim_stdout
from tba.rewards.confined import can_confine, confine, limit_memory
from tba.types import Completion, Json, Judgement, Prompt

log = logging.getLogger("tba.reward")

REVIEWED_VERSION = "0.1.25"  # the version of the package that the tables are true of

_READ_NAMES = """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
    bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum circuit_logic color_cube_rotation
    complex_arithmetic count_bits count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice
    emoji_mystery family_relationships figlet_font fraction_simplification futoshiki game_of_life game_of_life_halting
    gcd graph_color group_anagrams gsm_symbolic jugs kakurasu knights_knaves
    largest_island lcm leg_counting letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze
    mini_sudoku modulo_grid needle_haystack number_filtering number_format number_sequence number_sorting
    palindrome_generation palindrome_partitioning path_star polynomial_equations pool_matrix power_function
    prime_factorization products quantum_lock rearc rectangle_count rotate_matrix rotten_oranges
    self_reference sentence_reordering shortest_path simple_equations simple_geometry sokoban spell_backward
    string_manipulation string_splitting string_synthesis sudoku survo syllogism time_intervals tower_of_hanoi tsumego
    word_ladder word_sequence_reversal word_sorting zebra_puzzles
"""
READ_DATASETS = frozenset(_READ_NAMES.split())  # answers are compared as text, or read by int, float, json, searches
SLOW_DATASETS = frozenset({"coin_flip", "propositional_logic", "rubiks_cube", "rush_hour"})  # as at 1e999999999
_HASHES = "its problems follow the hash seed of a Python process, so that two processes mean two problems by one number"
REFUSED_DATASETS = {
    "composite": "it mixes other data sets: name one of them",
    "codeio": "it makes its problems by running code that a language model wrote, some of them anew in each process",
    **dict.fromkeys(("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"), _HASHES),
}

_SUM_FORM = re.compile(r"(?!.*\*\*)[\d\s+*/().-]*", re.ASCII | re.DOTALL)
_ROWS_FORM = re.compile(r"[\d\s,()\[\]'\"-]*", re.ASCII)
_BOARD_FORM = re.compile(r"[Q_\s,()\[\]'\"]*", re.ASCII)
_LETTERS_FORM = re.compile(r"[A-E\s,()\[\]'\"]*", re.ASCII)
_FORMULA_SIGNS = re.compile(r"(?:[\w\s+*/(),-]|\.(?=\d))*", re.ASCII)
_NAME = re.compile(r"[^\W\d]\w*", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z]\d*", re.ASCII)
_FUNCTIONS_OF_MATHEMATICS = """
    sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth asinh acosh atanh exp log ln sqrt Abs abs
    pi Rational
"""
_FUNCTIONS = frozenset(_FUNCTIONS_OF_MATHEMATICS.split())
_LATE_IMPORTS = (  # by sympy, when a formula first needs them: too late in a child that may open no file
    *("sympy.physics.units.util", "sympy.physics.units.systems.si", "sympy.physics.matrices", "sympy.sets.setexpr"),
    *("sympy.tensor.array.array_derivatives", "sympy.integrals.rde", "sympy.integrals.prde", "sympy.polys.polymatrix"),
)


def _is_formula(answer: str) -> bool:
    """Returns whether an answer has only numbers, operators, one-letter symbols and functions of mathematics."""
    names = _NAME.findall(answer)
    return bool(_FORMULA_SIGNS.fullmatch(answer)) and all(n in _FUNCTIONS or _SYMBOL.fullmatch(n) for n in names)


EVALUATED_FORMS: dict[str, Callable[[str], object]] = {  # and the form in which an answer may come
    "countdown": _SUM_FORM.fullmatch,
    "puzzle24": _SUM_FORM.fullmatch,
    "binary_matrix": _ROWS_FORM.fullmatch,
    "spiral_matrix": _ROWS_FORM.fullmatch,
    "n_queens": _BOARD_FORM.fullmatch,
    "string_insertion": _LETTERS_FORM.fullmatch,
    "simple_integration": _is_formula,
    "intermediate_integration": _is_formula,
}


@dataclass(frozen=True)
class Source:
    """Where problems come from: the arguments of `reasoning_gym.create_dataset`."""

    dataset: str
    parameters: str  # JSON object of the data set's own settings
    seed: int
    size: int


@dataclass(frozen=True)
class ReasoningGymScore:
    """A completion's score by the data set itself, 0 to 1: of the text in `<answer>` tags, else of the whole text.

    The part `ungraded` is 1 for an answer that the scorer did not grade: it took too long, raised an error or crashed;
    `unreadable` for one that was not in the form that is evaluated and was graded as an empty answer. Processes are
    started with the first answer that needs them, and end with the reward, or with the process that holds it.
    """

    sources: Mapping[str, Source]  # by split; all of one data set
    processes: int = 2  # that grade, each one answer at a time, if the data set needs them
    seconds: float = 5.0  # time limit for one answer there
    children: Children = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for source in self.sources.values():
            require_markable(source.dataset)
        sources_json = json.dumps({split: list(vars(source).values()) for split, source in self.sources.items()})
        command = (sys.executable, "-m", "tba.tasks.reasoning_gym_marks", str(self.seconds), sources_json)
        object.__setattr__(self, "children", Children(command, self.processes, self.seconds))

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each, in order."""
        questions = [(p.fields["split"], p.fields["index"], _answer(p.answer_in(c.text))) for p, c in answered]
        are_readable = [_is_readable(self.sources[split].dataset, answer) for split, _, answer in questions]
        scores = self.marks([(s, i, a if ok else "") for (s, i, a), ok in zip(questions, are_readable, strict=True)])
        failures = scores.count(None)
        if failures:
            log.warning("%d of %d answers could not be graded by reasoning-gym and count as 0", failures, len(scores))
        return [
            Judgement(score or 0.0, {"ungraded": float(score is None), "unreadable": float(not is_readable)})
            for score, is_readable in zip(scores, are_readable, strict=True)
        ]

    def marks(self, questions: Sequence[tuple[str, int, str]]) -> list[float | None]:
        """Returns the score of each (split, index of the problem, answer), in order; None: not graded."""
        local_splits = {split for split, source in self.sources.items() if source.dataset in READ_DATASETS}
        child_scores = iter(self.children.ask([list(q) for q in questions if q[0] not in local_splits]))
        return [
            _valid_score(mark(self.sources[split], index, answer) if split in local_splits else next(child_scores))
            for split, index, answer in questions
        ]

    def close(self) -> None:
        """End the scoring processes."""
        self.children.close()


def require_markable(dataset: str) -> None:
    """Raises `UserError` for a data set whose answers cannot be graded safely here."""
    version = importlib.metadata.version("reasoning-gym")
    if version != REVIEWED_VERSION:
        raise UserError(
            f"reasoning_gym {version} is installed, but its scorers were reviewed in {REVIEWED_VERSION} only: "
            f"`pip install reasoning-gym=={REVIEWED_VERSION}`"
        )
    if dataset in REFUSED_DATASETS:
        raise UserError(f"answers of reasoning_gym's {dataset} cannot be graded: {REFUSED_DATASETS[dataset]}")
    if dataset not in READ_DATASETS | SLOW_DATASETS | EVALUATED_FORMS.keys():
        raise UserError(
            f"answers of reasoning_gym's {dataset!r} cannot be graded: nobody has checked whether its scorer evaluates "
            "them as code; use a data set that tba.tasks.reasoning_gym_marks names"
        )
    if dataset in EVALUATED_FORMS and not can_confine():
        raise UserError(
            f"reasoning_gym's scorer of {dataset} evaluates answers as code, and this system has no seccomp to confine "
            "it: use Linux on x86_64 or aarch64, or another data set"
        )


def open_dataset(source: Source) -> Any:
    """Returns the data set of a source. Raises `UserError` when it does not exist."""
    return _create_dataset(source.dataset, source.parameters, source.seed, source.size)


@functools.lru_cache(maxsize=64)
def entry(source: Source, index: int) -> Any:
    """Returns problem `index` as reasoning-gym gives it; answers to one problem come one after another."""
    return open_dataset(source)[index]


def mark(source: Source, index: int, answer: str) -> float | None:
    """Returns the data set's own score of an answer; None if its scorer raises. It may hang or run it as code."""
    problem = entry(source, index)
    try:
        return float(open_dataset(source).score_answer(answer, entry=problem))
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
        return None  # such as int("x"), 10**400 as a float, a list where an object was expected


def _is_readable(dataset: str, answer: str) -> bool:
    return dataset not in EVALUATED_FORMS or bool(EVALUATED_FORMS[dataset](answer))


def _valid_score(score: Json) -> float | None:
    """Returns a score; None for anything but a number from 0 to 1."""
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    return float(score) if is_number and 0 <= score <= 1 else None


def _answer(text: str) -> str:
    _, tag, text_behind = text.rpartition("<answer>")
    return (text_behind.partition("</answer>")[0] if tag else text).strip()


@functools.cache
def _create_dataset(dataset: str, parameters: str, seed: int, size: int) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"the task reasoning_gym ({dataset}) needs the package reasoning-gym: `pip install reasoning-gym`"
        ) from error
    try:
        settings = json.loads(parameters)
    except (ValueError, RecursionError) as error:
        raise UserError(f"reasoning_gym has parameters {parameters!r}, which are not JSON: {error}") from error
    if not isinstance(settings, dict) or {"seed", "size"} & settings.keys():
        raise UserError(f"reasoning_gym has parameters {parameters!r}: give a JSON object without seed and size")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(
            f"reasoning_gym cannot make {dataset!r} with parameters {parameters}: {error} "
            "(reasoning_gym.factory.DATASETS lists the names)"
        ) from error


def serve(questions: IO[str], answers: IO[str], sources: Mapping[str, Source], seconds: float) -> None:
    """Read split, index and answer, write the score (null: none), until the input ends."""
    warnings.simplefilter("ignore")  # one shows the line that it is about, from a file
    for source in sources.values():
        mark(source, 0, entry(source, 0)["answer"])  # opens and imports what it will need
        mark(source, 0, "")
        if source.dataset not in EVALUATED_FORMS:
            mark(source, 0, "nothing that is an answer")
        if source.dataset in EVALUATED_FORMS:
            for module in _LATE_IMPORTS:
                importlib.import_module(module)
    if not any(source.dataset in EVALUATED_FORMS for source in sources.values()):
        limit_memory()  # nothing is evaluated
    elif not confine():
        raise UserError("this system does not confine a process in which answers are evaluated")
    print("ready", file=answers, flush=True)
    for line in questions:
        number, (split, index, answer) = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # whose signal ends a child that hangs without its parent
        score = mark(sources[split], index, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps([number, score]), file=answers, flush=True)
    os._exit(0)  # at its usual end the interpreter asks for more than it may


def main() -> None:
    """Run as the child."""
    answers = claim_stdout()
    seconds, sources_json = sys.argv[1:]
    sources = {split: Source(*source) for split, source in json.loads(sources_json).items()}
    serve(sys.stdin, answers, sources, float(seconds) + 1)


if __name__ == "__main__":
    main()
