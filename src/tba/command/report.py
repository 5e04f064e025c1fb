"""`tba report RUN [RUN ...] --out report.html`: what runs did, as one page that opens offline in any browser."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from tba.command.options import ReportOptions
from tba.command.report_data import different, report_data
from tba.errors import UserError
from tba.record import metrics
from tba.record.jsonl import atomic_replacement
from tba.record.live import View
from tba.record.page import page
from tba.record.terminal import terminal
from tba.types import Json

MOST = 50_000  # trajectories of all runs together; of more a sample is shown
LARGEST = 20_000_000  # bytes of the page
_OPENING = b'{"made": '  # of its data


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
    """Write the report, and print where it is and what it leaves out."""
    if options.out.suffix != ".html":
        raise UserError(f"--out is {options.out}, but a report is a page: give a name that ends in .html")
    if not options.out.absolute().parent.is_dir():
        raise UserError(
            f"--out is {options.out}, but there is no folder {options.out.absolute().parent}: make it first"
        )
    if options.out.is_dir():
        raise UserError(f"--out is {options.out}, a folder: give another name")
    beside = options.out.with_suffix(".json")
    if beside.exists() and not _is_ours(beside):
        raise UserError(f"--out is {options.out}, whose data would replace {beside}: give another name")
    data, content = report(runs)
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"
        for path, written in ((beside, text.encode(errors="replace")), (options.out, content)):
            with atomic_replacement(path) as temporary:
                temporary.write_bytes(written)
    except OSError as error:
        raise UserError(f"{options.out} cannot be written ({error.strerror}): give another --out") from error
    view = View(terminal())
    for run in data["runs"]:
        view.say(f"{run['name']}: {said_of_sample(run)}")
    view.say(f"{options.out} ({len(content) / 1e6:.1f} MB; open it in a browser), its data in {beside}")
    return 0


def _is_ours(path: Path) -> bool:
    """Returns whether it is the data of an earlier report."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_OPENING)) == _OPENING


def report(runs: Sequence[Path], largest: int = LARGEST) -> tuple[dict[str, Json], bytes]:
    """Returns the data of a report, and the page that shows them, of at most `largest` bytes."""
    budget = int(0.9 * largest) // len(runs)
    while True:
        found = [report_data(path, MOST // len(runs), budget) for path in runs]
        data = {
            "made": time.time(),
            "runs": found,
            "panels": PANELS,
            "different": different([run["settings"] for run in found]),
        }
        content = page(data)
        if len(content) <= largest or not budget:
            return data, content
        over = (len(content) - largest) // len(runs)
        budget = max(0, int(0.95 * budget) - over)  # what else is in the page, or too low an estimate of bytes


def said_of_sample(run: dict[str, Json]) -> str:
    """Returns how many of the run's trajectories are shown, and which."""
    shown = run["trajectories"]
    if shown is None:
        return "it has no journal, so that no trajectories are shown"
    if shown["shown"] == shown["of"]:
        return f"all {shown['of']:,} trajectories are shown"
    return (
        f"{shown['shown']:,} of {shown['of']:,} trajectories are shown: the newest, best, worst and most used, and of "
        "the others a sample of whole rounds and of whole prompts; counts are of all"
    )
