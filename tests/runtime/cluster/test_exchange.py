"""A searching half whose run's directory is elsewhere does through the exchange what it does on the run's disk."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from tests.replay.trajectory_cases import same, trajectory
from tests.runtime.runs import TASK, TOY, made, until

from tba.errors import DeadlineExceeded, HandedOutLost, UserError
from tba.protocols import Manifest
from tba.recipe import Recipe
from tba.record.evaluations import read_evaluations
from tba.record.faults import count_faults
from tba.record.jsonl import read_lines
from tba.replay.codec import EncodedTrajectories
from tba.replay.follower import JournalFollower
from tba.runtime.cluster.gateway import CLAIM_SECONDS, JOURNAL, PLACES, Exchange, PieceSource
from tba.runtime.cluster.remote import (
    SILENCE,
    RemoteWeights,
    Visit,
    Visitors,
    checkpoint_through,
    connect_via,
    facts_with_text,
    reachable_directory,
)
from tba.runtime.elastic import FIRST_NUMBER, JoinedSearchers
from tba.runtime.program import version
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import hold_shared
from tba.runtime.searcher_loop import SearcherLoop, searcher_loop_at, start_searching
from tba.runtime.trainer_loop import start_training
from tba.training.checkpoint import Checkpoint
from tba.types import Trajectory, Version
from tba.weights.chunks import FlatBytes, cut_pieces
from tba.weights.directory import PublishSettings, WeightDirectory
from toy.policy import WEIGHT

PLACE = {"part": "searcher-0", "node": "10.0.0.2", "log": "somewhere"}
QUICK = ("--evaluation.problems", "1", "--replay.pacing.warm-up", "64", "--group-size", "8")


@dataclass
class Direct:
    """The exchange in this process; what it sends out stays where it is."""

    exchange: Exchange

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.exchange, method)(*arguments, **named)

    def fetch(self, references: Sequence[Any]) -> list[FlatBytes]:
        return list(references)

    def send(self, piece: FlatBytes) -> Any:
        return piece


@dataclass(frozen=True)
class Handed:
    """A piece in the store of a node."""

    piece: FlatBytes
    node: str


@dataclass
class Farther(Direct):
    """The exchange as a node sees it, with the bytes that each node sends to others."""

    node: str
    lock: threading.Lock  # the exchange answers one question after another
    sent: Counter[str]
    lost: set[str] = field(default_factory=set)  # nodes whose stores are gone
    error: type[Exception] = HandedOutLost  # that a fetch from them raises

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        with self.lock:
            return super().call(method, *arguments, **named)

    def fetch(self, references: Sequence[Any]) -> list[FlatBytes]:
        for handed in references:
            if handed.node in self.lost:
                raise self.error("gone")
            if handed.node != self.node:
                with self.lock:
                    self.sent[handed.node] += len(handed.piece)
        return [handed.piece for handed in references]

    def send(self, piece: FlatBytes) -> Any:
        return Handed(piece, self.node)


@dataclass
class Mortal(Direct):
    """One that was made anew once: what was handed out before is gone."""

    alive: bool = True

    def fetch(self, references: Sequence[Any]) -> list[FlatBytes]:
        if not self.alive:
            self.alive = True
            raise HandedOutLost("gone")
        return list(references)


@dataclass
class Noting(Direct):
    """One that notes the arguments of each call."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.calls.append((*arguments, *named.values()))
        return super().call(method, *arguments, **named)


def elsewhere(recipe: Recipe, run: RunDirectory) -> tuple[SearcherLoop, Exchange]:
    exchange = Exchange(run, recipe, lambda piece: piece)
    contact = Direct(exchange)
    return searcher_loop_at(recipe, lambda: connect_via(contact, "searcher-0", PLACE), 0, 0, None), exchange


def journal_of(run: RunDirectory) -> list[Trajectory]:
    with JournalFollower(run.path / "journal.sqlite") as journal:
        return journal.drain()


def test_the_same_answers_weights_and_evaluations_come_through_the_exchange_as_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba.runtime.cluster.remote._FRESH_SECONDS", -1.0)  # each look at the newest version is a look
    results = []
    for name in ("disk", "exchange"):
        few = ("--steps", "6", "--reference-reset", "5", "--run.synchronous-rounds")  # what flows is sent by the clock
        recipe, run = made(tmp_path / name, *QUICK, *few)
        search, exchange = (start_searching(recipe, run, 0), None) if name == "disk" else elsewhere(recipe, run)
        train = start_training(recipe, run, stop=lambda: False, prefetch=False)
        for _ in range(4):
            search.round()
        for _ in range(5):
            train.step()
        search.round()  # which scores all anew, for the reference has been reset
        train.step()
        train.publish()
        assert search.evaluate()
        weights = search.searcher.engine.logits_QNV.copy()
        search.close()
        train.close()
        if exchange is not None:
            exchange.close()
        answers = [(t.completion.tokens.tolist(), t.log_reference.tolist(), t.version) for t in journal_of(run)]
        with JournalFollower(run.path / "journal.sqlite") as journal:
            counters = journal.counters()["searcher-0"]
            rescored = {s.uid: s.log_reference.tolist() for s in journal.drain_scores()}
        counters = {name: n for name, n in counters.items() if not name.endswith("_milliseconds")}
        figures = [(e.version, e.metric, e.value) for e in read_evaluations(run.path)]
        result = json.loads(run.result("searcher-0").read_text())
        results.append((answers, weights, counters, list(rescored.values()), figures, result["rounds"]))
    disk, remote = results
    assert np.array_equal(disk[1], remote[1])
    assert disk[0] == remote[0]
    assert disk[2:] == remote[2:]
    assert len(remote[0]) == 5 * 64
    assert len(remote[3]) > 0
    assert {version for version, _, _ in remote[4]} == {Version(0, 0), Version(0, 6)}
    (place,) = read_lines(tmp_path / "exchange" / "logs" / PLACES)
    assert place == PLACE


def test_weights_that_were_handed_out_are_read_after_their_version_has_been_pruned(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    directory = WeightDirectory(run.weights)
    shape = TASK.reference_logits_QNV.shape
    exchange = Exchange(run, recipe, lambda piece: piece)
    assert RemoteWeights(Direct(exchange)).newer_than(None) is None
    weights = RemoteWeights(Direct(exchange))
    directory.publish({WEIGHT: torch.full(shape, 7.0)}, Version(0, 1), Manifest(stop=True))
    newest = weights.newer_than(None)
    assert newest is not None
    assert newest.manifest == Manifest(stop=True)
    for step in (2, 3, 4):
        directory.publish({WEIGHT: torch.full(shape, float(step))}, Version(0, step), Manifest())
    assert Version(0, 1) not in directory.versions()
    assert float(newest.read()[WEIGHT].mean()) == 7.0
    assert weights.at(Version(0, 4)).version == Version(0, 4)
    with pytest.raises(UserError, match=r"version 0\.2 of the weights is not \(or no longer\) there"):
        weights.at(Version(0, 2))
    exchange.close()


def test_weights_that_are_gone_from_memory_are_waited_for_and_the_next_ones_are_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba.weights.in_memory.MEMORY_ROOT", tmp_path)
    recipe, run = made(tmp_path / "run")
    directory = WeightDirectory(run.weights, settings=PublishSettings(in_memory=True))
    shape = TASK.reference_logits_QNV.shape
    exchange = Exchange(run, recipe, lambda piece: piece)
    directory.publish({WEIGHT: torch.full(shape, 1.0)}, Version(0, 1), Manifest())
    for folder in tmp_path.glob("tba-published-*"):
        shutil.rmtree(folder)
    assert exchange.newest(None) is None
    directory.publish({WEIGHT: torch.full(shape, 2.0)}, Version(0, 2), Manifest())
    newest = RemoteWeights(Direct(exchange)).newer_than(None)
    assert newest is not None
    assert float(newest.read()[WEIGHT].mean()) == 2.0
    exchange.close()
    directory.close()


def test_weights_that_died_with_the_exchange_are_asked_for_again(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    directory = WeightDirectory(run.weights)
    shape = TASK.reference_logits_QNV.shape
    contact = Mortal(Exchange(run, recipe, lambda piece: piece))
    weights = RemoteWeights(contact)
    directory.publish({WEIGHT: torch.full(shape, 7.0)}, Version(0, 1), Manifest())
    offered = weights.newer_than(None)
    assert offered is not None
    contact.exchange.close()
    contact.alive = False
    assert float(offered.read()[WEIGHT].mean()) == 7.0
    contact.alive = False
    for step in (2, 3, 4):  # what was offered has been pruned since
        directory.publish({WEIGHT: torch.full(shape, 8.0)}, Version(0, step), Manifest())
    contact.exchange = Exchange(run, recipe, lambda piece: piece)
    with pytest.raises(HandedOutLost):
        offered.read()
    contact.exchange.close()


ContactOf: TypeAlias = Callable[[str], Farther]
HOME, PIECE, PIECES = "home", 1000, 24


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WeightDirectory, ContactOf]]:
    """A run's weights in pieces of 1,000 bytes, and contacts with its exchange by the name of their node."""
    recipe, run = made(tmp_path / "run")
    monkeypatch.setattr("tba.runtime.cluster.gateway.cut_pieces", partial(cut_pieces, most_bytes=PIECE))
    clock = [0.0]
    exchange = Exchange(run, recipe, lambda piece: Handed(piece, HOME), HOME, lambda: clock[0])
    lock, sent = threading.Lock(), Counter[str]()
    yield WeightDirectory(run.weights), lambda node: Farther(exchange, node, lock, sent)
    exchange.close()


def tensor_at(version: Version, weights: RemoteWeights) -> torch.Tensor:
    return weights.at(version).read()[WEIGHT]


@pytest.mark.parametrize(("nodes", "copies"), [(1, 1), (3, 3), (4, 1), (8, 1)])
def test_a_version_leaves_the_trainers_node_once_however_many_nodes_fetch_it(
    published: tuple[WeightDirectory, ContactOf], nodes: int, copies: int
) -> None:
    directory, contact_of = published
    contacts = [contact_of(f"node-{n}") for n in range(nodes)]
    weights = [RemoteWeights(contact, contact.node) for contact in contacts for _ in range(2)]  # two searchers each
    tensor = torch.arange(PIECE * PIECES // 4, dtype=torch.float32)
    for step in (1, 2):  # with the first one the exchange learns which nodes there are
        contacts[0].sent.clear()
        directory.publish({WEIGHT: tensor + step}, Version(0, step), Manifest())
        with ThreadPoolExecutor(len(weights)) as threads:
            for taken in threads.map(partial(tensor_at, Version(0, step)), weights):
                assert torch.equal(taken, tensor + step)
    sent = contacts[0].sent
    if nodes >= 4:
        assert sent[HOME] == copies * PIECE * PIECES
        assert sum(sent.values()) >= nodes * PIECE * PIECES  # two searchers of a node may fetch a piece twice here
        assert max(sent[contact.node] for contact in contacts) < 2 * nodes * PIECE * PIECES
    else:
        assert sent[HOME] == 2 * copies * PIECE * PIECES  # Ray would fetch once for both


@pytest.mark.parametrize("error", [HandedOutLost, DeadlineExceeded])
def test_pieces_of_a_searcher_that_dies_or_is_cut_off_come_from_the_trainers_node_again(
    published: tuple[WeightDirectory, ContactOf], error: type[Exception]
) -> None:
    directory, contact_of = published
    tensor = torch.arange(PIECE * PIECES // 4, dtype=torch.float32)
    directory.publish({WEIGHT: tensor}, Version(0, 1), Manifest())
    for n in range(6):
        contact = contact_of(f"node-{n}")
        RemoteWeights(contact, contact.node).at(Version(0, 1)).read()
    last_contact = contact_of("node-9")
    last_contact.sent.clear()
    last_contact.error = error
    last_contact.lost |= {f"node-{n}" for n in range(6)}  # all that was handed on
    assert torch.equal(RemoteWeights(last_contact, last_contact.node).at(Version(0, 1)).read()[WEIGHT], tensor)
    assert last_contact.sent == {HOME: PIECE * PIECES}


def test_a_piece_that_was_claimed_and_not_handed_on_is_given_to_another_in_time(
    published: tuple[WeightDirectory, ContactOf],
) -> None:
    directory, contact_of = published
    directory.publish({WEIGHT: torch.zeros(10)}, Version(0, 1), Manifest())
    exchange = contact_of("node-1").exchange
    assert [exchange.piece(Version(0, 1), 0, f"node-{n}").kind for n in range(5)] == ["trainer"] * 3 + ["claim", "wait"]
    assert exchange.piece(Version(0, 1), 0, HOME).kind == "trainer"
    exchange._now = lambda: CLAIM_SECONDS + 1
    assert exchange.piece(Version(0, 1), 0, "node-3").kind == "claim"
    exchange.hand_on(Version(0, 1), 0, ["here"])
    assert exchange.piece(Version(0, 1), 0, "node-1") == PieceSource("relay", ["here"])


def test_of_versions_that_are_changes_their_base_is_fetched_once(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    directory = WeightDirectory(run.weights, settings=PublishSettings(full_version_every=10))
    sent: list[int] = []

    def send(piece: FlatBytes) -> FlatBytes:
        sent.append(len(piece))
        return piece

    exchange = Exchange(run, recipe, send)
    weights = RemoteWeights(Direct(exchange))
    trained = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    for step in range(8):  # more than the exchange keeps
        directory.publish({WEIGHT: trained}, Version(0, step), Manifest())
        assert torch.equal(weights.at(Version(0, step)).read()[WEIGHT], trained)
        trained = trained.clone()
        trained[step * 100 : step * 100 + 50] += 1.0
    assert sum(size >= 160_000 for size in sent) == 1
    assert sum(sent) < 200_000
    exchange.close()


def test_a_checkpoint_comes_to_a_rank_elsewhere_whole_or_not_at_all(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", *QUICK)
    half = start_training(recipe, run, lambda: False, prefetch=False)
    half.checkpoint()
    half.close()
    exchange = Exchange(run, recipe, lambda piece: piece)
    contact, checkpoint = Direct(exchange), run.checkpoints / "step-0"
    with checkpoint_through(contact, "trainer-1", checkpoint, run.checkpoints) as same:
        assert same == checkpoint
    contents = {path.relative_to(checkpoint): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    scratch = tmp_path / "scratch" / "checkpoints"
    for part in ("trainer-1", "trainer-2", "trainer-1"):
        with checkpoint_through(contact, part, checkpoint, scratch) as here:
            assert {path.relative_to(here): path.read_bytes() for path in here.rglob("*") if path.is_file()} == contents
            assert Checkpoint.load(here).version == Version(0, 0)
        assert not list(scratch.rglob("*.safetensors"))
    with pytest.raises(ValueError, match="is no checkpoint"):
        exchange.checkpoint("../../etc")
    next(path for path in checkpoint.glob("*.safetensors")).write_bytes(b"")
    with (
        pytest.raises(UserError, match=r"is damaged \(.*safetensors: 0 bytes instead of"),
        checkpoint_through(contact, "trainer-1", checkpoint, scratch),
    ):
        pass
    assert not list(scratch.rglob("step-*"))
    exchange.close()


def test_the_exchange_does_for_searchers_what_a_searcher_does_and_nothing_else(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    exchange = Exchange(run, recipe, lambda piece: piece)
    exchange.record("fault", "reward_retries", "the judge was not there")
    assert count_faults(run.path)["reward_retries"] == 1
    for verb in ("_append", "owner", "__init__"):
        with pytest.raises(ValueError, match="is not for searchers"):
            exchange.journal("searcher-0", verb)
        with pytest.raises(ValueError, match="is not for searchers"):
            exchange.record(verb)
    exchange.close()


def test_a_journal_elsewhere_has_the_verbs_of_the_protocol_and_what_it_sends_is_encoded(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    exchange = Exchange(run, recipe, lambda piece: piece)
    contact = Noting(exchange)
    journal = connect_via(contact, "searcher-0", PLACE).journal
    assert set(vars(journal)) == JOURNAL
    original = [trajectory(n % 2, (1, n), uid=f"t{n}") for n in range(5)]
    for _ in range(2):  # a call may be repeated
        journal.put(original, leases=journal.lease(2, 60.0), counters={"generated_tokens": 10})
    assert journal.known(["t0", "t4", "x"]) == {"t0", "t4"}
    with JournalFollower(run.path / "journal.sqlite") as follower:
        assert same(follower.drain(), original)
        assert follower.counters() == {"searcher-0": {"generated_tokens": 10}}
        assert follower.leases() == []
        follower.ask(Version(0, 1), [t.uid for t in original])
        assert same(journal.unscored(Version(0, 1), 2, 60.0), [original[4], original[3]])
    sent = [value for call in contact.calls for value in call if isinstance(value, EncodedTrajectories)]
    assert [len(batch.rows) for batch in sent] == [5, 5]
    assert not [value for call in contact.calls for value in call if value is original]
    journal.close()
    journal.close()
    exchange.close()


def test_who_has_left_holds_no_connection_to_the_journal(tmp_path: Path) -> None:
    exchange = Exchange(*made(tmp_path / "run")[::-1], lambda piece: piece)
    assert exchange.journal("searcher-0", "rows") == 0
    counts = []
    for number in range(FIRST_NUMBER, FIRST_NUMBER + 5):
        exchange.journal(f"searcher-{number}", "count", generated_tokens=1)
        exchange.close_journal(f"searcher-{number}")
        exchange.close_journal(f"searcher-{number}")
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1:] == counts[:1] * 4  # the first may leave a descriptor, which SQLite takes for the next
    exchange.close()


def test_a_recipe_comes_along_to_where_neither_the_run_nor_its_file_is(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(TOY.read_text())
    recipe, run = made(tmp_path / "run", "--steps", "77", source=source)
    facts = json.loads(json.dumps(facts_with_text(run)))
    assert reachable_directory(facts, lambda: tmp_path / "scratch").path == run.path
    (run.path / "recipe.json").rename(run.path / "moved.json")
    source.unlink()
    stand_in = reachable_directory(facts, lambda: tmp_path / "scratch")
    assert stand_in.path.parent == tmp_path / "scratch"
    assert stand_in.recipe() == recipe
    assert stand_in.log("searcher-0").parent.is_dir()


def test_a_guest_is_one_who_joined_until_it_leaves_or_says_nothing_for_too_long(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    clock = [0.0]
    gone: list[str] = []
    visitors = Visitors(run, recipe, gone.append, now=lambda: clock[0])
    with pytest.raises(UserError, match="is not in progress"):
        visitors.join(version())
    with run.hold_lock(0.0):
        first_number, facts = visitors.join(version())
        second_number, _ = visitors.join(version())
        assert (first_number, second_number) == (FIRST_NUMBER, FIRST_NUMBER + 1)
        assert reachable_directory(facts, lambda: tmp_path).path == run.path
        joined = JoinedSearchers(run)
        assert joined.present_names() == [f"searcher-{first_number}", f"searcher-{second_number}"]
        visitors.leave(first_number, "Ctrl-C")
        clock[0] += SILENCE - 1
        assert visitors.stay(second_number) is None
        clock[0] += SILENCE - 1
        assert visitors.stay(second_number) is None
        clock[0] += SILENCE + 1
        assert visitors.stay(second_number) == "the run had lost touch with it"
        assert gone == [f"searcher-{first_number}", f"searcher-{second_number}"]
        assert joined.present_names() == []
        assert [s["how"] for s in joined.record()] == ["Ctrl-C", "it died"]
        third_number, _ = visitors.join(version())
        visit = Visit(third_number, lambda: False, Called(visitors))
        assert not visit.stop()
        assert joined.dismiss(0.0, lambda: None) == [visit.name]
        last = Visit(third_number, lambda: False, Called(visitors))
        until(last.stop, 10.0, "the guest to hear that the run is ending")
        assert last.reason == "the run ended"
        visitors.leave(third_number, last.reason)
        assert joined.present_names() == []


@dataclass
class Called:
    """A contact with visitors alone."""

    visitors: Visitors

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.visitors, method)(*arguments, **named)

    def fetch(self, references: Sequence[Any]) -> list[FlatBytes]:
        raise NotImplementedError


def test_a_run_is_held_by_others_until_the_last_part_that_keeps_it_has_ended(tmp_path: Path) -> None:
    _, run = made(tmp_path / "run")
    with hold_shared(run.path), pytest.raises(UserError, match="is still in progress"), run.hold_lock(0.0):
        pass
    with run.hold_lock(0.0), hold_shared(run.path):
        assert JoinedSearchers(run).present_names() == []
