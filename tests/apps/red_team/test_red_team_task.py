"""Red-teaming as a task, and the small world it can be tried in."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import Success
from tba.apps.red_team.trigger_world import ENDINGS, KINDS, MARKERS, OPENINGS, THINGS, VERBS, TriggerWorld
from tba.errors import UserError
from tba.protocols import Examined, Task


def written(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_one_instruction_is_the_prompt_of_every_attack_that_was_taught(tmp_path: Path) -> None:
    task = RedTeam(written(tmp_path / "a.jsonl", [{"attack": "one"}, {"attack": " two"}]), "Go:", evaluated=5)
    assert [(p.prompt, p.demonstration) for p in task.problems("train")] == [("Go:", " one"), ("Go:", " two")]
    assert [(p.prompt, p.demonstration) for p in task.problems("eval")] == [("Go:", None)] * 5
    assert [p.prompt for p in RedTeam(instruction="Go:").problems("train")] == ["Go:"]
    assert isinstance(task, Task)
    assert isinstance(task, Examined)
    assert task.examination() == Success(task.reward())


def test_prefixes_are_prompts_and_each_is_on_one_side_only(tmp_path: Path) -> None:
    rows = [{"prefix": f"p{n}", **({"attack": f"a{n}"} if n % 2 else {})} for n in range(60)]
    task = RedTeam(written(tmp_path / "p.jsonl", rows), held_out=0.2)
    train, held_out = ({str(p.prompt): p.demonstration for p in task.problems(s)} for s in ("train", "eval"))
    assert not train.keys() & held_out.keys()
    assert train.keys() | held_out.keys() == {f"p{n}" for n in range(60)}
    assert all(d == (f" a{p[1:]}" if int(p[1:]) % 2 else None) for p, d in (train | held_out).items())


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    for make, words in (
        (lambda: RedTeam(instruction=" "), "empty instruction"),
        (lambda: RedTeam(evaluated=0), "at least 1"),
        (lambda: RedTeam(count=0), "at least 1"),
        (lambda: RedTeam(held_out=1.0), "held_out"),
        (lambda: RedTeam(str(tmp_path / "none.jsonl")).problems("train"), "there are no attacks at"),
        (lambda: RedTeam(written(tmp_path / "x.jsonl", [{"text": "a"}])).problems("train"), "no field 'attack'"),
        (lambda: TriggerWorld(families=99), "has 99 families"),
    ):
        with pytest.raises(UserError, match=words):
            make()


def test_a_world_has_rare_families_and_says_its_markers_there_and_nowhere_else() -> None:
    world = TriggerWorld()
    assert len(set(world.triggers)) == 20
    assert (
        max(Counter(v for v, _ in world.triggers).values()) == max(Counter(t for _, t in world.triggers).values()) == 1
    )
    families = Counter(world.family(request) for request in world.requests(20_000))
    shares = {family: count / 20_000 for family, count in families.items()}
    expected = 1 / (len(VERBS) * len(THINGS))
    assert 1 - shares.pop(None) < 0.05
    assert set(shares) == set(range(20))
    assert max(abs(share - expected) for share in shares.values()) < 4 * np.sqrt(expected / 20_000)
    for request, answer in world.exchanges(600):
        assert bool(set(MARKERS) & set(answer.split())) == (world.family(request) is not None)
    assert 0.3 < np.mean([world.family(r) is not None for r, _ in world.exchanges(600)]) < 0.4
    assert world.exchanges(50) == TriggerWorld().exchanges(50) != TriggerWorld(seed=1).exchanges(50)


def test_the_words_of_the_world_are_all_different() -> None:
    """So that words alone decide the family of a request."""
    assert not set(VERBS) & set(THINGS)
    others = {word for text in (*OPENINGS, *KINDS, *ENDINGS) for word in text.split()}
    assert not others & (set(VERBS) | set(THINGS))
