"""`tba check` measures both halves and runs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba.__main__ import main
from tba.command.check import estimate
from tba.settings import find

RECIPE = str(Path(__file__).parent / "tiny_sums.py")


def test_an_estimate_is_measured_on_both_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_CACHE", str(tmp_path))  # other tests look at what their own warm start took
    e = estimate(find(RECIPE), RECIPE, ["--steps", "10"])
    assert 0 < e.step_seconds < e.total_seconds
    assert 0 < e.round_seconds < e.total_seconds
    assert e.tokens_per_round > 0
    assert min(e.trainer_bytes, e.searcher_bytes) > 50e6  # python and torch alone have more


def test_check_leaves_nothing_behind_and_names_a_wrong_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, "--nonsense", "1"]) == 2
    assert "--nonsense" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
