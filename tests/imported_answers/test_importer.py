"""Trajectories from anywhere, on the enumerable toy: marked and scored by the run itself, every line accounted for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tba.environments.recorded import chat_writer
from tba.generation import generate
from tba.imported_answers.encoding import Encoder, TaskPrompts
from tba.imported_answers.importer import CHUNK, AnswerImporter, Entry
from tba.protocols import Reward
from tba.record.ledger import Ledger
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.rollout.prompts import PromptSettings, encode
from tba.tables import Values, read_table
from tba.types import ELSEWHERE, Completion, Judgement, Prompt, Sampling, Trajectory, Version
from toy.engine import TabularEngine
from toy.policy import TabularReference, TabularTask, TabularTokenizer

TASK = TabularTask()  # prompts a and b to train on, c and d held out, answers of up to three of A to D
TOKENIZER = TabularTokenizer(TASK.symbols)
PROMPTS = {
    split: encode(TASK.problems(split), TASK.name, TOKENIZER, PromptSettings()).prompts for split in ("train", "eval")
}
ENCODER = Encoder(
    *(TASK.name, TOKENIZER, TaskPrompts(PROMPTS["train"]), TaskPrompts(PROMPTS["eval"]), False, 8, TASK.length),
    turn_writer=chat_writer(TOKENIZER),
)
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def importer(journal: JournalWriter, reward: Reward | None = None, **settings: Any) -> AnswerImporter:
    return AnswerImporter(ENCODER, reward or TASK.reward(), TabularReference(TASK), journal, **settings)


def numbered(lines: Sequence[Values]) -> list[Entry]:
    return list(enumerate(lines, 1))


def line(prompt: str, response: str, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "response": response,
        **({"stop_reason": "length"} if len(response) == 3 else {}),
        **fields,
    }


def drained(path: Path) -> list[Trajectory]:
    with JournalFollower(path) as journal:
        return journal.drain()


def test_an_answer_gets_the_tasks_reward_and_the_references_log_probabilities(tmp_path: Path) -> None:
    lines = [line("a", "BA", reward=99.0), line("b", "ADC", source="a friend"), line("a", "D")]
    with JournalWriter(tmp_path / "journal", "import") as journal:
        report = importer(journal).import_entries(numbered(lines), "demos")
    assert (report.imported, report.claimed, report.disagreed, report.refused) == (3, 1, 1, 0)
    reference = TabularReference(TASK)
    for trajectory, row in zip(drained(tmp_path / "journal"), lines, strict=True):
        prompt, completion = trajectory.prompt, trajectory.completion
        assert (prompt.text, completion.text) == (row["prompt"], row["response"])
        assert trajectory.reward == TASK.rewards_QO[TASK.question(prompt), TASK.outcome(completion.tokens)]
        assert np.array_equal(trajectory.log_reference, reference.log_probabilities(prompt, [completion])[0])
        assert trajectory.version == ELSEWHERE
        assert trajectory.completion.log_behavior is None
        assert trajectory.provenance["searcher"] == "import:demos"
        assert trajectory.provenance["reward"] == "task"
    assert [t.provenance.get("claimed_reward") for t in drained(tmp_path / "journal")] == [99.0, None, None]
    assert [t.provenance.get("source") for t in drained(tmp_path / "journal")] == [None, "a friend", None]


def test_a_claimed_reward_is_believed_by_order_only_and_recorded_as_claimed(tmp_path: Path) -> None:
    lines = [line("a", "B", reward=0.25), line("a", "C"), line("a", "D", reward="high")]
    with JournalWriter(tmp_path / "journal", "import") as journal:
        report = importer(journal, believe=True).import_entries(numbered(lines), "demos")
    believed, graded = drained(tmp_path / "journal")
    assert (believed.reward, believed.reward_parts, believed.provenance["reward"]) == (
        0.25,
        {"claimed": 0.25},
        "claimed",
    )
    assert graded.provenance["reward"] == "task"
    assert list(report.rejected) == ["its reward is not finite"]


def test_a_reward_that_the_loss_cannot_square_is_refused_with_what_it_was(tmp_path: Path) -> None:
    rewards = [-1e9, 1e20, 1e400, 10**400, float("nan")]
    lines = [line("a", answer, reward=reward) for answer, reward in zip("BCDAA", rewards, strict=True)]
    with JournalWriter(tmp_path / "journal", "import") as journal:
        report = importer(journal, believe=True, largest_reward=1e9).import_entries(numbered(lines), "demos")
    assert [t.reward for t in drained(tmp_path / "journal")] == [-1e9]
    large, infinite = "its reward is beyond 1e+09, which the loss can square", "its reward is not finite"
    assert {reason: rejected.count for reason, rejected in report.rejected.items()} == {large: 1, infinite: 3}
    assert report.rejected[large].examples == [(2, "1e+20 (claimed 1e+20) for 'C' to 'a'")]


def test_the_same_file_again_adds_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    lines = [line("a", "B"), line("a", "B"), line("b", "CC"), line("b", "BAD")]
    with JournalWriter(tmp_path / "journal", "import") as journal:
        for repeated, given_lines in ((0, lines[:3]), (3, lines), (4, lines)):
            report = importer(journal).import_entries(numbered(given_lines), "demos")
            assert (report.repeated, report.imported) == (repeated, len(given_lines) - repeated)
        assert (
            importer(journal).import_entries(numbered(lines), "other").imported == 4
        )  # another source is other evidence
    assert len(drained(tmp_path / "journal")) == 8
    with JournalFollower(tmp_path / "journal") as follower:
        counts = follower.counters()["import"]
    assert counts == {"imported_trajectories": 8, "imported_tokens": 2 * (2 + 2 + 3 + 3)}


@dataclass(frozen=True)
class Picky:
    """The toy's reward, which raises for answers with a D and has no number for those with a C."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        if any("D" in c.text for _, c in answered):
            raise ZeroDivisionError("no marks\nfor D")
        marks = TASK.reward().judge(answered)
        return [
            Judgement(float("nan")) if "C" in c.text else mark for (_, c), mark in zip(answered, marks, strict=True)
        ]


def test_what_the_reward_cannot_mark_is_refused_alone(tmp_path: Path) -> None:
    answers = ["".join(letters) for letters in itertools.product("ABCD", repeat=2)]
    with JournalWriter(tmp_path / "journal", "import") as journal:
        report = importer(journal, Picky()).import_entries(numbered([line("a", answer) for answer in answers]), "demos")
    assert {t.completion.text for t in drained(tmp_path / "journal")} == {"AA", "AB", "BA", "BB"}
    assert {reason: rejected.count for reason, rejected in report.rejected.items()} == {
        "the task's reward cannot grade it": 7,
        "its reward is not finite": 5,
    }
    assert report.rejected["the task's reward cannot grade it"].examples[0] == (4, "ZeroDivisionError: no marks for D")


def test_more_lines_than_are_written_together_all_arrive_in_order(tmp_path: Path) -> None:
    lines = [line("ab"[n % 2], "ABCD"[n // 2 % 4] * (1 + n // 8 % 2)) for n in range(CHUNK + 100)]
    with JournalWriter(tmp_path / "journal", "import") as journal:
        report = importer(journal).import_entries(numbered(lines), "demos")
    assert report.imported == report.lines == CHUNK + 100
    assert [t.completion.text for t in drained(tmp_path / "journal")] == [row["response"] for row in lines]


def test_trajectories_of_another_run_come_with_their_behaviour(tmp_path: Path) -> None:
    engine = TabularEngine(TASK, Version(0, 3))
    (completions,) = generate(engine, PROMPTS["train"][:1], 5, Sampling(), np.random.default_rng(0))
    zeros = [np.zeros(len(c.tokens), dtype=np.float32) for c in completions]
    old = [
        Trajectory(f"u{i}", PROMPTS["train"][0], c, 7.0, zero, Version(0, 2), provenance={"searcher": "searcher-0"})
        for i, (c, zero) in enumerate(zip(completions, zeros, strict=True))
    ]
    lines: list[Entry] = [*enumerate(old, 1), (6, line("a", "A"))]
    with JournalWriter(tmp_path / "journal", "import") as journal:
        report = importer(journal, needs_behavior=True).import_entries(lines, "old")
    assert list(report.rejected) == ["no log-probabilities of its behaviour, which the run's objective needs"]
    trajectories = drained(tmp_path / "journal")
    for new, was in zip(trajectories, old, strict=True):
        assert new.completion.log_behavior is not None
        assert was.completion.log_behavior is not None
        assert np.array_equal(new.completion.log_behavior, was.completion.log_behavior)
        assert (new.version, new.provenance["version"], new.provenance["was"]) == (
            *(ELSEWHERE, "0.3"),
            {"searcher": "searcher-0"},
        )
        assert new.reward != 7.0
        assert new.reference == Version()


TEXT = st.text(alphabet="ABCDabcd$é\ud800\n ", max_size=5)
PLAIN = st.fixed_dictionaries(
    {"prompt": TEXT, "response": TEXT}, optional={"reward": st.floats() | st.none(), "stop_reason": st.just("length")}
)
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}))}
)
LINE = st.one_of(
    st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b"")),
    (PLAIN | CHAT).map(lambda values: json.dumps(values).encode()),
    st.dictionaries(st.sampled_from(["prompt", "response", "messages", "x"]), st.none() | st.integers() | TEXT).map(
        lambda values: json.dumps(values).encode()
    ),
)


@FUZZ
@given(st.lists(LINE, max_size=30), st.booleans())
def test_any_file_is_taken_in_without_an_error_and_without_losing_a_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], believe: bool
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "lines.jsonl").write_bytes(b"\n".join(lines))
    with JournalWriter(folder / "journal", "import") as journal:
        report = importer(journal, believe=believe).import_entries(read_table(folder / "lines.jsonl"), "fuzz")
        again = importer(journal, believe=believe).import_entries(read_table(folder / "lines.jsonl"), "fuzz")
    assert report.lines == sum(bool(raw.strip()) for raw in lines)
    assert report.lines == report.imported + report.repeated + report.refused
    assert (again.imported, again.repeated, again.refused) == (0, report.imported, report.refused)
    trajectories = drained(folder / "journal")
    assert (len(trajectories), sum(t.length for t in trajectories)) == (report.imported, report.tokens)
    with JournalFollower(folder / "journal") as follower:
        ledger = Ledger.gather(follower.counters(), "tokens")
        assert ledger.imported == follower.undrained()["tokens"] == report.tokens
    for trajectory in trajectories:
        assert trajectory.prompt.text not in ("c", "d")
        assert (
            TOKENIZER.decode(trajectory.completion.tokens.tolist(), skip_special_tokens=True)
            == trajectory.completion.text
        )
        assert np.isfinite(trajectory.log_reference).all()
        assert replace(trajectory, uid="").reward == trajectory.reward  # finite: a NaN would differ from itself
