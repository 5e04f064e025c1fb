"""Everything a run records, step by step."""

import json
import logging
import platform
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.errors import UserError
from tba.record import memory
from tba.record.log import log_path, log_to, tail
from tba.record.metrics import read_metrics
from tba.record.recorder import RecordSettings, read_samples
from tba.types import Evaluation, Sampling, Trajectory, Version
from toy.engine import sample_groups, tabular_prompts
from toy.policy import TabularTask


def batch() -> list[Trajectory]:
    task = TabularTask(seed=1)
    groups = sample_groups(task, tabular_prompts(task), 6, Sampling(), np.random.default_rng(0))
    return [t for group in groups for t in group.trajectories]


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_step_reaches_every_file_under_the_same_names(tmp_path: Path) -> None:
    with closing(RecordSettings(samples_every=2, samples_per_batch=3).start(tmp_path)) as recorder:
        for step in range(1, 5):
            recorder.step(Version(0, step), 0.5 * step, {"reward": step / 4, "grad_norm": float("nan")}, batch())
        recorder.evaluation(Evaluation(Version(0, 2), 1.0, "pass@1/greedy", 0.5, 100))
    assert [row["reward"] for row in read_metrics(tmp_path)] == [0.25, 0.5, 0.75, 1.0]
    assert [row["step"] for row in read_samples(tmp_path)] == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert scalars(tmp_path / "tensorboard") == {
        "reward": [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)],
        "eval/pass@1/greedy": [(2, 0.5)],
    }


def test_samples_are_what_was_trained_on_spread_over_the_batch(tmp_path: Path) -> None:
    trajectories = batch()
    with closing(RecordSettings(samples_per_batch=4, tensorboard=False).start(tmp_path)) as recorder:
        recorder.step(Version(0, 1), 1.0, {}, trajectories)
    rows = read_samples(tmp_path)
    assert [row["uid"] for row in rows] == [trajectories[i].uid for i in (0, 3, 6, 9)]
    t = trajectories[3]
    assert rows[1]["completion"] == t.completion.text
    assert rows[1]["prompt"] == t.prompt.text
    assert rows[1]["reward"] == t.reward
    assert rows[1]["length"] == t.length
    assert rows[1]["log_reference"] == pytest.approx(float(t.log_reference.sum()))


def test_hidden_text_is_written_nowhere(tmp_path: Path) -> None:
    with closing(RecordSettings(hide_text=True, tensorboard=False).start(tmp_path)) as recorder:
        recorder.step(Version(0, 1), 1.0, {"reward": 1.0}, batch())
    rows = read_samples(tmp_path)
    assert len(rows) == 4
    assert not any({"prompt", "completion"} & row.keys() for row in rows)
    assert all(isinstance(row["reward"], float) for row in rows)


def test_what_was_not_asked_for_is_not_there(tmp_path: Path) -> None:
    with closing(RecordSettings(samples_every=0, tensorboard=False).start(tmp_path)) as recorder:
        recorder.step(Version(0, 1), 1.0, {"reward": 1.0}, batch())
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_that_is_not_installed_is_left_out_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with closing(RecordSettings().start(tmp_path)) as recorder:
        recorder.step(Version(0, 1), 1.0, {"reward": 0.5}, batch())
    assert not (tmp_path / "tensorboard").exists()
    with pytest.raises(UserError, match=r"tensorboard is not installed; run `pip install tensorboard`"):
        RecordSettings(tensorboard=True).start(tmp_path)


def test_wandb_that_is_not_installed_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb is not installed; run `pip install wandb`"):
        RecordSettings(wandb="my-project").start(tmp_path)


def wandb_tables(directory: Path) -> list[dict[str, Any]]:
    """The tables that a run without a network has left for `wandb sync`, in the order written."""
    files = directory.glob("wandb/offline-run-*/files/media/table/*.json")
    return [json.loads(path.read_text()) for path in sorted(files, key=lambda path: int(path.name.split("_")[1]))]


def test_wandb_gets_a_bounded_table_of_samples_and_none_of_hidden_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trajectories = batch()
    for name, hidden in (("seen", False), ("hidden", True)):
        (tmp_path / name).mkdir()
        settings = RecordSettings(
            samples_every=2, samples_per_batch=12, tensorboard=False, wandb="tried", hide_text=hidden
        )
        with closing(settings.start(tmp_path / name)) as recorder:
            for step in range(1, 45):
                recorder.step(Version(0, step), float(step), {"reward": 0.5}, trajectories)
    tables = wandb_tables(tmp_path / "seen")
    # samples of step 1 and of each second one, 23 times: tables at the first time, each tenth later one, and the end
    assert [table["data"][-1][0] for table in tables] == [1, 20, 40, 44]
    assert [len(table["data"]) for table in tables] == [12, 11 * 12, 200, 200]
    assert tables[0]["columns"] == ["step", "prompt", "completion", "reward", "parts"]
    t = trajectories[0]
    assert tables[0]["data"][0] == [1, t.prompt.text, t.completion.text, t.reward, json.dumps(t.reward_parts)]
    assert wandb_tables(tmp_path / "hidden") == []


@pytest.mark.parametrize("fields", [{"samples_per_batch": -1}, {"samples_every": -2}])
def test_settings_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UserError, match="record: "):
        RecordSettings(**fields)


def test_recording_and_reading_a_run_load_neither_torch_nor_a_display(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tba import clock
from tba.record import evaluations, ledger, live, log, memory, metrics, recorder, run_record, show, summary
memory.machine(), memory.versions(), memory.peak_gpu_memory_bytes()
recorder.RecordSettings().start(Path(sys.argv[1])).close()
heavy = {"torch", "transformers", "tensorflow", "matplotlib.pyplot", "wandb"} & set(sys.modules)
sys.exit(f"loaded {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_peak_memory_holds_what_was_touched_after_it_is_given_back() -> None:
    before = memory.resident_memory_bytes()
    if before is None:
        pytest.skip("this system does not say how much memory is resident")
    block = np.ones(1 << 25)
    assert block.nbytes == 256 << 20
    assert memory.peak_memory_bytes() >= before + (250 << 20)
    del block
    after = memory.resident_memory_bytes()
    assert after is not None
    assert after < before + (50 << 20)
    assert memory.peak_memory_bytes() >= before + (250 << 20)


def test_the_machine_is_described_without_its_name() -> None:
    found = memory.machine()
    assert found["cores"] >= 1
    assert found["memory_bytes"] is None or found["memory_bytes"] > 1 << 28
    assert not platform.node() or platform.node() not in str(found).split()


def test_a_part_s_log_has_its_lines_its_warnings_and_the_traceback_it_ended_with(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), log_to(tmp_path, "searcher-0"):
        _fail()
    text = (tmp_path / "logs" / "searcher-0.log").read_text()
    assert "INFO    tba.searcher: round 3" in text
    assert "a strange weight" in text
    assert "Traceback (most recent call last)" in text
    assert text.rstrip().endswith("ZeroDivisionError: division by zero")


def _fail() -> float:
    logging.getLogger("tba.searcher").info("round %d", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("a strange weight", stacklevel=1)
    return 1 / 0


def test_a_part_that_starts_again_goes_on_in_its_log_and_nothing_is_logged_after_it_ended(tmp_path: Path) -> None:
    for _ in range(2):
        with log_to(tmp_path, "trainer"), log_to(tmp_path, "trainer"):
            logging.getLogger("tba.trainer").info("a step")
        logging.getLogger("tba.trainer").info("after the end")
    text = log_path(tmp_path, "trainer").read_text()
    assert text.count("a step") == 2
    assert "after the end" not in text


def test_a_crash_outside_python_leaves_its_stack_in_the_log(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tba.record.log import set_up_log
set_up_log(Path(sys.argv[1]), "searcher-1")
import ctypes
def read_nowhere():
    ctypes.string_at(0)
read_nowhere()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=120)
    assert done.returncode < 0
    text = tail(log_path(tmp_path, "searcher-1"))
    assert "Segmentation fault" in text
    assert "read_nowhere" in text


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert tail(path) == ""
    path.write_text("\n".join(str(i) for i in range(30_000)))
    assert tail(path, 3) == "29997\n29998\n29999"


def test_control_characters_of_other_texts_are_spelt_out_wherever_a_library_writes_them(tmp_path: Path) -> None:
    """In a process of its own, as a command is: loggers, warnings, and what nobody catches."""
    program = r"""
import logging, sys, warnings
from pathlib import Path
from tba.record.log import log_to, spell_out_control_characters
bad = "layer\x1b]0;title\x07\x1b[31m \u202e"
spell_out_control_characters()
for name in ("transformers", "datasets", "huggingface_hub", "peft", "torch", "vllm", "tba"):
    library = logging.getLogger(name)
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    library.warning("%s has %s", name, bad)
logging.getLogger("nobody").warning(bad)
warnings.warn(bad)
with log_to(Path(sys.argv[1]), "trainer"):
    warnings.warn(bad)
    try:
        raise ValueError(bad)
    except ValueError:
        logging.getLogger("elsewhere").exception("an error")
raise ValueError(bad)
"""
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    for text, count in ((run.stderr, 7 + 3), (log_path(tmp_path, "trainer").read_text(), 2)):
        assert text.count(r"layer\x1b]0;title\x07\x1b[31m \u202e") >= count
        assert not any(character in text for character in "\x1b\x07\u202e")
