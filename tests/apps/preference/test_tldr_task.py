"""Summaries: rows, splits, and the two rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from tba.apps.preference.reward_model import LengthPricedScore, ModelScore, Win
from tba.apps.preference.tldr import Tldr
from tba.errors import UserError
from tba.protocols import Examined, Task
from tba.types import Completion, Prompt, StopReason, Version


def written(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS: list[dict[str, object]] = [{"post": f"post {n}", "tldr": f"summary {n}"} for n in range(60)]


def test_posts_are_asked_for_a_summary_and_are_on_one_side_only(tmp_path: Path) -> None:
    task = Tldr(written(tmp_path / "posts.jsonl", [*ROWS, ROWS[0]]), reward_model="somewhere")
    train, held_out = task.problems("train"), task.problems("eval")
    assert len(train) + len(held_out) == 60
    assert held_out
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}
    number = str(train[0].prompt).removeprefix("post ").removesuffix("\n\nTL;DR:")
    assert train[0].prompt == f"post {number}\n\nTL;DR:"
    assert train[0].demonstration == train[0].fields["reference"] == f" summary {number}"
    assert isinstance(task, Task)
    assert isinstance(task, Examined)


def test_other_names_are_read_and_a_cue_that_is_there_is_not_added_again(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"query": f"POST: {n}\nTL;DR:", "reference_response": f"s{n}"} for n in range(40)]
    train = Tldr(written(tmp_path / "posts.jsonl", rows)).problems("train")
    assert all(str(p.prompt).endswith("\nTL;DR:") and str(p.prompt).count("TL;DR:") == 1 for p in train)


def test_an_end_that_a_summary_spells_is_not_part_of_it(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"post": f"p{n}", "summary": f" s{n}<|endoftext|>"} for n in range(40)]
    train = Tldr(written(tmp_path / "posts.jsonl", rows)).problems("train")
    assert all(p.demonstration == p.fields["reference"] for p in train)
    assert all(str(p.demonstration)[1] == "s" and str(p.demonstration)[2:].isdigit() for p in train)


def test_rows_without_a_post_or_summary_or_too_long_ones_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad: list[dict[str, object]] = [{"post": "p"}, {"tldr": "s"}, {"post": "x" * 101, "tldr": "s"}]
    bad += [{"post": "TL;DR:", "tldr": "s"}, {"post": "p", "tldr": "!!! :)"}, {"post": "\ud800 p", "tldr": "s"}]
    task = Tldr(written(tmp_path / "posts.jsonl", [*ROWS, *bad]), longest=100)
    assert len(task.problems("train")) + len(task.problems("eval")) == 60
    reasons = {record.getMessage().split(": ")[1] for record in caplog.records}
    assert {"no post", "no summary", "a post or a summary without words"} <= reasons
    echo = Tldr(task.path, longest=100, demonstrated="echo")
    assert len({str(p.fields["reference"]) for s in ("train", "eval") for p in echo.problems(s)}) == 60
    with pytest.raises(UserError, match=r"leaves no post for train \(no summary \(1\)\)"):
        Tldr(written(tmp_path / "none.jsonl", bad[:1])).problems("train")


def test_it_is_trained_on_the_proxy_and_examined_by_the_gold_model() -> None:
    task = Tldr(reward_model="proxy", gold="gold", without_eos=None)
    assert task.reward() == ModelScore("proxy", None)
    assert task.examination() == Win(ModelScore("gold", None))
    assert Tldr(reward_model="proxy").examination() == Win(ModelScore("proxy"))
    with pytest.raises(UserError, match="needs a reward model"):
        Tldr().reward()


def test_what_a_supervised_start_learns_is_the_summary_or_to_copy(tmp_path: Path) -> None:
    text = "We lost the first game. Then we won two of them."
    path = written(tmp_path / "posts.jsonl", [{"post": f"{text} {n} people came.", "tldr": "won"} for n in range(40)])
    ways: tuple[Literal["summary", "sentence", "sentences", "echo"], ...] = ("summary", "sentence", "sentences", "echo")
    summaries, one, each, echoes = (Tldr(path, demonstrated=way).problems("train") for way in ways)
    assert {p.demonstration for p in summaries} == {" won"}
    assert [p.prompt for p in summaries] == [p.prompt for p in one] == [p.prompt for p in each[::3]]
    assert all(str(p.demonstration) in f" {p.prompt}" for p in (*one, *each))
    chosen = {str(p.demonstration)[1:3] for p in one}
    assert chosen > {"We", "Th"}  # not always the same one
    assert [p.demonstration for p in each[:2]] == [" We lost the first game.", " Then we won two of them."]
    assert [p.demonstration for p in each] == [p.demonstration for p in echoes]
    assert all(p.prompt == f"{str(p.demonstration).strip()}\n\nTL;DR:" for p in echoes)
    assert all(p.fields["reference"] == " won" for p in (*one, *each, *echoes))


class _Known(ModelScore):
    """Scores that are known: 3 for each summary."""

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float | None]:
        assert {document for document, _ in pairs} == {"the post"}
        return [3.0 for _ in pairs]


def test_a_chat_model_is_asked_in_a_message_and_judged_on_the_post_alone(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"post": f"{{post}} {n}", "tldr": f"s{n}"} for n in range(40)]
    path = written(tmp_path / "posts.jsonl", rows)
    asked = Tldr(path, ask="Post: {post}\nWhat is it about?").problems("train")
    plain = Tldr(path).problems("train")
    for a, b in zip(asked, plain, strict=True):  # the same posts are held out
        post = str(b.prompt).removesuffix("\n\nTL;DR:")
        assert a.prompt == ({"role": "user", "content": f"Post: {post}\nWhat is it about?"},)
        assert a.fields == {"reference": str(b.fields["reference"]).strip(), "document": post}
        assert a.demonstration == a.fields["reference"]
    with pytest.raises(UserError, match=r"put \{post\} where the post goes"):
        Tldr(path, ask="What?")


def test_a_length_other_than_the_wanted_one_costs_its_logarithm() -> None:
    prompt = Prompt("tldr", np.array([1], np.int32), "<user>the post", {"document": "the post", "reference": "a b"})
    texts = ["a b c d", "a b", "a b c d e f g h", ""]
    answers = [Completion(np.array([1], np.int32), text, StopReason.EOS, (Version(), Version())) for text in texts]
    judged = LengthPricedScore(_Known("there"), 4, 2.0).judge([(prompt, answer) for answer in answers])
    assert [j.reward for j in judged] == pytest.approx([3 - 2 * math.log(x) for x in (1, 2, 2, 8)])
    assert [j.parts["words"] for j in judged] == [4, 2, 8, 0]
    assert all(j.parts["score"] == 3 for j in judged)
    task = Tldr(reward_model="proxy", gold="gold", words=4, per_length=2.0)
    assert task.reward() == LengthPricedScore(ModelScore("proxy"), 4, 2.0)
    assert task.examination() == Win(ModelScore("gold"))  # a win is a win, at any length
    with pytest.raises(UserError, match="0 words: any"):
        Tldr(words=-1)
