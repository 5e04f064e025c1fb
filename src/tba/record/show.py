"""A run on a page: `tba show RUN`, and the end of the quickstart.

Invariant: made from what the run left on disk alone; what an unfinished run lacks is said to be missing, and an account
that does not close is said not to.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tba.evaluation.estimators import SAMPLED
from tba.record import metrics
from tba.record.evaluations import RecordedAnswer, figure
from tba.record.ledger import TERMS, Ledger
from tba.record.metrics import MEAN_STEPS, column
from tba.record.run_record import BackupFacts, RunRecord
from tba.record.summary import NOTABLE_WAIT, Summary
from tba.record.text import (
    duration,
    frame_of,
    hundredfold,
    join_pairs,
    percent,
    plural,
    printable,
    short_number,
    size,
    strip_frame,
)
from tba.types import Evaluation, Json

ANSWERS_SHOWN = 5
BARS, SPANS = "▁▂▃▄▅▆▇█", 36  # heights of a curve, and in how many spans its steps are parted at most


def show(run: RunRecord) -> RenderableType:
    """Returns all results of a run, or those so far when it has not ended."""
    parts = [brief(run), section("The course", course_table(run))]
    if run.summary is None:
        parts += [section("So far", _progress_table(run)), section("Health", health_table(run))]
    else:
        parts.append(section("Health", health_table(run)))
        parts.append(section("What became of what was generated", ledger_table(run.summary)))
        parts.append(section("The run", facts_table(summary_facts(run.summary))))
    if run.backup is not None:
        parts.append(section("The newest backup", Text(printable(_describe_backup(run.backup), 300))))
    parts += [Text(sentence, style="yellow") for sentence in run.unreadable]
    return Group(*parts)


def _describe_backup(backup: BackupFacts) -> str:
    age = duration(time.time() - backup.time)
    return f"{age} ago, {backup.rows:,} trajectories, {size(backup.bytes)}, at {backup.place}"


def brief(run: RunRecord) -> RenderableType:
    """Returns a run's name, its held-out accuracy before and after, and warnings of figures that fell."""
    return Group(_heading(run), section("Held-out accuracy", held_out_table(run)), *_falls_section(run))


def comparison(runs: Sequence[RunRecord], settings: Mapping[str, Sequence[str]]) -> RenderableType:
    """Returns a table that compares runs, a column per run. settings: those that differ, with the value of each run."""
    figures: dict[str, list[str]] = {
        "steps": [str(run.steps) for run in runs],
        "wall-clock": [duration(run.wall_seconds) for run in runs],
    }
    held_out = [run.figures() for run in runs]
    for metric in dict.fromkeys(metric for run_figures in held_out for metric in run_figures):
        spans = [run_figures.get(metric, (None, None)) for run_figures in held_out]
        figures[printable(metric, 60)] = [" -> ".join(map(_short, span if span[1] else span[:1])) for span in spans]
    summaries = [run.summary for run in runs]
    figures |= {
        "lag": [f"{s.lag.mean:.1f}" if s else "-" for s in summaries],
        "samples per insert": [f"{s.trajectories.samples_per_insert:.2f}" if s else "-" for s in summaries],
        "trainer idle": [percent(s.trainer_idle) if s else "-" for s in summaries],
        "searchers evaluating": [percent(s.searcher_evaluating) if s else "-" for s in summaries],
        "warnings": [str(len(run.warnings)) for run in runs],
    }
    differs = _runs_columns(runs, settings) if settings else Text("no setting")
    return Group(section("What differs", differs), section("How they did", _runs_columns(runs, figures)))


def _runs_columns(runs: Sequence[RunRecord], rows: Mapping[str, Sequence[str]]) -> Table:
    table = table_of("", *(printable(run.name, 40) for run in runs), gap=1)
    for name, values in rows.items():
        table.add_row(name, *(printable(value, 200) for value in values))
    return table


def _short(evaluation: Evaluation | None) -> str:
    return "-" if evaluation is None else percent(evaluation.value)


def runs_table(runs: Sequence[RunRecord | Path], living: Sequence[bool]) -> RenderableType:
    """Returns a table with a row for each run: its state, its steps and its newest held-out figure. A run that cannot
    be read has only the name of its folder.
    """
    table = table_of("run", "state", "steps", "time", "held out", justify="left")
    for run, is_alive in zip(runs, living, strict=True):
        if isinstance(run, Path):
            table.add_row(printable(run.name, 80), "cannot be read", "-", "-", "-")
            continue
        newest = max(run.evaluations, key=lambda e: e.version, default=None)
        figure = "-" if newest is None else f"{newest.metric} {_short(newest)}"
        cells = (_state(run, is_alive), f"{run.steps}", duration(run.wall_seconds), printable(figure, 80))
        table.add_row(printable(run.name, 80), *cells)
    return table


def _state(run: RunRecord, is_alive: bool) -> str:
    if run.summary is not None:
        return "stopped" if run.summary.faults.get("stopped") else "ended"
    return "failed" if run.failure else "running" if is_alive else "killed"


def closing_page(run: RunRecord) -> RenderableType:
    """Returns a run's accuracy and answers before and after, what the training cost, and the run's directory."""
    parts = [brief(run)]
    answer_pairs = run.answers_before_after()[:ANSWERS_SHOWN]
    if answer_pairs:
        parts.append(section("The same held-out problems, before and after", answers_table(answer_pairs)))
    if run.summary is not None:
        parts.append(section("What it took", _cost(run.summary)))
    files = [name for name in ("summary.json",) if (run.directory / name).exists()]
    location = Text.assemble(
        ("The run lies in ", ""), (printable(str(run.directory)), "bold"), f" ({', '.join(files)})." if files else "."
    )
    parts.append(Padding(location, (1, 0, 0, 0)))
    return Group(*parts)


def held_out_table(run: RunRecord) -> RenderableType:
    """Returns a row per metric: the figures before and after with 95 % intervals, and their difference (80 columns)."""
    if not (figures := run.figures()):
        return Text("not evaluated yet", style="dim")
    table = table_of("metric", "before", "after", "points", "problems", gap=1)
    for name, (before, after) in figures.items():
        is_same_size = after is not None and after.n == before.n  # during a run there may be fewer
        change = hundredfold(after.value - before.value, sign=True) if after and is_same_size else "-"
        problems = f"{before.n}" if after is None or is_same_size else f"{before.n}, {after.n}"
        table.add_row(printable(name, 60), figure(before), figure(after), change, problems)
    return table


def course_table(run: RunRecord) -> RenderableType:
    """Returns reward, held-out accuracy and effective sample size as bars, each the mean over equally many steps."""
    names, spans = run.figures(), min(SPANS, run.steps + 1)
    metric = SAMPLED if SAMPLED in names else next(iter(names), "")
    held_out = [(e.version.step, e.value) for e in run.evaluations if e.metric == metric]
    table = table_of("", f"steps 0 to {run.steps}", "lowest", "highest", gap=1)
    for label, (steps, values), as_text in (
        ("reward", column(run.metrics, metrics.REWARD, "step"), _number),
        (printable(metric, 40), np.array(held_out).reshape(-1, 2).T, percent),
        ("effective sample size", column(run.metrics, metrics.ESS, "step"), percent),
    ):
        if len(steps):
            span_of_step = np.minimum(spans - 1, steps * spans / (run.steps + 1)).astype(int)
            means = {i: float(values[span_of_step == i].mean()) for i in set(span_of_step.tolist())}
            low, high = min(means.values()), max(means.values())
            bars = {i: BARS[round((len(BARS) - 1) * (mean - low) / (high - low or 1.0))] for i, mean in means.items()}
            table.add_row(label, "".join(bars.get(i, " ") for i in range(spans)), as_text(low), as_text(high))
    return table if table.row_count else Text("no step recorded yet", style="dim")


def answers_table(answer_pairs: Sequence[tuple[RecordedAnswer, RecordedAnswer]]) -> RenderableType:
    """Returns a row per problem: the question, the answer before and the answer after, each with its grade."""
    table = table_of("problem", "before", "after", justify="left")
    frame = frame_of(before.prompt for before, _ in answer_pairs)
    for before, after in answer_pairs:
        question = printable(strip_frame(frame, before.prompt), 300).strip()
        table.add_row(Text(question), _graded_text(before), _graded_text(after))
    return table


def ledger_table(summary: Summary) -> RenderableType:
    """Returns the account of tokens and of trajectories, and whether each closes."""
    table = table_of("", "tokens", "trajectories")
    for name in TERMS:
        table.add_row(
            name.replace("_", " "), f"{getattr(summary.tokens, name):,}", f"{getattr(summary.trajectories, name):,}"
        )
    table.add_row("closes", _closes(summary.tokens), _closes(summary.trajectories))
    return table


def _falls_section(run: RunRecord) -> list[RenderableType]:
    """Returns warnings of figures far below their best, and the best checkpoint if that is not the newest."""
    lines = [Text(printable(sentence, 300), style="yellow") for sentence in run.warnings]
    if run.best is not None:
        lines.append(Text(f"best: {run.best}" if run.warnings else run.best))
    return [section("Warnings" if run.warnings else "The best checkpoint", Group(*lines))] if lines else []


def _heading(run: RunRecord) -> RenderableType:
    summary = run.summary
    if summary is None:
        reason = "no summary: it is running, or was killed"
        if run.failure:
            reason = f"failed: {run.failure}: {run.failure.message} (logs: {run.directory / 'logs'})"
        return Text.assemble(
            (run.name, "bold"),
            f"  step {run.steps}, {duration(run.wall_seconds)}; ",
            (printable(reason, 1000, newlines=False), "yellow"),
        )
    recipe = printable(summary.recipe, 100, newlines=False)
    return Text.assemble(
        (run.name, "bold"),
        f"  {recipe}, seed {summary.seed}, {summary.steps} steps, {duration(summary.wall_seconds.total)}",
    )


def _progress_table(run: RunRecord) -> RenderableType:
    facts = {label: as_text(value) for name, label, as_text in _LATEST if (value := run.latest(name)) is not None}
    facts |= {f"tokens/s {half}": f"{y[-1]:.4g}" for half, (_, y) in metrics.rates(run.metrics).items() if len(y)}
    return facts_table(facts) if facts else Text("no step recorded yet", style="dim")


def health_table(run: RunRecord) -> RenderableType:
    """Returns the figures that show whether a run goes wrong: means over its first steps and over as many last ones."""
    steps = max(1, min(MEAN_STEPS, len(run.metrics) // 2))
    table = table_of("", f"first {steps} steps", f"last {steps}", gap=2)
    for name, label, as_text in _HEALTH:
        _, values = column(run.metrics, name)
        if len(values):
            table.add_row(label, as_text(float(values[:steps].mean())), as_text(float(values[-steps:].mean())))
    return table if table.row_count else Text("no step recorded yet", style="dim")


def _number(value: float) -> str:
    return f"{value:.3g}"


_LATEST: Sequence[tuple[str, str, Callable[[float], str]]] = (
    (metrics.REWARD, "reward", "{:.4g}".format),
    (metrics.LOG_RATIO, "log-ratio to the reference", "{:.4g}".format),
    (metrics.LOG_RATIO_ALONE, "the same, without teachers", "{:.4g}".format),
    (metrics.LAG, "lag", "{:.4g}".format),
    (metrics.TRAINER_IDLE, "trainer idle", percent),
    (metrics.TRAINER_PACED, "trainer paced", percent),
)
_HEALTH: Sequence[tuple[str, str, Callable[[float], str]]] = (
    (metrics.ENTROPY, "entropy of the policy, nats a token", _number),
    (metrics.ESS, "effective sample size", percent),
    (metrics.CUT, "ratios cut", percent),
    (metrics.DRIFT, "an update's move, nats a token", _number),
    (metrics.MISMATCH, "engine against trainer, nats a token", _number),
    (metrics.MISMATCH_ANSWER, "the same, nats an answer", _number),
    (metrics.WITHOUT_SIGNAL, "groups without signal", percent),
    (metrics.LENGTH, "tokens of an answer", _number),
    (metrics.TRUNCATED, "answers cut off", percent),
)


def summary_facts(summary: Summary) -> dict[str, str]:
    """Returns the facts of a run's summary in words, by their labels."""
    wall, trajectories = summary.wall_seconds, summary.trajectories
    facts = {
        "wall-clock": f"{duration(wall.total)}: warm start {duration(wall.sft)}, warm-up {duration(wall.warm_up)}, "
        f"training {duration(wall.train)}, evaluation {duration(wall.eval)}",
        "waiting after warm-up": _waiting(summary),
        "lag": _lag(summary),
        "problems": _problems(summary),
        "of the newest arrivals": f"{percent(summary.recent_share)} of the groups",
        "samples per insert": f"{trajectories.samples_per_insert:.2f}, "
        f"{percent(trajectories.trained_share)} of what arrived was trained",
        "slow side": _slow_side(summary),
        "control": _control(summary),
        "reference reset": _reference_resets(summary),
        "joined": _joined_searchers(summary),
        "served to agents": _served(summary),
        "faults": join_pairs({kind: count for kind, count in summary.faults.items() if count}),
        "peak memory": join_pairs({part: size(peak) for part, peak in summary.peak_memory_bytes.items()}),
        "utilisation": _utilisation(summary),
        "versions": join_pairs(summary.versions),
        "machine": _machine(summary.machine),
    }
    return {label: fact for label, fact in facts.items() if fact}


def _problems(summary: Summary) -> str:
    """Returns how many problems were not asked unchanged, and why; empty where all were."""
    sentences = []
    for split, counts in summary.prompts.items():
        other_counts = {name: count for name, count in counts.items() if name not in ("problems", "prompts") and count}
        if other_counts:
            shares = f"{counts['prompts']:,} of {counts['problems']:,} {'trained' if split == 'train' else 'held out'}"
            sentences.append(f"{shares} ({', '.join(f'{name} {count:,}' for name, count in other_counts.items())})")
    return ", ".join(sentences)


def _cost(summary: Summary) -> RenderableType:
    tokens = summary.tokens
    sources = f"{short_number(tokens.generated)} generated"
    if tokens.imported:
        sources += f" and {short_number(tokens.imported)} imported"
    facts = {
        "time": f"{duration(summary.wall_seconds.total)} for {summary.steps} steps",
        "tokens trained": f"{percent(tokens.trained_share)} of the {sources}, each used {tokens.mean_uses:.1f} times",
        "lag": _lag(summary),
        "problems": _problems(summary),
        "waiting after warm-up": _waiting(summary),
    }
    return facts_table({label: fact for label, fact in facts.items() if fact})


def _utilisation(summary: Summary) -> str:
    shares = ", ".join(f"{half} {percent(share)}" for half, share in summary.utilisation.items())
    return shares and f"{shares} of the rate of a large product of matrices"


_LEAST_WAITING = 0.005  # share of a searcher's time


def _waiting(summary: Summary) -> str:
    trainer = f"trainer idle {percent(summary.trainer_idle)}, paced {percent(summary.trainer_paced)}"
    evaluating = percent(summary.searcher_evaluating)
    judge = summary.searcher_time.get("reward", 0.0)
    for_judge = f", waiting for the judge {percent(judge)}" if judge >= _LEAST_WAITING else ""
    return f"{trainer}; searchers idle {percent(summary.searcher_idle)}, evaluating {evaluating}{for_judge}"


def _slow_side(summary: Summary) -> str:
    side, uses = summary.slow_side, summary.trajectories.samples_per_insert
    share = {"searchers": summary.trainer_idle + summary.trainer_paced, "trainer": summary.searcher_paced}.get(side, 0)
    waiter = {"searchers": "the trainer", "trainer": "searchers"}.get(side, "")
    reason = (
        f"{waiter} waited {percent(share)} of the time" if share >= NOTABLE_WAIT else f"{uses:.2f} uses of a trajectory"
    )
    return f"{side} ({reason})"


def _control(summary: Summary) -> str:
    if not summary.control:
        return ""
    last_move = summary.control[-1]
    moves = f"{len(summary.control)} moves by {last_move['signal']}"
    return f"{moves}, the last after step {last_move['step']} to k = {last_move['sync_every']}, m = {last_move['m']:g}"


def _lag(summary: Summary) -> str:
    lag = summary.lag
    return f"{lag.mean:.1f} updates on average, 95 % within {lag.p95:.0f}, at most {lag.max:.0f}"


def _reference_resets(summary: Summary) -> str:
    steps = ", ".join(str(reset["step"]) for reset in summary.reference_resets)
    return steps and f"after step {steps}"


def _served(summary: Summary) -> str:
    """Returns what agents were served."""
    return ", ".join(f"{count:,} {name}" for name, count in summary.served.items())


def _joined_searchers(summary: Summary) -> str:
    """Returns how many searchers joined during the run, and how they left."""
    departures = Counter(str(searcher.get("how")) for searcher in summary.joined)
    return f"{len(summary.joined)} searchers; {join_pairs(departures)}" if departures else ""


def _machine(facts: Mapping[str, Json]) -> str:
    memory, gpus = facts.get("memory_bytes"), ", ".join(facts.get("gpus") or ()) or "no GPU"
    cores = plural(facts.get("cores", "?"), "core")
    return printable(f"{facts.get('cpu', '?')}, {cores}, {size(memory) if memory else '?'}, {gpus}")


def _closes(account: Ledger) -> Text:
    if account.closes():
        return Text("yes", style="green")
    return Text(f"no: {account.difference:+,}", style="bold red")


def _graded_text(answer: RecordedAnswer) -> Text:
    mark = ("right ", "green") if answer.correct else ("wrong ", "red")
    return Text.assemble(mark, printable(answer.completion, 300).strip() or "(nothing)")


def section(title: str, body: RenderableType) -> RenderableType:
    """Returns a section of a page: a title and, indented below it, the body."""
    return Padding(Group(Text(title, style="bold"), Padding(body, (0, 0, 0, 2))), (1, 0, 0, 0))


def table_of(*names: str, justify: str = "right", gap: int = 2) -> Table:
    """Returns an empty table with these columns; the first is to the left."""
    table = Table(box=None, pad_edge=False, padding=(0, gap), header_style="dim")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i == 0 or justify == "left" else "right", overflow="fold")
    return table


def facts_table(facts: Mapping[str, str]) -> Table:
    """Returns a table of two columns, the labels and their facts; a long fact is folded within its column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(printable(value)))
    return table
