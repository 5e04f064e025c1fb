"""Short runs of gsm8k and calculator with the vllm engine: tiny models, real processes or Ray actors
(`make test-vllm`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import final_weights, processes
from safetensors.torch import load_file

from tba.engines.transformers import EngineSettings
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.models.warm_start import WarmStart, prepare_warm_start
from tba.recipes.calculator import recipe as calculator
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.tasks.gsm8k import Gsm8k
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import ScratchModel
from tba.types import Sampling, Trajectory, Version

pytestmark = pytest.mark.vllm
DATA = Path(__file__).parents[1] / "fixtures" / "gsm8k"
STEPS, EVERY = 20, 2
# what its CPU build writes past all settings; that sums of small numbers have few answers is the task's
HARMLESS = re.compile(r"Warning: NUMA binding|dropped as copies of others")


@dataclass(frozen=True)
class Ran:
    path: Path
    base: Path
    summary: Summary
    trajectories: list[Trajectory]


def on_a_cluster(path: Path, *overrides: str) -> Summary:
    """A whole run in Ray actors of this machine, from a new interpreter: Ray is not for processes that are copied."""
    words = ("--runs", str(path.parent), "--run-name", path.name, "--runtime", "cluster")
    words = (
        *words,
        "--cluster.object-store-gb",
        "0.3",
        "--cluster.searcher-cpus",
        "0.5",
        "--cluster.trainer-cpus",
        "0.5",
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with tempfile.TemporaryDirectory(prefix="tba") as home:  # short: the names of Ray's sockets begin with it
        environment |= {"HOME": home, "RAY_TMPDIR": home}
        command = [sys.executable, "-m", "tba", "train", "gsm8k", *words, *overrides]
        completed_process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert completed_process.returncode == 0, completed_process.stderr + completed_process.stdout
    summary = Summary.read(path)
    assert summary is not None
    return summary


@pytest.fixture(scope="module", params=["flow", "adapters", "cluster"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    task = Gsm8k(path=str(DATA), style="vineppo")
    start = WarmStart(  # half knows the fifteen problems of the file: some of its answers are right
        scratch=ScratchModel(hidden_size=64, layers=2, heads=2, kv_heads=1, ff_size=128, max_positions=640),
        vocab_size=512,
        sft=SupervisedSettings(steps=250, batch_size=8, lr=5e-3),
    )
    base = prepare_warm_start(start, task, lambda line: None)
    path = tmp_path_factory.mktemp("vllm") / "run"
    how = ("--model.lora.rank", "8") if request.param == "adapters" else ()
    overrides = (
        *how,
        *("--task.path", str(DATA), "--model.path", str(base), "--model.device", "cpu"),
        *("--model.generation.engine", "vllm"),
        *("--model.generation.slots", "32", "--model.generation.max-completion-tokens", "160"),
        *("--steps", str(STEPS), "--sync-every", str(EVERY), "--searchers", "1", "--optimizer.lr", "1e-3"),
        *("--groups-per-step", "2", "--group-size", "4", "--samples-per-prompt", "8", "--prompts-per-round", "3"),
        *(
            "--replay.pacing.warm-up",
            "24",
            "--replay.pacing.max-mean-uses",
            "1",
            "--evaluation.problems",
            "4",
            "--run.checkpoint-every",
            "0",
        ),
    )
    if request.param == "cluster":
        summary = on_a_cluster(path, *overrides)
    else:
        summary = processes(path, *overrides, source=Path("gsm8k"))
    with JournalFollower(path / "journal.sqlite") as journal:
        return Ran(path, base, summary, journal.drain())


def test_it_makes_its_steps_on_answers_of_weights_that_move(ran: Ran) -> None:
    assert ran.summary.steps == STEPS
    before, after = load_file(ran.base / "model.safetensors"), final_weights(ran.path)
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert {t.reward for t in ran.trajectories} == {0.0, 1.0}
    seen = {version for t in ran.trajectories for version in t.completion.versions}
    assert seen <= {Version(0, step) for step in range(0, STEPS + 1, EVERY)}
    assert len(seen) >= 3
    assert 0 < ran.summary.lag.mean < STEPS / 2


def test_what_the_searcher_says_of_its_answers_is_what_their_reference_says_while_the_weights_are_the_first(
    ran: Ran,
) -> None:
    """The recipe samples at its policy temperature, and the reference is the model that both began with."""
    rows = [t for t in ran.trajectories if t.completion.versions == (Version(), Version())]
    assert rows
    for t in rows:
        assert t.completion.log_behavior is not None
        assert abs(t.completion.log_behavior - t.log_reference).max() < 1e-4


def test_groups_are_whole_and_all_is_accounted_for(ran: Ran) -> None:
    rounds: dict[tuple[str, int], int] = {}
    for t in ran.trajectories:
        key = (t.prompt.key, t.provenance["round"])
        rounds[key] = rounds.get(key, 0) + 1
    whole = [n for n in rounds.values() if n == 8]
    assert len(whole) >= len(rounds) - 3  # the last round may have been cut short
    for ledger in (ran.summary.tokens, ran.summary.trajectories):
        assert ledger.closes(), ledger


def test_its_checkpoint_is_a_model_that_vllm_loads_as_transformers_does(ran: Ran) -> None:
    """Next to the model lie the optimizer's state, and the adapters where there are any."""
    model = HuggingFace(
        path=str(ran.path / f"checkpoints/step-{STEPS}"),
        device="cpu",
        generation=EngineSettings(engine="vllm", slots=4, max_completion_tokens=12),
    )
    plain_model = replace(model, generation=replace(model.generation, engine="transformers"))
    prompts = [t.prompt for t in ran.trajectories[:: len(ran.trajectories) // 4]]
    tokens, expected = (
        generate(m.engine(Version()), prompts, 1, Sampling(0.0), np.random.default_rng(0)) for m in (model, plain_model)
    )
    assert [c.tokens.tolist() for (c,) in tokens] == [c.tokens.tolist() for (c,) in expected]


def test_its_logs_are_clean(ran: Ran) -> None:
    for log in (ran.path / "logs").glob("*.log"):
        lines = [line for line in log.read_text().splitlines() if not HARMLESS.search(line)]
        assert not [line for line in lines if re.search(r"warn|error|traceback|exception", line, re.IGNORECASE)], log


def test_episodes_are_played_in_processes_and_trained(tmp_path: Path) -> None:
    assert isinstance(calculator.model, HuggingFace)
    assert calculator.model.warm_start is not None
    start = replace(
        calculator.model.warm_start,
        scratch=ScratchModel(hidden_size=64, layers=2, heads=2, kv_heads=1, ff_size=128, max_positions=48),
        sft=SupervisedSettings(steps=200, batch_size=32, lr=2e-3),
    )
    base = prepare_warm_start(start, calculator.task, lambda line: None)
    path = tmp_path / "run"
    overrides = (
        *("--model.path", str(base), "--model.generation.engine", "vllm", "--model.generation.slots", "32"),
        *("--task.limits.processes", "8", "--task.held-out", "20"),
        *("--steps", "16", "--searchers", "1", "--groups-per-step", "2", "--group-size", "4"),
        *("--samples-per-prompt", "8", "--prompts-per-round", "3", "--replay.pacing.warm-up", "24"),
        *("--replay.pacing.max-mean-uses", "1", "--evaluation.problems", "16", "--evaluation.every", "4"),
    )
    summary = processes(path, *overrides, source=Path("calculator"))
    with JournalFollower(path / "journal.sqlite") as journal:
        trajectories = journal.drain()
    assert summary.steps == 16
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
    episodes = [t for t in trajectories if t.completion.mask is not None]
    assert len(episodes) >= 5
    assert all(t.reward in {0.0, 1.0} for t in trajectories if t.completion.mask is None)
    assert min(t.reward for t in episodes) < 0  # what was asked for costs
    for t in episodes:
        assert t.completion.log_behavior is not None
        assert not t.completion.log_behavior[~t.completion.mask].any()
    rows = [t for t in trajectories if t.completion.versions == (Version(), Version())]
    for t in rows:
        sampled = np.ones(len(t.completion.tokens), bool) if t.completion.mask is None else t.completion.mask
        assert t.completion.log_behavior is not None
        assert abs(t.completion.log_behavior - t.log_reference)[sampled].max() < 1e-4
