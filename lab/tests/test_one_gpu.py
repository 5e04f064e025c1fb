"""`lab/benchmarks/one_gpu.py` measures all of its parts on a CPU, and loses nothing when one fails."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.runtime.runs import alive, until
from tests.scripts import script
from torch.autograd import DeviceType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its parts")


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        import one_gpu

        yield one_gpu


@pytest.fixture(scope="module")
def parts(one_gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all parts find in a dry run."""
    out = tmp_path_factory.mktemp("one_gpu") / "one_gpu.json"
    code = one_gpu.main(["--dry-run", "--out", str(out)])
    assert code == 0, out.with_suffix(".log").read_text()[-4000:]
    parts: dict[str, Any] = json.loads(out.read_text())["parts"]
    return parts


def test_every_part_is_done_and_every_figure_is_finite(one_gpu: Any, parts: dict[str, Any]) -> None:
    assert list(parts) == [name for name in one_gpu.PARTS if name != "smollm2"]
    assert not [name for name, figures in parts.items() if {"failed", "skipped"} & set(figures)]
    arrangements = {name: figures for name, figures in parts["arrangements"].items() if isinstance(figures, dict)}
    assert {name for name, figures in arrangements.items() if "failed" in figures} == {
        "processes, MPS"
    }  # needs NVIDIA's

    def numbers(value: Any) -> Iterator[float]:
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                yield from numbers(item)
        elif isinstance(value, int | float):
            yield value

    assert all(math.isfinite(number) for number in numbers(parts))


def test_the_docs_table_names_figures_that_the_script_writes(parts: dict[str, Any]) -> None:
    tool = script("tools/one_gpu_figures.py")
    lacking = {
        f"{part}.{path}"
        for part, _, path, _, written in tool.FIGURES
        if part != "smollm2" and not tool.figure({"parts": parts}, part, path, written)
    }
    of_a_gpu = ("microseconds_a_kernel_of_a_graph", "pinned_to_device_GB_per_second", "pinned_to_host_GB_per_second")
    assert lacking == {f"environment.{name}" for name in of_a_gpu}
    assert all(name in parts[part] for name, part in tool.ARRANGEMENTS.items())


def test_what_is_asked_of_a_card_comes_first_and_in_order(one_gpu: Any) -> None:
    first = [
        "tests",
        "engine",
        "engine-256",
        "trainer",
        "sharing",
        "arrangements",
        "1.5 B",
        "8k",
        "quickstart",
        "smollm2",
    ]
    assert list(one_gpu.PARTS)[: len(first)] == first


def test_a_flow_loads_versions_while_it_generates(parts: dict[str, Any]) -> None:
    for name in ("engine", "engine-256", "engine-144"):
        assert parts[name]["flow_with_loads_tokens_per_second"] > 0
        assert parts[name]["loads"] >= 0


def test_a_token_step_launches_as_much_for_16_slots_as_for_64(parts: dict[str, Any]) -> None:
    few, many = parts["engine"], parts["engine-256"]
    assert (few["slots"], many["slots"]) == (16, 64)
    assert few["launches_a_step"] == many["launches_a_step"]


def test_a_checkpointed_step_launches_the_forward_of_its_layers_again(parts: dict[str, Any]) -> None:
    stored, recomputed = parts["trainer"], parts["trainer-checkpointed"]
    assert 1.05 < recomputed["launches_a_step"] / stored["launches_a_step"] < 1.5
    for figures in (stored, recomputed):
        assert sum(figures["shares_of_kernel_time"].values()) == pytest.approx(1, abs=1e-3)
        assert len(figures["top_kernels"]) == 10


def test_at_version_0_the_trainer_is_the_reference_and_agrees_with_the_engine(parts: dict[str, Any]) -> None:
    reference, engine = (parts["log-ratio"][f"trainer_against_{name}"] for name in ("reference", "engine"))
    assert reference["mean_square_of_an_answer"] == 0
    assert 0 < engine["mean_square_of_a_token"] < 1e-4  # bfloat16, logits of about 0.2
    assert 0.99 < engine["effective_sample_size"] <= 1 + 1e-6


def test_what_the_tests_of_the_gpu_recorded_is_among_the_figures(parts: dict[str, Any]) -> None:
    tests = {name: figures for name, figures in parts["tests"].items() if name.startswith("test_at_version_0")}
    assert {name.rpartition("[")[2] for name in tests} == {"bfloat16]", "float32]"}
    assert all(figures["mean_square_of_an_answer_against_reference"] == 0 for figures in tests.values())


def test_some_parts_only_are_measured_again_and_the_others_kept(
    one_gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one_gpu.json"
    arguments = ["--device", "cpu", "--small", "--seconds", "2400", "--out", str(out), "--only"]
    assert one_gpu.main([*arguments, "environment"]) == 0
    before = json.loads(out.read_text())
    before["parts"]["engine"] = {"slots": 16}
    out.write_text(json.dumps(before))
    assert one_gpu.main([*arguments, "environment"]) == 0
    assert json.loads(out.read_text())["parts"]["engine"] == {"slots": 16}
    before["about"]["size"] = "1.5 B"  # what was measured of another model does not stand beside it
    out.write_text(json.dumps(before))
    assert one_gpu.main([*arguments, "environment"]) == 0
    assert list(json.loads(out.read_text())["parts"]) == ["environment"]
    assert "microseconds a launch" in capsys.readouterr().out


def test_without_time_a_part_is_not_begun_and_said_so(one_gpu: Any, tmp_path: Path) -> None:
    out = tmp_path / "one_gpu.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(one_gpu, "LEAST_SECONDS", math.inf)
        assert one_gpu.main(["--device", "cpu", "--small", "--only", "environment", "--out", str(out)]) == 0
    assert list(json.loads(out.read_text())["parts"]["environment"]) == ["skipped"]


def test_a_part_that_reaches_its_limit_leaves_what_it_had_and_no_process(one_gpu: Any, tmp_path: Path) -> None:
    def endless(context: Any, note: Any) -> None:
        child = os.fork()
        if child:
            note(child=child)
        signal.pause()

    context = one_gpu.Context("cpu", "tiny", tmp_path)
    figures = one_gpu.run_in_process("endless", endless, context, 3.0, tmp_path / "log")
    assert figures["failed"] == "it was not done after 3 s"
    until(lambda: not alive(figures["child"]), 30.0, "what it had started to be gone")


def test_a_part_that_fails_says_so_by_its_last_line(one_gpu: Any, tmp_path: Path) -> None:
    def failing(context: Any, note: Any) -> None:
        note(before=1)
        raise ValueError("there is nothing to measure")

    figures = one_gpu.run_in_process(
        "failing", failing, one_gpu.Context("cpu", "tiny", tmp_path), 60.0, tmp_path / "log"
    )
    assert (figures["before"], figures["failed"]) == (1, "ValueError: there is nothing to measure")
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_captured_graph_is_one_launch_of_many_kernels_and_a_named_range_is_none(one_gpu: Any) -> None:
    from one_gpu_halves import work_of_events

    def event(name: str, on_device: bool, microseconds: float = 0.0, annotation: bool = False) -> Any:
        return SimpleNamespace(
            name=name,
            device_type=DeviceType.CUDA if on_device else DeviceType.CPU,
            self_device_time_total=microseconds,
            self_cpu_time_total=1.0,
            is_user_annotation=annotation,
            input_shapes=None,
            cpu_parent=None,
        )

    events = [
        event("aten::mm", False, 6.0),
        event("cudaLaunchKernel", False),
        event("cuLaunchKernelEx", False),
        event("cudaGraphLaunch", False),
        event("cudaMemcpyAsync", False),
        event("cudaStreamSynchronize", False),
        event("gemm", True, 6.0),
        *[event("void at::native::elementwise<4>", True, 1.0)] * 3,
        event("Memcpy HtoD (Pinned -> Device)", True, 2.0),
        event("Optimizer.step#AdamW.step", True, 1000.0, annotation=True),
    ]
    work = work_of_events(events, on_gpu=True, vocabulary=1000)
    assert (work.launches, work.kernels) == (4, 5)
    assert work.seconds == pytest.approx(11e-6)
    assert work.by_name["elementwise<4>"] == (3, pytest.approx(3e-6))
    assert work.top()[0] == ["gemm", 0.006, round(6 / 11, 4), 1.0]
    assert work.by_part["linear layers"] == pytest.approx(6e-6)
    assert (work - work).kernels == 0


def test_equal_weights_that_differ_by_a_constant_in_one_of_two_tokens(one_gpu: Any) -> None:
    ratio_BT, mask_BT = np.array([[0.1, 0.0], [-0.1, 9.0]]), np.array([[1, 1], [1, 0]])
    figures = one_gpu.log_ratio_figures(ratio_BT * mask_BT, mask_BT)
    assert figures["mean_square_of_a_token"] == pytest.approx(0.02 / 3)
    assert figures["mean_square_of_an_answer"] == pytest.approx(0.01)
    assert figures["effective_sample_size"] == pytest.approx(math.cosh(0.1) ** 2 / math.cosh(0.2))


def test_two_halves_that_take_turns_keep_as_much_as_their_times_leave(one_gpu: Any, tmp_path: Path) -> None:
    """A step of 1 and an answer of 3 seconds of a clock that passes by them alone."""
    import one_gpu_halves
    import one_gpu_sharing

    clock = [0.0]

    class Made(one_gpu_halves.Half):
        def __init__(self, seconds: float, done: int) -> None:
            self.seconds, self.done = seconds, done

        def act(self) -> int:
            clock[0] += self.seconds
            return self.done

    halves = {"trainer": partial(Made, 1.0, 1), "searcher": partial(Made, 3.0, 50)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(one_gpu_halves.time, "perf_counter", lambda: clock[0])
        rates = one_gpu_sharing.run_in_turns(halves, 70.0, "cpu", batch_tokens=100)
    assert rates == {"trainer": pytest.approx(1 / 7), "searcher": pytest.approx(100 / 7)}


def test_the_settings_of_smollm2_are_the_recipes(one_gpu: Any) -> None:
    from tba.settings import find, override

    recipe = override(find("instruct"), one_gpu.adapter_arguments("smollm2", "cpu"), "one_gpu")
    assert (recipe.model.lora.rank, recipe.steps) == (16, 40)
