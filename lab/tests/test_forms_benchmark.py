"""`lab/benchmarks/forms.py` makes the runs of a table in order, keeps each as it ends, and goes on after a stop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.scripts import script

from tba.training.tiny_models import ScratchModel, train_bpe_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SMALL = ("--steps", "2", "--groups-per-step", "2", "--prompts-per-round", "2", "--group-size", "2",
         "--samples-per-prompt", "2", "--evaluation.problems", "4", "--model.generation.max-completion-tokens", "4",
         "--model.lora.rank", "0")  # fmt: skip


@pytest.fixture(scope="module")
def forms() -> Any:
    return script("lab/benchmarks/forms.py")


def row(forms: Any, form: str, rate: float, seed: int, after: float, k: int = 16) -> Any:
    m = 0.5 if k == 16 else 0.95
    return forms.Row(
        form, k, m, rate, seed, before=0.1, after=after, ess=0.5, lag=9.0, reward=0.3, device="cpu", commit="c"
    )


def test_rates_come_first_then_seeds_then_the_other_staleness(forms: Any) -> None:
    rows: list[Any] = []
    order = []
    accuracy = {1e-4: 0.2, 2e-4: 0.3, 4e-4: 0.25}
    while cells := forms.next_cells(rows, range(2)):
        order.append(cells[0])
        rows.append(row(forms, cells[0].form, cells[0].rate, cells[0].seed, accuracy[cells[0].rate], cells[0].k))
    settings = [(c.form, c.k, c.seed) for c in order]
    first_tier, second_tier, third_tier = forms.TIERS
    tuning = [(form, 16, forms.TUNING_SEED) for form in first_tier for _ in forms.RATES]
    assert settings[:12] == tuning
    assert settings[12:20] == [(form, 16, seed) for seed in range(2) for form in first_tier]
    assert [t[0] for t in settings[20:26]] == ["grpo"] * 5 + ["grpo-answer"]
    assert settings[50:] == [(form, 1, seed) for seed in range(2) for form in (*first_tier, *second_tier, *third_tier)]
    assert {c.rate for c in order if c.seed != forms.TUNING_SEED} == {2e-4}


def test_a_best_rate_at_the_edge_is_followed_beyond_it(forms: Any) -> None:
    rows = [row(forms, "exact", rate, 100, after) for rate, after in ((1e-4, 0.1), (2e-4, 0.2), (4e-4, 0.3))]
    rates, best = forms.tuning_rates("exact", rows)
    assert (sorted(rates)[-1], best) == (pytest.approx(8e-4), None)
    assert forms.tuning_rates("exact", [*rows, row(forms, "exact", 8e-4, 100, 0.2)])[1] == 4e-4


def test_the_table_pairs_seeds_and_leaves_out_the_seed_of_the_choice(forms: Any) -> None:
    rows = [row(forms, "none", 2e-4, s, x) for s, x in enumerate((0.30, 0.20, 0.25))]
    rows += [row(forms, "exact", 2e-4, s, x) for s, x in enumerate((0.33, 0.23, 0.28))]
    tuning = [row(forms, "exact", 2e-4, forms.TUNING_SEED, x, k) for k, x in ((16, 0.99), (1, 0.5))]
    table = forms.table([*rows, *tuning])
    assert "| exact | 0.0002 | 3 | 28.0 [15.6, 40.4] | 23.0 | 0.50 | 9.0 | 3.0 [3.0, 3.0] |  |" in table
    assert "k = 16: exact 0.0002: 99.0%" in table
    assert "k = 1: exact 0.0002: 50.0%" in table


def test_the_table_has_a_form_at_its_best_rate_alone(forms: Any) -> None:
    tuning = [row(forms, "grpo", rate, forms.TUNING_SEED, x) for rate, x in ((4e-4, 0.3), (8e-4, 0.4), (16e-4, 0.4))]
    counted = [row(forms, "grpo", rate, 0, x) for rate, x in ((4e-4, 0.9), (8e-4, 0.2))]
    assert "| grpo | 0.0008 | 1 | 20.0 | 20.0 |" in forms.table([*tuning, *counted])


def test_a_rate_that_was_tuned_at_the_same_k_goes_before_that_of_stale_data(forms: Any) -> None:
    tuning = [row(forms, "grpo", rate, forms.TUNING_SEED, x) for rate, x in ((4e-4, 0.3), (8e-4, 0.4))]
    tuning += [row(forms, "grpo", rate, forms.TUNING_SEED, x, 1) for rate, x in ((4e-4, 0.7), (8e-4, 0.6))]
    counted = [row(forms, "grpo", rate, 0, x, k) for rate, x, k in ((4e-4, 0.9, 1), (8e-4, 0.2, 1), (8e-4, 0.1, 16))]
    table = forms.table([*tuning, *counted])
    assert "| grpo | 0.0004 | 1 | 90.0 | 90.0 |" in table
    assert "| grpo | 0.0008 | 1 | 10.0 | 10.0 |" in table
    assert "20.0" not in table


def test_the_baselines_are_what_their_names_say(forms: Any) -> None:
    form = {name: getattr(forms.OBJECTIVES[name], "correction", None) for name in forms.OBJECTIVES}
    assert (form["grpo-token"].form, form["grpo-token"].level) == ("truncate", "token")
    assert (form["grpo-answer"].form, form["grpo-answer"].level) == ("truncate", "sequence")
    assert (form["decoupled"].form, form["grpo"].form) == ("decoupled", "clip")
    assert (forms.OBJECTIVES["raft-best"].keep, forms.OBJECTIVES["raft"].keep) == ("best", "positive")
    assert {name for tier in forms.TIERS for name in tier} == forms.OBJECTIVES.keys() - {
        "raft", "spread-half", "spread-one", "least-variance", "least-variance-ones",
    }  # fmt: skip


def test_both_regimes_weigh_half_whatever_the_number_of_their_seeds(forms: Any) -> None:
    assert forms.pooled_by_halves([1.0, 3.0], [-4.0] * 4) == "-1.0 [-7.4, 5.4], standard error 0.5"
    rows = [row(forms, "none", 2e-4, s, 0.2, k) for s in range(3) for k in (16, 1)]
    rows += [row(forms, "exact", 2e-4, s, 0.23, 16) for s in range(3)]
    rows += [row(forms, "exact", 2e-4, s, 0.21, 1) for s in range(2)]
    assert "exact less none, both regimes alike: 2.0 [" in forms.table(rows)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = train_bpe_tokenizer(["Name an animal that begins with the letter b."], 270)
    tokenizer.chat_template = TEMPLATE
    scratch = ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=16, max_positions=1024)
    scratch.start(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("form", ["asymmetric", "decoupled", "tba-prime"])
def test_runs_are_made_and_kept_and_equal_when_made_again(tmp_path: Path, model: Path, forms: Any, form: str) -> None:
    arguments = ["--model.path", str(model), "--model.device", "cpu", "--prompts.max-tokens", "1000", *SMALL]
    cell, result_rows = forms.Cell(form, 16, 0.5, 1e-4, 0), []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.csv"
        assert forms.Bench(path, tmp_path / name, "cpu", arguments).make_runs(1, partial(forms.missing_cells, [cell]))
        result_rows += forms.read_rows(path)
        assert [p.name for p in (tmp_path / name).iterdir()] == [f"{cell.name}.log"]
    assert [r.name for r in result_rows] == [cell.name] * 2
    assert result_rows[0] == result_rows[1]


def test_the_second_rule_tunes_at_each_age_and_pools_by_precision(forms: Any) -> None:
    rows: list[Any] = []
    while cells := forms.next_rule_cells(rows):
        cell = cells[0]
        after = {1e-4: 0.2, 2e-4: 0.4, 4e-4: 0.3}[cell.rate] + (cell.form == "asymmetric") * 0.05
        spread = 0.01 * (cell.seed % 2)
        rows.append(row(forms, cell.form, cell.rate, cell.seed, after + spread * (cell.form == "none"), cell.k))
    counts = {(form, k): sum((r.form, r.k) == (form, k) for r in rows) for form in forms.RULE_FORMS for k in (16, 1)}
    assert counts == {(form, k): 3 + n for form in forms.RULE_FORMS for k, n in ((16, 16), (1, 25))}
    verdict = forms.rule_verdict(rows, *forms.RULE_FORMS)
    assert verdict.startswith("asymmetric less none: 4.5 (0.1) at k = 16, 4.5 (0.1) at k = 1; pooled 4.5 [")
    assert verdict.endswith(": asymmetric")
    noise = {"none": (0.30, 0.31, 0.35), "asymmetric": (0.31, 0.30, 0.36)}
    equal_rows = [
        row(forms, form, 2e-4, s, x, k) for form, xs in noise.items() for s, x in enumerate(xs) for k in (16, 1)
    ]
    assert forms.rule_verdict(equal_rows, *forms.RULE_FORMS).endswith(": none")
    assert "waits for runs: 0 pairs" in forms.rule_verdict([], *forms.RULE_FORMS)


def test_where_no_rate_was_chosen_the_table_has_each_and_compares_none(forms: Any) -> None:
    rows = [row(forms, "decoupled", rate, 0, x) for rate, x in ((4e-4, 0.3), (8e-4, 0.5))]
    table = forms.table([*rows, row(forms, "none", 4e-4, 0, 0.2)])
    assert "| decoupled | 0.0004 | 1 | 30.0 | 30.0 | 0.50 | 9.0 | 10.0 |  |" in table
    assert "| decoupled | 0.0008 | 1 | 50.0 | 50.0 | 0.50 | 9.0 | 30.0 |  |" in table
    assert forms.paired_gains(rows, "none", "decoupled", 16) == []
