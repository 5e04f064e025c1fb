"""Lines that a crash can only shorten."""

import json
import math
import multiprocessing
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.record.evaluations import EvaluationWriter, RunningEvaluations, read_evaluations
from tba.record.faults import count_faults, note_unreadable, record_fault
from tba.record.jsonl import JsonLines, NewLines, as_json, read_last_line, read_lines, read_lines_and_errors, write_json
from tba.record.metrics import (
    GENERATED_TOKENS,
    PART,
    MetricsWriter,
    RunningMetrics,
    column,
    rates,
    read_last,
    read_metrics,
)
from tba.types import Evaluation, StopReason, Version

ROWS = [{"step": i, "text": f"zeile {i}\nä\u2028 end", "reward": i / 3} for i in range(4)]


def written(path: Path) -> bytes:
    with closing(JsonLines(path)) as lines:
        for row in ROWS:
            lines.append(row)
    return path.read_bytes()


def test_half_a_surrogate_pair_is_written_as_a_question_mark(tmp_path: Path) -> None:
    write_json(tmp_path / "failure.json", {"message": "cannot grade \ud83d"})
    assert json.loads((tmp_path / "failure.json").read_text()) == {"message": "cannot grade ?"}


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl")
    assert read_lines(tmp_path / "a.jsonl") == ROWS


def test_a_line_is_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "a.jsonl")) as lines:
        lines.append(ROWS[0])
        assert read_lines(tmp_path / "a.jsonl") == ROWS[:1]


def test_a_file_cut_at_any_byte_reads_as_its_whole_lines_and_goes_on_after_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = written(path)
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        kept = ROWS[: whole[:end].count(b"\n")]
        assert read_lines(path) == kept
        assert read_last_line(path) == (kept[-1] if kept else None)
        with closing(JsonLines(path)) as lines:
            lines.append({"after": end})
        assert read_lines(path) == [*kept, {"after": end}]


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * 200_000)
    with closing(JsonLines(path)) as lines:
        lines.append({"c": 2})
    assert path.read_bytes() == b'{"a": 1}\n{"c": 2}\n'


def test_a_line_torn_by_one_writer_is_cut_off_by_another_that_was_open_already(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with closing(JsonLines(path)) as one:
        one.append({"a": 1})
        with path.open("ab") as killed:
            killed.write(b'{"torn": ')
        one.append({"b": 2})
    assert read_lines(path) == [{"a": 1}, {"b": 2}]


def _append_many(path: Path, writer: int) -> None:
    with closing(JsonLines(path)) as lines:
        for i in range(200):
            lines.append({"writer": writer, "i": i, "text": "x" * (i * 7 % 300)})


def test_several_processes_may_append_to_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_many, args=(tmp_path / "a.jsonl", w)) for w in range(2)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
    rows = read_lines(tmp_path / "a.jsonl")
    for w in range(2):
        assert [row["i"] for row in rows if row["writer"] == w] == list(range(200))


DAMAGED = [b"nonsense", b"[]", b"3", b"", b"\xff\xfe", b'{"a": ', b"[" * 200_000, b'{"a": "x"}']


def test_lines_that_cannot_be_read_are_passed_over_and_numbered(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for damaged in DAMAGED:
        path.write_bytes(b'{"a": 1}\n' + damaged + b'\n{"a": 2}\n' + damaged + b"\n")
        assert read_lines_and_errors(path, lambda row: 1 + row["a"]) == ([2, 3], [2, 4])
        assert read_lines(path, lambda row: 1 + row["a"]) == [2, 3]
        assert read_last_line(path, lambda row: 1 + row["a"]) == 3
        path.write_bytes(damaged + b"\n")
        assert read_last_line(path, lambda row: 1 + row["a"]) is None


def test_a_file_of_records_with_damaged_lines_is_read_and_each_such_line_is_a_fault_once(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in (1, 2):
            writer.write(Version(0, step), float(step), {"reward": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": "three", "wall_seconds": 3}\n[]\n')
    (tmp_path / "evaluations.jsonl").write_text('{"metric": "pass@1"}\n')
    record_fault(tmp_path, "resumes", "it was killed")
    with (tmp_path / "faults.jsonl").open("a") as file:
        file.write("{}\n")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert read_last(tmp_path)["step"] == 2
    assert read_evaluations(tmp_path) == []
    for _ in range(2):
        assert note_unreadable(tmp_path) == [
            "metrics.jsonl: 2 lines cannot be read and are left out, the first is line 3",
            "evaluations.jsonl: line 1 cannot be read and is left out",
            "faults.jsonl: line 2 cannot be read and is left out",
        ]
        assert count_faults(tmp_path)["unreadable_lines"] == 4
    assert count_faults(tmp_path)["resumes"] == 1


def test_only_what_is_new_is_read_whatever_is_appended_cut_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = NewLines(path)
    assert lines.read() == (False, [])
    path.write_bytes(b'{"a": 1}\n{"b": ')
    assert lines.read() == (True, [{"a": 1}])
    assert lines.read() == (False, [])
    with path.open("ab") as file:
        file.write(b"2}\nnonsense\n[3]\n" + b"[" * 200_000 + b'\n{"c": "\xc2\x85\xe2\x80\xa8"}\n')
    assert lines.read() == (False, [{"b": 2}, {"c": "\x85\u2028"}])
    assert lines.bad_lines == [3, 4, 5]
    path.write_bytes(b'{"a": 1}\n')  # cut
    assert (lines.read(), lines.bad_lines) == ((True, [{"a": 1}]), [])
    path.write_bytes(b'{"z": 9}\n{"b": 2}\n')  # another, longer than what was read
    assert lines.read() == (True, [{"z": 9}, {"b": 2}])
    (tmp_path / "beside").write_bytes(b'{"z": 8}\n{"b": 2}\n{"d": 4}\n')  # whose line there is the same
    (tmp_path / "beside").replace(path)
    assert lines.read() == (True, [{"z": 8}, {"b": 2}, {"d": 4}])
    path.unlink()
    assert lines.read() == (True, [])


@settings(max_examples=50)
@given(st.lists(st.integers(0, 40), max_size=8))
def test_lines_that_are_read_as_they_come_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    whole, path = written(folder / "whole.jsonl"), folder / "a.jsonl"
    lines, found = NewLines(path), []
    ends = sorted(min(len(whole), sum(cuts[:i])) for i in range(len(cuts)))
    for start, end in zip([0, *ends], [*ends, len(whole)], strict=True):
        with path.open("ab") as file:
            file.write(whole[start:end])
        found += lines.read()[1]
    assert found == ROWS


def test_the_last_line_is_found_though_it_is_longer_than_a_block(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "a.jsonl")) as lines:
        lines.append({"a": 1})
        lines.append({"b": "x" * 200_000})
    assert read_last_line(tmp_path / "a.jsonl") == {"b": "x" * 200_000}


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none.jsonl") == []
    assert read_last_line(tmp_path / "none.jsonl") is None


def test_numbers_of_numpy_become_numbers_and_what_is_not_finite_becomes_null() -> None:
    values = {
        "a": np.float32(0.5),
        "b": np.int64(3),
        "c": np.bool_(True),
        "d": np.array([1.0, np.nan]),
        "e": float("inf"),
        "f": Version(1, 20),
        "g": StopReason.EOS,
        "h": (1, None),
    }
    assert as_json(values) == {
        "a": 0.5, "b": 3, "c": True, "d": [1.0, None], "e": None, "f": "1.20", "g": "eos", "h": [1, None],
    }  # fmt: skip


def test_what_has_no_plain_form_is_named() -> None:
    with pytest.raises(TypeError, match="object has no plain JSON form"):
        as_json({"a": [object()]})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), json_values))
def test_what_json_can_hold_is_unchanged(value: dict[str, object]) -> None:
    assert as_json(value) == value
    assert b"\n" not in json.dumps(as_json(value)).encode()


def test_a_json_file_is_replaced_whole_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    write_json(tmp_path / "s.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "s.json", {"a": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 1}
    write_json(tmp_path / "s.json", {"a": float("nan")})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": None}
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_a_metrics_line_holds_step_version_and_wall_clock_and_its_metrics(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(Version(1, 20), 3.14159, {"reward": np.float32(0.5), "grad_norm": float("nan"), "step": 99.0})
    writer.close()
    assert (
        [read_last(tmp_path)]
        == read_metrics(tmp_path)
        == [{"step": 20, "version": "1.20", "wall_seconds": 3.142, "reward": 0.5, "grad_norm": None}]
    )


def test_a_column_leaves_out_what_is_missing_or_not_finite() -> None:
    rows = [{"wall_seconds": 1.0, "a": 5}, {"wall_seconds": 2.0}, {"wall_seconds": 3.0, "a": None}, {"a": 1}]
    x, y = column(rows, "a")
    assert (x.tolist(), y.tolist()) == ([1.0], [5.0])
    assert column([], "a")[0].shape == (0,)


def test_rates_are_tokens_per_second_of_wall_clock() -> None:
    rows = [{"wall_seconds": 10 + 0.5 * i, "generated_tokens": 1000 * i, "tokens": 300} for i in range(101)]
    found = rates(rows)
    assert found["generated"][1] == pytest.approx(np.full(20, 2000.0))
    assert found["trained"][1] == pytest.approx(np.full(20, 600.0))
    assert found["trained"][0][[0, -1]] == pytest.approx([11.25, 58.75])  # the middles of 20 spans of 2.5 s
    slower = [*rows, {"wall_seconds": 110.0, "generated_tokens": 101_000, "tokens": 300}]
    x, y = rates(slower)["generated"]
    assert (y * (x[1] - x[0])).sum() == pytest.approx(101_000)  # nothing is lost between the points


def test_what_was_not_recorded_has_no_rate() -> None:
    found = rates([{"wall_seconds": 1.0, "tokens": 5}, {"wall_seconds": 2.0, "tokens": 5}])
    assert len(found["generated"][1]) == 0
    assert found["trained"][1] == pytest.approx([5.0])
    assert all(len(y) == 0 for _, y in rates([]).values())


def test_the_live_view_gets_means_of_the_newest_50_steps_also_of_the_rewards_parts(tmp_path: Path) -> None:
    metrics, writer = RunningMetrics(tmp_path), MetricsWriter(tmp_path)
    assert metrics.mean("lag") is None
    for step in range(1, 121):
        writer.write(Version(0, step), float(step), {"lag": float(step), f"{PART}right": step % 2, "ess": math.nan})
    writer.close()
    metrics.read_new()
    assert metrics.mean("lag") == sum(range(71, 121)) / 50
    assert metrics.parts() == {"right": 0.5}
    assert metrics.mean("ess") is None


@pytest.mark.parametrize("round_seconds", [1, 4, 30, 200])
def test_the_rate_of_long_rounds_is_not_0_between_their_ends(tmp_path: Path, round_seconds: int) -> None:
    """A searcher of 100 tokens per second is shown within a factor of two at every step after its second round."""
    metrics, writer = RunningMetrics(tmp_path), MetricsWriter(tmp_path)
    seen = []
    for second in range(1, 1001):
        writer.write(Version(0, second), float(second), {GENERATED_TOKENS: 100.0 * (second - second % round_seconds)})
        if second >= 2 * round_seconds and second % 7 == 0:
            metrics.read_new()
            seen.append(metrics.rate("generated"))
    writer.close()
    assert all(rate is not None and 50 <= rate <= 200 for rate in seen)
    assert metrics.rate("trained") is None


def test_the_figures_shown_are_of_the_newest_version_alone(tmp_path: Path) -> None:
    found, writer = RunningEvaluations(tmp_path), EvaluationWriter(tmp_path)
    first = [Evaluation(Version(), 0.0, name, 0.3, 100) for name in ("pass@1/sampled", "pass@4/sampled")]
    writer.write(first)
    found.read_new()
    assert [(e.metric, e.value) for e in found.newest] == [("pass@1/sampled", 0.3), ("pass@4/sampled", 0.3)]
    writer.write([Evaluation(Version(0, 50), 9.0, "pass@1/sampled", 0.5, 100)])
    writer.write(first)  # of another searcher, that took longer
    found.read_new()
    assert [(e.value, e.version) for e in found.newest] == [(0.5, Version(0, 50))]
    writer.close()


def test_a_fault_of_a_run_that_was_moved_away_makes_no_other_folder(tmp_path: Path) -> None:
    record_fault(tmp_path / "run", "no_signal", "all rewards were the same")
    assert not (tmp_path / "run").exists()
