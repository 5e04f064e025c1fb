"""A run on a page: `tba show RUN`, and the end of the quickstart.

Invariant: made from what the run left on disk alone; what an unfinished run lacks is said to be missing, and an account
that does not close is said not to.
"""

from __future__ import annotations

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
from tba.record.run_record import RunRecord
from tba.record.summary import WAITED, Summary
from tba.record.text import count, counted, duration, frame_of, hundredfold, named, percent, printable, size, within
from tba.types import Evaluation, Json

ANSWERS_SHOWN = 5
BARS, SPANS = "▁▂▃▄▅▆▇█", 36  # heights of a curve, and in how many spans its steps are parted at most


def show(run: RunRecord) -> RenderableType:
    """Returns all results of a run; so far, when it has not ended."""
    parts = [brief(run), section("The course", course(run))]
    if run.summary is None:
        parts += [section("So far", _so_far(run)), section("Health", health(run))]
    else:
        parts.append(section("Health", health(run)))
        parts.append(section("What became of what was generated", ledger(run.summary)))
        parts.append(section("The run", pairs(facts_of(run.summary))))
    parts += [Text(sentence, style="yellow") for sentence in run.unreadable]
    return Group(*parts)


def brief(run: RunRecord) -> RenderableType:
    """Returns what run it is, its held-out accuracy before and after, and what fell."""
    return Group(_heading(run), section("Held-out accuracy", accuracy(run)), *_fallen(run))


def comparison(runs: Sequence[RunRecord], settings: Mapping[str, Sequence[str]]) -> RenderableType:
    """Returns how several runs did, a column per run; settings: those that differ, with the value of each run."""
    figures: dict[str, list[str]] = {
        "steps": [str(run.steps) for run in runs],
        "wall-clock": [duration(run.wall_seconds) for run in runs],
    }
    held_out = [run.figures() for run in runs]
    for name in dict.fromkeys(name for own in held_out for name in own):
        ends = [own.get(name, (None, None)) for own in held_out]
        figures[printable(name, 60)] = [" -> ".join(map(_short, end if end[1] else end[:1])) for end in ends]
    summaries = [run.summary for run in runs]
    figures |= {
        "lag": [f"{s.lag.mean:.1f}" if s else "-" for s in summaries],
        "samples per insert": [f"{s.trajectories.samples_per_insert:.2f}" if s else "-" for s in summaries],
        "trainer idle": [percent(s.trainer_idle) if s else "-" for s in summaries],
        "searchers evaluating": [percent(s.searcher_evaluating) if s else "-" for s in summaries],
        "falls": [str(len(run.falls)) for run in runs],
    }
    differs = _columns(runs, settings) if settings else Text("no setting")
    return Group(section("What differs", differs), section("How they did", _columns(runs, figures)))


def _columns(runs: Sequence[RunRecord], rows: Mapping[str, Sequence[str]]) -> Table:
    table = table_of("", *(printable(run.name, 40) for run in runs), gap=1)
    for name, values in rows.items():
        table.add_row(name, *(printable(value, 200) for value in values))
    return table


def _short(evaluation: Evaluation | None) -> str:
    return "-" if evaluation is None else percent(evaluation.value)


def listing(runs: Sequence[RunRecord | Path], living: Sequence[bool]) -> RenderableType:
    """Returns a row for each run: how it ended or that it goes on, how far it came, and its newest held-out figure; of
    one that cannot be read only the folder is given.
    """
    table = table_of("run", "state", "steps", "time", "held out", justify="left")
    for run, lives in zip(runs, living, strict=True):
        if isinstance(run, Path):
            table.add_row(printable(run.name, 80), "cannot be read", "-", "-", "-")
            continue
        newest = max(run.evaluations, key=lambda e: e.version, default=None)
        figure = "-" if newest is None else f"{newest.metric} {_short(newest)}"
        how = (_state(run, lives), f"{run.steps}", duration(run.wall_seconds), printable(figure, 80))
        table.add_row(printable(run.name, 80), *how)
    return table


def _state(run: RunRecord, lives: bool) -> str:
    if run.summary is not None:
        return "stopped" if run.summary.faults.get("stopped") else "ended"
    return "failed" if run.failure else "running" if lives else "killed"


def closing_page(run: RunRecord) -> RenderableType:
    """Returns accuracy and answers before and after, what was trained, and where it is."""
    parts = [brief(run)]
    both = run.answers_before_after()[:ANSWERS_SHOWN]
    if both:
        parts.append(section("The same held-out problems, before and after", answers(both)))
    if run.summary is not None:
        parts.append(section("What it took", _cost(run.summary)))
    left = [name for name in ("summary.json",) if (run.directory / name).exists()]
    where = Text.assemble(
        ("The run lies in ", ""), (printable(str(run.directory)), "bold"), f" ({', '.join(left)})." if left else "."
    )
    parts.append(Padding(where, (1, 0, 0, 0)))
    return Group(*parts)


def accuracy(run: RunRecord) -> RenderableType:
    """Returns a row per metric: before, after, both with 95 % intervals, difference; whole on 80 columns."""
    if not (figures := run.figures()):
        return Text("not evaluated yet", style="dim")
    table = table_of("metric", "before", "after", "points", "problems", gap=1)
    for name, (before, after) in figures.items():
        alike = after is not None and after.n == before.n  # during a run there may be fewer
        change = hundredfold(after.value - before.value, sign=True) if after and alike else "-"
        problems = f"{before.n}" if after is None or alike else f"{before.n}, {after.n}"
        table.add_row(printable(name, 60), figure(before), figure(after), change, problems)
    return table


def course(run: RunRecord) -> RenderableType:
    """Returns reward, held-out accuracy and effective sample size as bars, each the mean over equally many steps."""
    names, spans = run.figures(), min(SPANS, run.steps + 1)
    accuracy = SAMPLED if SAMPLED in names else next(iter(names), "")
    held_out = [(e.version.step, e.value) for e in run.evaluations if e.metric == accuracy]
    table = table_of("", f"steps 0 to {run.steps}", "lowest", "highest", gap=1)
    for label, (step, value), shown in (
        ("reward", column(run.metrics, metrics.REWARD, "step"), _number),
        (printable(accuracy, 40), np.array(held_out).reshape(-1, 2).T, percent),
        ("effective sample size", column(run.metrics, metrics.ESS, "step"), percent),
    ):
        if len(step):
            span = np.minimum(spans - 1, step * spans / (run.steps + 1)).astype(int)
            means = {i: float(value[span == i].mean()) for i in set(span.tolist())}
            low, high = min(means.values()), max(means.values())
            bars = {i: BARS[round((len(BARS) - 1) * (mean - low) / (high - low or 1.0))] for i, mean in means.items()}
            table.add_row(label, "".join(bars.get(i, " ") for i in range(spans)), shown(low), shown(high))
    return table if table.row_count else Text("no step recorded yet", style="dim")


def answers(both: Sequence[tuple[RecordedAnswer, RecordedAnswer]]) -> RenderableType:
    """Returns a row per problem: the question, the answer before and the answer after, each with its grade."""
    table = table_of("problem", "before", "after", justify="left")
    frame = frame_of(before.prompt for before, _ in both)
    for before, after in both:
        table.add_row(Text(printable(within(frame, before.prompt), 300).strip()), _marked(before), _marked(after))
    return table


def ledger(summary: Summary) -> RenderableType:
    """Returns the account of tokens and of trajectories, and whether each closes."""
    table = table_of("", "tokens", "trajectories")
    for name in TERMS:
        table.add_row(
            name.replace("_", " "),
            f"{getattr(summary.tokens, name):,}",
            f"{getattr(summary.trajectories, name):,}",
        )
    table.add_row("closes", _closes(summary.tokens), _closes(summary.trajectories))
    return table


def _fallen(run: RunRecord) -> list[RenderableType]:
    """Returns what fell far below its best, and where the best checkpoint is if that is not the newest."""
    lines = [Text(printable(what, 300), style="yellow") for what in run.falls]
    if run.best is not None:
        lines.append(Text(f"best: {run.best}" if run.falls else run.best))
    return [section("Warnings" if run.falls else "The best checkpoint", Group(*lines))] if lines else []


def _heading(run: RunRecord) -> RenderableType:
    summary = run.summary
    if summary is None:
        why = "no summary: it is running, or was killed"
        if run.failure:
            why = f"failed: {run.failure}: {run.failure.message} (logs: {run.directory / 'logs'})"
        return Text.assemble(
            (run.name, "bold"),
            f"  step {run.steps}, {duration(run.wall_seconds)}; ",
            (printable(why, 1000, newlines=False), "yellow"),
        )
    recipe = printable(summary.recipe, 100, newlines=False)
    return Text.assemble(
        (run.name, "bold"),
        f"  {recipe}, seed {summary.seed}, {summary.steps} steps, {duration(summary.wall_seconds.total)}",
    )


def _so_far(run: RunRecord) -> RenderableType:
    found = {label: shown(value) for name, label, shown in _LATEST if (value := run.latest(name)) is not None}
    found |= {f"tokens/s {half}": f"{y[-1]:.4g}" for half, (_, y) in metrics.rates(run.metrics).items() if len(y)}
    return pairs(found) if found else Text("no step recorded yet", style="dim")


def health(run: RunRecord) -> RenderableType:
    """Returns by what a run that goes wrong can be told, at its beginning and now: means of as many steps."""
    steps = max(1, min(MEAN_STEPS, len(run.metrics) // 2))
    table = table_of("", f"first {steps} steps", f"last {steps}", gap=2)
    for name, label, shown in _HEALTH:
        _, values = column(run.metrics, name)
        if len(values):
            table.add_row(label, shown(float(values[:steps].mean())), shown(float(values[-steps:].mean())))
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


def facts_of(summary: Summary) -> dict[str, str]:
    """Returns what a summary says of the run, in words."""
    wall, made = summary.wall_seconds, summary.trajectories
    facts = {
        "wall-clock": f"{duration(wall.total)}: warm start {duration(wall.sft)}, warm-up {duration(wall.warm_up)}, "
        f"training {duration(wall.train)}, evaluation {duration(wall.eval)}",
        "waiting after warm-up": _waiting(summary),
        "lag": _lag(summary),
        "problems": _problems(summary),
        "of the newest arrivals": f"{percent(summary.recent_share)} of the groups",
        "samples per insert": f"{made.samples_per_insert:.2f}, "
        f"{percent(made.trained_share)} of what arrived was trained",
        "slow side": _slow_side(summary),
        "control": _control(summary),
        "reference reset": _resets(summary),
        "joined": _joined(summary),
        "faults": named({kind: count for kind, count in summary.faults.items() if count}),
        "peak memory": named({part: size(peak) for part, peak in summary.peak_memory_bytes.items()}),
        "utilisation": _utilisation(summary),
        "versions": named(summary.versions),
        "machine": _machine(summary.machine),
    }
    return {name: said for name, said in facts.items() if said}


def _problems(summary: Summary) -> str:
    """Returns what became of problems that were not asked as they are; nothing where all were."""
    said = []
    for split, counts in summary.prompts.items():
        others = {name: count for name, count in counts.items() if name not in ("problems", "prompts") and count}
        if others:
            of = f"{counts['prompts']:,} of {counts['problems']:,} {'trained' if split == 'train' else 'held out'}"
            said.append(f"{of} ({', '.join(f'{name} {count:,}' for name, count in others.items())})")
    return ", ".join(said)


def _cost(summary: Summary) -> RenderableType:
    tokens = summary.tokens
    given = f"{count(tokens.generated)} generated"
    if tokens.imported:
        given += f" and {count(tokens.imported)} imported"
    facts = {
        "time": f"{duration(summary.wall_seconds.total)} for {summary.steps} steps",
        "tokens trained": f"{percent(tokens.trained_share)} of the {given}, each used {tokens.mean_uses:.1f} times",
        "lag": _lag(summary),
        "problems": _problems(summary),
        "waiting after warm-up": _waiting(summary),
    }
    return pairs({name: said for name, said in facts.items() if said})


def _utilisation(summary: Summary) -> str:
    shares = ", ".join(f"{half} {percent(share)}" for half, share in summary.utilisation.items())
    return shares and f"{shares} of the rate of a large product of matrices"


_WORTH_SAYING = 0.005  # share of a searcher's time


def _waiting(summary: Summary) -> str:
    trainer = f"trainer idle {percent(summary.trainer_idle)}, paced {percent(summary.trainer_paced)}"
    evaluating = percent(summary.searcher_evaluating)
    judge = summary.searcher_time.get("reward", 0.0)
    for_judge = f", waiting for the judge {percent(judge)}" if judge >= _WORTH_SAYING else ""
    return f"{trainer}; searchers idle {percent(summary.searcher_idle)}, evaluating {evaluating}{for_judge}"


def _slow_side(summary: Summary) -> str:
    side, uses = summary.slow_side, summary.trajectories.samples_per_insert
    waited = {"searchers": summary.trainer_idle + summary.trainer_paced, "trainer": summary.searcher_paced}.get(side, 0)
    other = {"searchers": "the trainer", "trainer": "searchers"}.get(side, "")
    why = f"{other} waited {percent(waited)} of the time" if waited >= WAITED else f"{uses:.2f} uses of a trajectory"
    return f"{side} ({why})"


def _control(summary: Summary) -> str:
    if not summary.control:
        return ""
    last = summary.control[-1]
    moves = f"{len(summary.control)} moves by {last['signal']}"
    return f"{moves}, the last after step {last['step']} to k = {last['sync_every']}, m = {last['m']:g}"


def _lag(summary: Summary) -> str:
    lag = summary.lag
    return f"{lag.mean:.1f} updates on average, 95 % within {lag.p95:.0f}, at most {lag.max:.0f}"


def _resets(summary: Summary) -> str:
    steps = ", ".join(str(reset["step"]) for reset in summary.reference_resets)
    return steps and f"after step {steps}"


def _joined(summary: Summary) -> str:
    """Returns how many searchers joined, and how they left."""
    left = Counter(str(searcher.get("how")) for searcher in summary.joined)
    return f"{len(summary.joined)} searchers; {named(left)}" if left else ""


def _machine(found: Mapping[str, Json]) -> str:
    memory, gpus = found.get("memory_bytes"), ", ".join(found.get("gpus") or ()) or "no GPU"
    cores = counted(found.get("cores", "?"), "core")
    return printable(f"{found.get('cpu', '?')}, {cores}, {size(memory) if memory else '?'}, {gpus}")


def _closes(account: Ledger) -> Text:
    if account.closes():
        return Text("yes", style="green")
    return Text(f"no: {account.difference:+,}", style="bold red")


def _marked(answer: RecordedAnswer) -> Text:
    mark = ("right ", "green") if answer.correct else ("wrong ", "red")
    return Text.assemble(mark, printable(answer.completion, 300).strip() or "(nothing)")


def section(title: str, body: RenderableType) -> RenderableType:
    """Returns a title and, below it, what stands under it."""
    return Padding(Group(Text(title, style="bold"), Padding(body, (0, 0, 0, 2))), (1, 0, 0, 0))


def table_of(*names: str, justify: str = "right", gap: int = 2) -> Table:
    """Returns an empty table with these columns; the first is to the left."""
    table = Table(box=None, pad_edge=False, padding=(0, gap), header_style="dim")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i == 0 or justify == "left" else "right", overflow="fold")
    return table


def pairs(facts: Mapping[str, str]) -> Table:
    """Returns names and, beside them, what is said of each; long lines stay beside their name."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(printable(value)))
    return table
