"""A run that begins with its task's demonstrations, and what the best of its answers teach afterwards."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chat_families import tokenizer
from tba.__main__ import main
from tba.apps.red_team.near import NearDuplicates
from tba.assistant_turns import assistant_turn
from tba.command.collecting import Collected, SmoothingOptions, collect
from tba.environments.guess_number import GuessNumber
from tba.environments.task import EnvironmentTask
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.objectives.ppo import Ppo
from tba.recipe import InitialFill
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.runs.validating import notes_on_prompts
from tba.settings import find
from tba.training.supervised import Pair
from tba.training.tiny_models import character_tokenizer
from tba.types import Completion, Prompt, StopReason, Trajectory, Version

SUMS = str(Path(__file__).parents[1] / "tiny_sums.py")
FILLED = """
from dataclasses import replace
from pathlib import Path
from tiny_sums import recipe as sums
from tba.recipe import InitialFill
from tba.replay.buffer import BufferSettings
from tba.apps.red_team.near import HashedNgrams, NearDuplicates

buffer = BufferSettings(deduplicate=False, near_duplicates=NearDuplicates("cosine", 0.01, embedding=HashedNgrams(32)))
recipe = replace(
    sums,
    fill=InitialFill(demonstrations=30, files=(Path(__file__).with_name("more.jsonl"),)),
    replay=replace(sums.replay, buffer=buffer),
)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that began with 30 demonstrations and a file of two answers; near duplicates left its memory."""
    root = tmp_path_factory.mktemp("filled")
    (root / "filled.py").write_text(FILLED)
    asked = find(SUMS).task.problems("train")[0].prompt
    lines = [{"prompt": asked, "response": answer} for answer in ("12", "99")]
    (root / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(SUMS).parent))
        assert main(["train", str(root / "filled.py"), "--runs", str(root), "--run-name", "run"]) == 0
        assert main(["sft", SUMS, "--out", str(root / "base")]) == 0
    return root / "run"


def drained(run: Path) -> list[Trajectory]:
    with JournalFollower(run / "journal.sqlite") as journal:
        return journal.drain()


def test_a_run_begins_with_the_demonstrations_marked_and_scored_as_its_own_answers_are(run: Path) -> None:
    found = drained(run)
    shown = [t for t in found if t.provenance["searcher"] == "import:demonstrations"]
    assert len(shown) == 30
    assert {t.reward for t in shown} == {1.0}  # by the task, which nobody told that they are right
    problems = [p for p in find(SUMS).task.problems("train") if p.demonstration is not None]
    said = [(t.prompt.text, t.completion.text) for t in shown]
    assert said == [(p.prompt, p.demonstration) for p in problems[:30]]
    assert all(t.imported and t.log_reference.max() < 0 and t.completion.log_behavior is None for t in shown)
    assert [t.provenance["searcher"] for t in found[:2]] == ["import:more.jsonl"] * 2
    summary = Summary.read(run)
    assert summary is not None
    assert summary.trajectories.imported == 32
    assert summary.trajectories.duplicate > 0
    assert summary.trajectories.closes()
    assert summary.tokens.closes()
    lines = [json.loads(line) for line in (run / "imports.jsonl").read_text().splitlines()]
    assert [(line["source"], line["imported"]) for line in lines] == [("more.jsonl", 2), ("demonstrations", 30)]


def test_the_best_answers_of_a_run_are_learnt_by_the_model_that_it_began_with(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(SUMS).parent))
    capsys.readouterr()
    settings = ("--sft.steps", "25", "--sft.lr", "0.01", "--sft.batch-size", "64")
    assert main(["sft", str(run), "--min-reward", "1", "--out", str(tmp_path / "smooth"), "--trust", *settings]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    good = {(t.prompt.key, t.completion.digest) for t in drained(run) if t.reward == 1 and not _cut(t)}
    assert f"{len(good):,} answers to learn" in printed
    asked = [(t.prompt, [t.completion]) for t in drained(run) if t.reward == 1 and not _cut(t)]
    models = [HuggingFace(str(folder), "cpu") for folder in (run.parent / "base", tmp_path / "smooth")]
    scores = [model.reference(1.0, Version()).log_probabilities_of(asked) for model in models]
    before, after = (sum(float(row.sum()) for (row,) in score) for score in scores)
    assert after > before
    assert main(["sft", str(run), "--out", str(tmp_path / "none"), "--trust"]) == 2
    assert "needs --min-reward" in capsys.readouterr().err


def _cut(t: Trajectory) -> bool:
    return t.completion.stop_reason is StopReason.LENGTH


def answer(
    tokens: tuple[int, ...], reward: float, log_reference: float, stop: StopReason = StopReason.EOS
) -> Trajectory:
    completion = Completion(np.array(tokens, dtype=np.int32), "", stop, (Version(), Version()))
    logs = np.full(len(tokens), log_reference / len(tokens), dtype=np.float32)
    prompt = Prompt("toy", np.array([5, 6], dtype=np.int32))
    return Trajectory(f"t{tokens}{reward}{stop}", prompt, completion, reward, logs, Version(), {"toxic": reward / 2})


def test_what_is_collected_is_the_best_of_each_and_what_is_left_out_is_counted_by_its_reason(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with JournalWriter(journal, "searcher-0") as writer:
        writer.put(
            [
                answer((1, 2, 3, 4, 0), 0.8, -9.0),
                answer((1, 2, 3, 4, 0), 0.9, -9.0),  # the same answer, which got more
                answer((1, 2, 7, 4, 0), 1.0, -9.0),  # one edit away
                answer((8, 8, 8, 0), 0.75, -9.0),
                answer((9, 9, 9, 0), 0.2, -9.0),
                answer((5, 5, 5, 0), 0.9, -200.0),
                answer((6, 6, 6), 0.9, -9.0, StopReason.LENGTH),
            ]
        )
    options = SmoothingOptions(min_reward=0.7, min_log_reference=-100.0)
    found = collect(journal, options)
    assert [t.reward for t in found.trajectories] == [1.0, 0.9, 0.75]
    assert found.pairs(character_tokenizer("abc"), chat=False)[0].response == [1, 2, 7, 4]
    assert found.pairs(character_tokenizer("abc"), chat=False)[0].prompt == [5, 6]
    reasons = {"repeats another": 1, "below --min-reward": 1, "below --min-log-reference": 1, "cut off": 1}
    assert +found.omissions == Counter(reasons)
    apart = collect(journal, replace(options, truncated=True), NearDuplicates("edit", 0.2))
    assert [t.completion.tokens[0] for t in apart.trajectories] == [1, 6, 8]
    assert apart.omissions["near another"] == 1
    assert apart.pairs(character_tokenizer("abc"), chat=False)[1].response == [6, 6, 6]
    assert [t.reward for t in collect(journal, replace(options, most=1)).trajectories] == [1.0]
    by_part = collect(journal, SmoothingOptions(min_reward=0.45, part="toxic"))
    assert {t.reward for t in by_part.trajectories} == {1.0, 0.9}
    for wrong, said in (
        (replace(options, part="kind"), r"no part 'kind' \(toxic\)"),
        (replace(options, min_reward=2.0), "7 below --min-reward"),
    ):
        with pytest.raises(UserError, match=said):
            collect(journal, wrong)


def test_an_episode_of_several_segments_is_left_out_and_counted(tmp_path: Path) -> None:
    journal, whole = tmp_path / "journal", answer((1, 2, 3, 4, 0), 0.9, -9.0)
    mask, begins = np.array([True, True, False, True, True]), np.array([2], np.int32)
    parts = replace(whole, uid="parts", completion=replace(whole.completion, mask=mask, begins=begins))
    with JournalWriter(journal, "searcher-0") as writer:
        writer.put([whole, parts])
    found = collect(journal, SmoothingOptions(min_reward=0.7))
    assert [t.uid for t in found.trajectories] == [whole.uid]
    assert +found.omissions == Counter({"of several segments": 1})


@pytest.mark.parametrize("family", ["gemma3", "qwen2.5", "glm4.5", "phi3"])
def test_what_is_collected_ends_as_it_ended_and_what_was_heard_is_not_learnt(family: str) -> None:
    made = tokenizer(family, "base")
    end, eos = assistant_turn(made).final_frame.token, made.eos_token_id
    assert end != eos
    chat, text, prompt = True, False, Prompt("toy", np.array([5], np.int32))

    def pair(form: bool, *tokens: int | None, stop: StopReason, mask: str = "") -> Pair:
        said = np.array(tokens, np.int32)
        heard = np.array([one == "1" for one in mask]) if mask else None
        completion = Completion(said, "", stop, (Version(), Version()), mask=heard)
        found = Trajectory("t", prompt, completion, 1.0, np.zeros(len(said), np.float32), Version())
        (made_of,) = Collected([found], Counter()).pairs(made, form)
        return made_of

    assert pair(chat, 1, 2, end, stop=StopReason.EOS) == Pair([5], [1, 2], end=end)
    assert pair(chat, 1, 2, eos, stop=StopReason.EOS) == Pair([5], [1, 2], end=eos)
    assert pair(chat, 1, 2, end, stop=StopReason.EXTERNAL) == Pair([5], [1, 2], end=end)
    assert pair(chat, 1, 2, stop=StopReason.LENGTH) == Pair([5], [1, 2], end=end)  # as if it ended there
    assert pair(text, 1, 2, stop=StopReason.LENGTH) == Pair([5], [1, 2], end=eos)
    assert pair(text, 1, 2, eos, stop=StopReason.EOS) == Pair([5], [1, 2], end=eos)
    episode = pair(chat, 1, end, 7, 8, 3, end, stop=StopReason.EOS, mask="110011")
    assert episode == Pair([5], [1, end, 7, 8, 3], ((2, 4),), end)
    assert pair(chat, 1, end, 7, stop=StopReason.LENGTH, mask="110") == Pair([5], [1, end, 7], ((2, 3),), end)


def test_a_recipe_that_cannot_begin_so_is_refused() -> None:
    recipe = find(SUMS)
    with pytest.raises(UserError, match="needs what demonstrations lack"):
        replace(recipe, fill=InitialFill(demonstrations=3), objective=Ppo())
    with pytest.raises(UserError, match=r"--fill\.demonstrations is -1"):
        InitialFill(demonstrations=-1)


def test_a_single_prompt_whose_memory_is_smaller_than_all_there_is_room_for_is_named() -> None:
    recipe = find(SUMS)
    alone = replace(recipe, prompts=replace(recipe.prompts, limit=1))
    (note,) = notes_on_prompts(alone)
    assert "--replay.buffer.per-prompt 100000" in note
    assert notes_on_prompts(recipe) == []
    worlds = EnvironmentTask(GuessNumber, turns=2, worlds=3, held_out=1)  # all begin with the same text
    assert notes_on_prompts(replace(recipe, task=worlds)) == []
    assert notes_on_prompts(replace(recipe, task=replace(worlds, worlds=1))) == [note]
