"""Episodes of an environment that others have played, on the toy whose plays can all be counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.environments.turning_toy import SYMBOLS, Play, Turning, plays
from tests.runtime.runs import inline, made

from tba.environments.hosts import InProcessHost
from tba.environments.recorded import EpisodeReplays, episode_writer
from tba.environments.task import EnvironmentTask
from tba.environments.turn_encoding import TurnEncoder
from tba.imported_answers.encoding import EncodedAnswer, Encoder, TaskPrompts
from tba.imported_answers.parsing import ImportedAnswer
from tba.imported_answers.report import Report
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.rollout.prompts import PromptSettings, encode
from tba.runs.importing import import_answers
from tba.runtime.graders import grader_of
from tba.runtime.importing import build_importer, importer_of, replay_hosts_of
from tba.runtime.inline import Inline
from tba.runtime.reporting import summarise
from tba.runtime.run_directory import IMPORTS
from tba.runtime.teaching import reference_of
from tba.tables import Refusal
from tba.types import ELSEWHERE, Completion, Json, StopReason, Trajectory
from toy.policy import TabularTokenizer

TOY = Path(__file__).with_name("turning_toy.py")
WORLDS = {"a": 0, "b": 1}


def trajectories(run: Path) -> list[Trajectory]:
    with JournalFollower(run / "journal.sqlite") as journal:
        return journal.drain()


def whole_plays(seed: int) -> list[Play]:
    """The episodes of three symbols; the others end with the token that no text has."""
    return [play for play in plays(Turning, seed) if 0 not in play.tokens]


def line(prompt: str, play: Play, **fields: Json) -> dict[str, Any]:
    roles = ("assistant" if is_turn else "user" for is_turn in play.mask)
    letters = (SYMBOLS[token - 1] for token in play.tokens)
    messages = [{"role": role, "content": letter} for role, letter in zip(roles, letters, strict=True)]
    return {"prompt": prompt, "messages": messages, **fields}


def test_every_imported_episode_has_the_tokens_the_mask_and_the_reward_of_its_play(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", source=TOY)
    played = [(prompt, play) for prompt, seed in WORLDS.items() for play in whole_plays(seed)]
    lines = [line(prompt, play, reward=7.0) for prompt, play in played]
    path = tmp_path / "episodes.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    for _ in range(2):
        import_answers(recipe, run, [path], lambda line: None)
    rows = trajectories(run.path)
    assert len(rows) == len(played) == 2 * 4**3
    for row, (prompt, play) in zip(rows, played, strict=True):
        assert (row.prompt.text, row.prompt.seed) == (prompt, WORLDS[prompt])
        assert tuple(row.completion.tokens.tolist()) == play.tokens
        assert row.completion.mask is not None
        assert tuple(row.completion.mask.tolist()) == play.mask
        assert abs(row.reward - play.reward) < 1e-6
        assert row.reward_parts["turns"] == 3
        assert row.version == ELSEWHERE
        assert (row.provenance["claimed_reward"], row.provenance["reward"]) == (7.0, "task")


def taken(report: Report) -> tuple[int, int, dict[str, int]]:
    return report.imported, report.repeated, {reason: r.count for reason, r in report.rejected.items()}


def test_an_episode_that_another_world_would_have_answered_is_refused_and_a_name_makes_it_known(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", source=TOY)
    first, *_ = whole_plays(0)
    other = next(play for play in whole_plays(1) if play.tokens[0] == first.tokens[0] and play.tokens != first.tokens)
    short = {**line("a", first), "messages": line("a", first)["messages"][:3]}
    with importer_of(recipe, run, False, None) as importer:
        (a, b), held_out = (importer.encoder.train.find([letter], "") for letter in "ab"), "c"
        assert a is not None
        assert b is not None
        keyed = {name: value for name, value in line("a", first, uid="one", key=a.key).items() if name != "prompt"}
        assert taken(importer.import_values([keyed, keyed, 3], "door")) == (1, 1, {"JSON, but no object": 1})
        assert taken(importer.import_values([keyed], "door")) == (0, 1, {})
        refused = [
            line("a", other),
            short,
            line(held_out, first),
            {**keyed, "key": "0" * 16},
            {**keyed, "prompt": "b"},
            line("z", first),
            {**line("a", first), "messages": [{**m, "weight": 0} for m in line("a", first)["messages"][:4]]},
        ]
        assert taken(importer.import_values(refused, "door")) == (
            0,
            0,
            {
                "the environment answers otherwise": 1,
                "an episode that its environment has not ended": 1,
                "its prompt is held out for evaluation": 1,
                "a key that is none of the task's prompts": 1,
                "a chat that does not begin with the prompt of its key": 1,
                "a prompt that is none of the environment's": 1,
                "a chat that does not end with an answer to train on": 1,
            },
        )
        cut = {**short, "stop_reason": "length"}  # judged as it stands
        assert taken(importer.import_values([cut], "door")) == (1, 0, {})
    (whole, shorter) = trajectories(run.path)
    assert whole.provenance["uid"] == "one"
    assert shorter.completion.stop_reason is StopReason.LENGTH


def test_episodes_of_another_run_are_acted_again(tmp_path: Path) -> None:
    inline(tmp_path / "old", "--steps", "2", source=TOY)
    recipe, run = made(tmp_path / "new", source=TOY)
    import_answers(recipe, run, [tmp_path / "old"], lambda line: None)
    old = {row.uid: row for row in trajectories(tmp_path / "old") if 0 not in row.completion.tokens}
    new = [row for row in trajectories(run.path) if 0 not in row.completion.tokens]
    assert len(new) == len(old) > 20
    for row, before in zip(new, old.values(), strict=True):
        assert (row.completion.digest, row.reward) == (before.completion.digest, before.reward)
        assert row.completion.log_behavior is not None


def test_a_run_that_goes_on_takes_episodes_from_a_part_that_has_its_models_already(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", "--steps", "20", source=TOY)
    lines = [line(prompt, play) for prompt, seed in WORLDS.items() for play in whole_plays(seed)]
    reports: list[Report] = []

    def once(phase: str, note: object) -> None:
        if phase == "training" and not reports:
            with JournalWriter(run.journal(recipe), IMPORTS) as journal:
                hosts, reward = replay_hosts_of(recipe), grader_of(recipe, run)
                importer = build_importer(recipe, reward, reference_of(recipe, recipe.model), (), journal, hosts)
                reports.append(importer.import_values(lines, "searcher-9"))

    summary = summarise(recipe, run, ["searcher-0"], Inline(recipe, run, once).go(), 0.0)
    assert taken(reports[0]) == (2 * 4**3, 0, {})
    assert summary.trajectories.imported == 2 * 4**3
    assert summary.tokens.closes()
    assert summary.trajectories.closes()


class Letters:
    """Says nothing at first, then one letter of its world after each of two turns; a cut turn is worth its length."""

    def reset(self, seed: int) -> None:
        self.seed, self.count, self.reward = seed, 0, 0.0

    def step(self, text: str) -> str | None:
        self.count += 1
        return "ABCD"[self.seed % 4] if self.count < 3 else None

    def cut(self, text: str) -> None:
        self.reward = len(text)

    def get_reward(self) -> float:
        return self.reward


def test_a_turn_that_was_cut_off_is_told_as_one_and_worlds_that_share_a_prompt_need_its_key() -> None:
    task = EnvironmentTask(Letters, "letters", "a", worlds=2, held_out=1)
    tokenizer = TabularTokenizer(4)
    prompts = encode(task.problems("train"), task.name, tokenizer, PromptSettings()).prompts
    replays = EpisodeReplays(InProcessHost(task), TurnEncoder(tokenizer, chat=False))
    tokens, mask = np.array([3, 1, 4, 4], np.int32), np.array([True, False, True, True])
    cut = Completion(tokens, "CADD", StopReason.LENGTH, (ELSEWHERE, ELSEWHERE), mask=mask)
    right, other = replays([(prompt, cut) for prompt in prompts])
    assert isinstance(right, Completion)
    assert right.judgement is not None
    assert right.judgement.reward == 2
    assert isinstance(other, Refusal)
    assert other == Refusal("the environment answers otherwise", "'B' after turn 1, and not 'A'")
    encoder = Encoder(
        *("letters", tokenizer, TaskPrompts(prompts), TaskPrompts([]), False, 8, 9),
        turn_writer=episode_writer(TurnEncoder(tokenizer, chat=False)),
        acted=True,
    )
    unnamed = encoder.encode(ImportedAnswer("a", "D"))
    assert isinstance(unnamed, Refusal)
    assert "the line must give the key of one" in unnamed.reason
    for prompt in prompts:
        named = encoder.encode(ImportedAnswer("a", "D", key=prompt.key))
        assert isinstance(named, EncodedAnswer)
        assert named.prompt is prompt
