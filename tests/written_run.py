"""A run's folder as the real writers leave it, small, with texts that try to be more than text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from tba.evaluation.accuracy import AssessedAnswer
from tba.evaluation.estimators import GREEDY
from tba.record.evaluations import EvaluationWriter
from tba.record.faults import record_fault
from tba.record.ledger import Ledger
from tba.record.metrics import MetricsWriter
from tba.record.recorder import SampleWriter
from tba.record.summary import Summary, WallSeconds
from tba.replay.buffer import Buffer, BufferSettings, Tally
from tba.replay.codec import pack_uses
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.types import Completion, Evaluation, Prompt, Sampling, StopReason, Trajectory, Version

BEGAN = 1.7e9
BETA = 0.5
STEPS = 40
ANSWERS = 4  # of a round
HOSTILE = (
    "</script><script>document.title = 'hacked'</script>",
    "<img src=x onerror=\"document.title='hacked'\">",
    "&lt;b&gt; ' \" ` ${document.title='hacked'} \u2028 \u202egnp.exe",
    "<!--<script>",
    "<style>*{display:none}</style><base href=https://example.com><a href=javascript:alert(1)>",
    "plain",
)
WORDS = ("sum", " is", " ", "<", "script", ">", "\u010a", "\u0120b")  # the vocabulary of its byte-level tokenizer


def write(
    run: Path, hide_text: bool = False, seed: int = 0, rounds: int = 30, around: tuple[str, str] = ("", "")
) -> Path:
    """Write the run; each of six prompts is asked every sixth round, and half of what arrives is trained on.

    around: what stands around what is asked, such as a chat template.
    """
    rng = np.random.default_rng(seed)
    settings = {
        "class": "tba.recipe.Recipe", "seed": seed, "policy_temperature": 1.0,
        "objective": {"class": "tba.objectives.trajectory_balance.TrajectoryBalance", "beta": BETA},
        "record": {"hide_text": hide_text},
    }  # fmt: skip
    facts = {
        "recipe": "toy", "digest": None, "overrides": [], "started": BEGAN, "clock": {"began": 0.0, "before": 0.0},
        "sft_seconds": 0.0, "incarnations": [{"why": "begun", "program": "", "marks": []}], "resolved": settings,
    }  # fmt: skip
    run.mkdir(parents=True)
    (run / "recipe.json").write_text(json.dumps(facts))
    trajectories = [t for i in range(rounds) for t in _round(i, rng, around)]
    for n in range(2):
        with JournalWriter(run / "journal.sqlite", f"searcher-{n}") as writer:
            for i in range(n, rounds, 2):
                writer.put(trajectories[ANSWERS * i : ANSWERS * (i + 1)])
    buffer = _trained(run / "journal.sqlite", rng)
    _checkpoint(run, buffer)
    _record(run, trajectories, hide_text, around)
    counts = buffer.counts()

    def account(unit: str) -> Ledger:
        named = {name: getattr(amount, unit) for name, amount in asdict_of(counts).items() if name != "received"}
        return Ledger(
            generated=counts.received.trajectories if unit == "trajectories" else counts.received.tokens, **named
        )

    Summary(
        recipe="toy", seed=seed, steps=STEPS, wall_seconds=WallSeconds(total=STEPS, train=STEPS),
        tokens=account("tokens"), trajectories=account("trajectories"),
        reference_resets=({"step": 20, "version": "0.20", "wall_seconds": 20.0},),
        joined=({"name": "searcher-1", "joined": 1.0, "left": 39.0, "how": "the run ended"},),
    ).write(run)  # fmt: skip
    return run


def asdict_of(counts: object) -> dict[str, Tally]:
    """The amounts by name."""
    return {name: Tally(**amount) for name, amount in asdict(counts).items()}


def _round(number: int, rng: np.random.Generator, around: tuple[str, str]) -> Sequence[Trajectory]:
    """The answers of one round, some of them equal."""
    hostile = HOSTILE[number % len(HOSTILE)]
    asked = f"asked: {hostile}".join(around)
    prompt = Prompt("toy", np.array([number % len(HOSTILE), 7], np.int32), asked, {"answer": hostile})
    version, made = Version(0, number), []
    for i in range(ANSWERS):
        tokens, owner = rng.integers(0, len(WORDS), 3 + int(rng.integers(0, 3))).astype(np.int32), number % 2
        if i == ANSWERS - 1:
            tokens = made[0].completion.tokens
        logs = -rng.random(len(tokens)).astype(np.float32)
        completion = Completion(
            tokens, f"answer {i} of round {number}: {hostile}", StopReason.EOS if i else StopReason.LENGTH,
            (version, version), Sampling(), logs,
        )  # fmt: skip
        made.append(
            Trajectory(
                f"t{number:03}-{i}", prompt, completion, float(rng.integers(0, 5)), logs - np.float32(0.25), Version(),
                {"right": float(i == 0)}, {}, {"searcher": f"searcher-{owner}", "round": number}, BEGAN + number + 1,
            )
        )  # fmt: skip
    return made


def _trained(journal: Path, rng: np.random.Generator) -> Buffer:
    """A buffer that took in the journal, and from which half was used before the rest was evicted or replaced."""
    buffer = Buffer(BufferSettings(per_prompt=8, total=40))
    with JournalFollower(journal) as follower:
        for stored in follower.drain_stored():
            buffer.add(stored)
            if rng.random() < 0.5:
                buffer.use([stored.trajectory])
    return buffer


def _checkpoint(run: Path, buffer: Buffer) -> None:
    folder = run / "checkpoints" / f"step-{STEPS}"
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(WORDS)}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    state = {"replay": {"uses": pack_uses(buffer.fates())}}
    manifest = {"version": f"0.{STEPS}", "state": state, "files": {"tokenizer.json": [0, 0]}}
    (folder / "run.json").write_text(json.dumps(manifest))


def _record(run: Path, trajectories: Sequence[Trajectory], hide_text: bool, around: tuple[str, str]) -> None:
    metrics, found = MetricsWriter(run), EvaluationWriter(run, text=not hide_text)
    samples = SampleWriter(run, every=10, count=4, text=not hide_text)
    for step in range(1, STEPS + 1):
        metrics.write(Version(0, step), float(step), {"reward": step / STEPS, "beta": BETA, "lag": 3.0, "ess": 0.9})
        samples.write(step, trajectories[:8], lambda some: [[-0.5] * t.length for t in some])
    for step, right in ((0, False), (STEPS, True)):
        answers = [
            AssessedAnswer(text.join(around), f"held out: {text}", float(right), right, GREEDY) for text in HOSTILE[:2]
        ]
        found.write([Evaluation(Version(0, step), float(step), GREEDY, 0.25 + 0.5 * right, 200)], answers)
    record_fault(run, "reward_retries", f"the reward raised on {HOSTILE[0]}")
    faults = json.loads((run / "faults.jsonl").read_text()) | {"time": BEGAN + 12}
    (run / "faults.jsonl").write_text(json.dumps(faults) + "\n")
    for part in (metrics, found, samples):
        part.close()
