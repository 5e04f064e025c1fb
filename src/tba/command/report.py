"""`tba report RUN [RUN ...] --out report.html`: what runs did, as one page that opens offline in any browser."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from tba.command.options import ReportOptions
from tba.command.report_data import differing_settings, report_data
from tba.errors import UserError
from tba.record import metrics
from tba.record.jsonl import atomic_replacement
from tba.record.live import View
from tba.record.page import page
from tba.record.terminal import terminal
from tba.types import Json

MAX_TRAJECTORIES = 50_000  # of all runs together; of more trajectories a sample is shown
MAX_BYTES = 20_000_000  # bytes of the page
_DATA_PREFIX = b'{"made": '  # which the file of a report's data begins with


def _panel(title: str, note: str, *series: tuple[str, str], percent: bool = False, kind: str = "metrics") -> Json:
    """Returns one chart of the page; series: (metric, label)."""
    return {"title": title, "note": note, "series": series, "percent": percent, "kind": kind}


PANELS = (
    _panel("Reward", "mean of the trained batch, and of the reward's parts", (metrics.REWARD, "reward")),
    _panel("Accuracy", "held-out problems, 95 % interval", percent=True, kind="accuracy"),
    _panel(
        "Log-ratio to the reference",
        "log(policy / reference) of a trained completion, mean, nats",
        (metrics.LOG_RATIO, "log-ratio"),
        (metrics.LOG_RATIO_ALONE, "without teachers"),
    ),
    _panel("Lag", "trainer updates since sampling", (metrics.LAG, "mean"), (metrics.LAG_MAX, "largest")),
    _panel(
        "Age",
        "seconds of a trained trajectory, mean",
        (metrics.WAITING, "journal to training"),
        (metrics.IN_FLIGHT, "round to journal"),
    ),
    _panel(
        "Off-policy",
        "log(behaviour / policy) of a trained completion, nats",
        (metrics.OFF_POLICY, "mean"),
        (metrics.OFF_POLICY_LOW, "5 %"),
        (metrics.OFF_POLICY_HIGH, "95 %"),
    ),
    _panel(
        "Effective sample size, residual",
        "of the batch; spread of residual over rewards",
        (metrics.ESS, "effective sample size"),
        (metrics.RESIDUAL, "residual"),
    ),
    _panel("Entropy", "of the policy, nats a token of the batch, mean", (metrics.ENTROPY, "entropy")),
    _panel("Length", "sampled tokens of a trained completion, mean", (metrics.LENGTH, "length")),
    _panel(
        "Engine against trainer",
        "|log(behaviour / policy)| of the same weights, mean, nats",
        (metrics.MISMATCH, "a token"),
        (metrics.MISMATCH_ANSWER, "an answer"),
    ),
    _panel(
        "What teaches little",
        "share of groups, of answers, of ratios",
        (metrics.WITHOUT_SIGNAL, "groups without signal"),
        (metrics.TRUNCATED, "answers cut off"),
        (metrics.CUT, "ratios cut"),
        percent=True,
    ),
    _panel(
        "Not at work",
        "share of wall-clock so far",
        (metrics.TRAINER_IDLE, "trainer idle"),
        (metrics.TRAINER_PACED, "trainer paced"),
        (metrics.SEARCHER_EVALUATING, "searchers evaluating"),
        percent=True,
        kind="shares",
    ),
    _panel("Tokens per second", "completion tokens, of wall-clock; every use counted", kind="rates"),
)


def report_runs(runs: Sequence[Path], options: ReportOptions) -> int:
    """Writes the report, and prints its place and how many trajectories it leaves out."""
    if options.out.suffix != ".html":
        raise UserError(f"--out is {options.out}, but a report is a page: give a name that ends in .html")
    if not options.out.absolute().parent.is_dir():
        raise UserError(f"--out is {options.out}, but there is no folder {options.out.absolute().parent}: make it")
    if options.out.is_dir():
        raise UserError(f"--out is {options.out}, a folder: give another name")
    data_path = options.out.with_suffix(".json")
    if data_path.exists() and not _is_report_data(data_path):
        raise UserError(f"--out is {options.out}, whose data would replace {data_path}: give another name")
    data, content = make_report(runs)
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"
        for path, file_bytes in ((data_path, text.encode(errors="replace")), (options.out, content)):
            with atomic_replacement(path) as temporary_path:
                temporary_path.write_bytes(file_bytes)
    except OSError as error:
        raise UserError(f"{options.out} cannot be written ({error.strerror}): give another --out") from error
    view = View(terminal())
    for run in data["runs"]:
        view.say(f"{run['name']}: {sample_sentence(run)}")
    view.say(f"{options.out} ({len(content) / 1e6:.1f} MB; open it in a browser), its data in {data_path}")
    return 0


def _is_report_data(path: Path) -> bool:
    """Returns whether the file holds the data of an earlier report."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_DATA_PREFIX)) == _DATA_PREFIX


def make_report(runs: Sequence[Path], byte_limit: int = MAX_BYTES) -> tuple[dict[str, Json], bytes]:
    """Returns the data of a report, and the page that shows them, of at most `largest` bytes."""
    run_limit = int(0.9 * byte_limit) // len(runs)
    while True:
        runs_data = [report_data(path, MAX_TRAJECTORIES // len(runs), run_limit) for path in runs]
        data = {
            "made": time.time(),
            "runs": runs_data,
            "panels": PANELS,
            "different": differing_settings([run["settings"] for run in runs_data]),
        }
        content = page(data)
        if len(content) <= byte_limit or not run_limit:
            return data, content
        excess = (len(content) - byte_limit) // len(runs)
        run_limit = max(0, int(0.95 * run_limit) - excess)  # other parts are large, or the estimate was too low


def sample_sentence(run: dict[str, Json]) -> str:
    """Returns how many of the run's trajectories are shown, and which."""
    excerpt = run["trajectories"]
    if excerpt is None:
        return "it has no journal, so that no trajectories are shown"
    if excerpt["shown"] == excerpt["of"]:
        return f"all {excerpt['of']:,} trajectories are shown"
    return (
        f"{excerpt['shown']:,} of {excerpt['of']:,} trajectories are shown: the newest, best, worst and most used, "
        "and of the others a sample of whole rounds and of whole prompts; counts are of all"
    )
