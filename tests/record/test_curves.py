"""The curves are drawn from what a run left."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tba.errors import UserError
from tba.evaluation.estimators import wilson_interval
from tba.record.report import PANELS, curves, draw_curves, smooth
from tba.record.run import RunRecord

MakeRun = Callable[..., Path]
TITLES = [
    *("Reward", "Accuracy", "Log-ratio to the reference", "Lag", "Age", "Off-policy"),
    *("Effective sample size, residual", "Entropy", "Engine against trainer", "What teaches little", "Not at work"),
    "Tokens per second",
]


def labelled(axes: object) -> dict[str, object]:
    """The strong lines of a panel, by label."""
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}  # type: ignore[attr-defined]


def test_there_is_a_panel_for_each_thing_to_watch_with_the_run_s_own_numbers(make_run: MakeRun) -> None:
    figure = curves([RunRecord.read(make_run())])
    assert [axes.get_title(loc="left") for axes in figure.axes] == TITLES == [panel.title for panel in PANELS]
    reward, accuracy, ratio, lag, age, off_policy, share, entropy, engine, little, idle, rates = figure.axes
    assert np.allclose(reward.lines[0].get_ydata(), np.arange(1, 41) / 40)  # faint, as recorded
    assert np.allclose(reward.lines[0].get_xdata(), 10 + 0.5 * np.arange(1, 41))
    assert np.allclose(ratio.lines[0].get_ydata(), 2 * np.arange(1, 41) / 40)
    assert list(labelled(accuracy)) == ["pass@1/greedy", "pass@1/sampled"]
    assert np.allclose(labelled(accuracy)["pass@1/sampled"].get_ydata(), [40, 80])  # type: ignore[attr-defined]
    assert list(labelled(lag)) == ["mean", "largest"]
    assert list(labelled(age)) == ["journal to training", "round to journal"]
    assert np.allclose(labelled(age)["round to journal"].get_ydata(), 0.25)  # type: ignore[attr-defined]
    assert list(labelled(off_policy)) == ["mean", "5 %", "95 %"]
    assert np.allclose(labelled(off_policy)["5 %"].get_ydata(), -0.5)  # type: ignore[attr-defined]
    assert list(labelled(share)) == ["effective sample size", "residual"]
    assert np.allclose(entropy.lines[0].get_ydata(), 0.4 * np.arange(40, 0, -1) / 40)
    assert list(labelled(engine)) == ["a token", "an answer"]
    assert list(labelled(little)) == ["groups without signal", "answers cut off", "ratios cut"]
    assert np.allclose(labelled(little)["groups without signal"].get_ydata(), 25)  # type: ignore[attr-defined]
    assert list(labelled(idle)) == ["trainer idle", "trainer paced", "searchers evaluating"]
    assert np.allclose(labelled(idle)["trainer idle"].get_ydata(), 2.0)  # type: ignore[attr-defined]
    assert list(labelled(rates)) == ["generated", "trained"]
    assert np.allclose(labelled(rates)["generated"].get_ydata(), 2000)  # type: ignore[attr-defined]
    assert np.allclose(labelled(rates)["trained"].get_ydata(), 6000)  # type: ignore[attr-defined]


def test_accuracy_carries_its_95_percent_interval(make_run: MakeRun) -> None:
    accuracy = curves([RunRecord.read(make_run())]).axes[1]
    bars = accuracy.collections[0].get_segments()
    interval = wilson_interval(0.5 * 500, 500)
    assert np.allclose(np.array(bars[0])[:, 1], [100 * interval.low, 100 * interval.high])


def test_several_runs_are_laid_over_each_other_and_named(make_run: MakeRun) -> None:
    runs = [RunRecord.read(make_run(name)) for name in ("first", "second", "third")]
    figure = curves(runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["first", "second", "third"]
    assert len(figure.axes[0].lines) == 3
    assert len({line.get_color() for line in figure.axes[0].lines}) == 3


def test_a_panel_without_numbers_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(finished=False)
    (run / "metrics.jsonl").write_text('{"step": 1, "wall_seconds": 2.0, "reward": 0.5}\n')
    said = [[text.get_text() for text in axes.texts] for axes in curves([RunRecord.read(run)]).axes]
    assert ["not recorded" in texts for texts in said] == [False, False, *[True] * 10]


def test_the_file_is_a_png_of_at_most_200_kilobytes(make_run: MakeRun) -> None:
    run = make_run()
    noisy = np.random.default_rng(0).normal(size=(2000, 3))
    with (run / "metrics.jsonl").open("a") as file:
        for i, (a, b, c) in enumerate(noisy):
            file.write(f'{{"step": {i}, "wall_seconds": {30 + i}, "reward": {a}, "log_ratio": {b}, "lag": {c}}}\n')
    path = draw_curves([RunRecord.read(run)], run / "curves.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert 20_000 < path.stat().st_size <= 200_000
    assert not list(run.glob(".curves*"))


def test_nothing_recorded_is_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(UserError, match="nothing to draw yet"):
        curves([RunRecord.read(tmp_path)])


def test_the_running_mean_keeps_a_constant_and_a_line_but_for_its_ends() -> None:
    assert np.allclose(smooth(np.full(30, 2.5)), 2.5)
    assert np.allclose(smooth(np.arange(50.0))[2:-2], np.arange(50.0)[2:-2])
