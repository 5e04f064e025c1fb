"""What Prometheus is given of a real run, and who is given it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from runs import TOY, made

from tba.errors import UserError
from tba.record.callbacks import Callbacks
from tba.record.faults import record_fault
from tba.record.live import View
from tba.record.metrics import read_metrics
from tba.record.prometheus import PrometheusSettings
from tba.record.terminal import terminal
from tba.runs.running import execute
from tba.types import Json

TOKEN = "a-token-of-24-characters"


def scraped_values(url: str, token: str | None = None) -> dict[tuple[str, str], float]:
    """Each sample by its name and what it is of: the value of its second label, if it has one."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urlopen(Request(url, headers=headers), timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"a"}
    return {(s.name, s.labels.get("kind", s.labels.get("metric", ""))): s.value for s in samples}


def test_a_run_in_progress_gives_its_newest_step_its_rates_and_its_faults(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    recipe, run = made(tmp_path / "a", "--steps", "12", "--runtime", "inline", "--evaluation.every", "4")
    settings = PrometheusSettings(port=0, token_file=tmp_path / "token")
    recipe = replace(recipe, record=replace(recipe.record, prometheus=settings))
    lines: list[str] = []
    view = View(terminal())
    object.__setattr__(view, "say", lines.append)
    scrapes: list[tuple[int, dict[tuple[str, str], float]]] = []

    def scrape(row: Mapping[str, Json]) -> None:
        if row["step"] == 7:
            record_fault(run.path, "reward_retries", "one that this test has made")
        (url,) = [line.removeprefix("figures for Prometheus at ") for line in lines]
        with pytest.raises(HTTPError, match="401"):
            scraped_values(url, TOKEN + "x")
        scrapes.append((row["step"], scraped_values(url, TOKEN)))

    execute(recipe, run, view, Callbacks(on_step=scrape))
    rows = {row["step"]: row for row in read_metrics(run.path)}
    assert [step for step, _ in scrapes] == list(range(1, 13))
    for step, samples in scrapes:
        row = rows[int(samples["tba_step", ""])]
        assert row["step"] >= step
        for name in ("reward", "lag", "ess", "trainer_idle", "searcher_generating", "evaluating", "journal_rows"):
            assert samples[f"tba_{name}", ""] == row[name], name
        assert samples["tba_faults_total", "reward_retries"] == (step >= 7)
        assert samples["tba_faults_total", "searcher_restarts"] == 0
    assert scrapes[-1][1]["tba_trained_tokens_per_second", ""] > 0
    with pytest.raises(OSError, match="refused"):  # it has ended with the run
        socket.create_connection(("127.0.0.1", int(lines[0].rpartition(":")[2].partition("/")[0])), timeout=5)


def test_who_could_be_reached_by_others_needs_a_token_that_is_not_easy_to_guess(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(UserError, match=r"0\.0\.0\.0, which others can reach: give --record\.prometheus\.token-file"):
        PrometheusSettings(9400, "0.0.0.0").validate()
    for text in ("", "short", "two words that are long", "ünlesbar-für-header-zeilen"):
        file.write_text(text)
        with pytest.raises(UserError, match="at least 16 letters, digits and signs"):
            PrometheusSettings(9400, "0.0.0.0", file).validate()
    file.write_text(TOKEN)
    PrometheusSettings(9400, "0.0.0.0", file).validate()
    PrometheusSettings(9400, "::1").validate()
    PrometheusSettings(None, "0.0.0.0").validate()  # nothing is served
    with pytest.raises(UserError, match="cannot be read"):
        PrometheusSettings(9400, token_file=tmp_path / "none").validate()


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as port_owner:
        port = port_owner.getsockname()[1]
        with (
            pytest.raises(UserError, match=rf"127.0.0.1:{port} \(.*\): give another --record.prometheus.port"),
            PrometheusSettings(port).serve(tmp_path, print),
        ):
            pass


def test_nothing_listens_unless_it_is_asked_for(tmp_path: Path) -> None:
    recipe, _ = made(tmp_path / "a", source=TOY)
    assert recipe.record.prometheus == PrometheusSettings(None)
    lines: list[str] = []
    with recipe.record.prometheus.serve(tmp_path, lines.append):
        assert lines == []
