"""Collects what a report shows of a run, as JSON: settings, figures, curves, events, the account, and trajectories.

Invariant: nothing of the run is changed or executed, and the journal is read as a stream. Counts are of all
trajectories, however few of them are shown. A run that was recorded with `record.hide_text` gives keys and numbers
only: no prompt, no answer, no token, and no message that could quote one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tba.command.replay import fates_of
from tba.errors import UserError
from tba.evaluation.estimators import wilson_interval
from tba.record import metrics
from tba.record.faults import read_faults
from tba.record.jsonl import as_json, read_lines
from tba.record.metrics import column, is_number
from tba.record.recorder import read_samples
from tba.record.run_record import RunRecord
from tba.record.show import summary_facts
from tba.record.text import frame_of, percent
from tba.replay.buffer import UNUSED_FATES
from tba.replay.excerpt import Facts, choose_rows, read_bodies, read_facts
from tba.replay.queries import JournalQueries
from tba.runs.importing import FILE as IMPORTS
from tba.runtime.checkpointing import held_by_journal, missing_from
from tba.runtime.run_directory import RunDirectory, setting
from tba.training.checkpoint import newest_sound
from tba.types import Evaluation, Json, Sampling, Trajectory, is_text

POINTS = 1500  # of a curve at most; of more steps each point is the mean of several
LONGEST_TEXT = 8_000  # characters of a prompt or an answer that are shown
LONGEST_TOKENS = 1_000  # tokens of an answer that are coloured
REJECTED = 200  # lines of logs about rejected answers
DEADLINE_S = 600.0  # of reading the journal
TOKENS = ("tokens", "log_behavior", "log_ratio")  # columns of the answers that are coloured
FATES = ("trained", "waiting", "evicted", "duplicate", "damaged")
_NOT_SETTINGS = ("class", "description")


def report_data(path: Path, most: int, budget: int) -> dict[str, Json]:
    """Returns what is shown of the run: about `most` trajectories at most, whose JSON takes about `budget` bytes."""
    run, record = RunDirectory.open(path), RunRecord.read(path)
    facts = run.facts
    hidden = setting(facts["resolved"], "record", "hide_text") is True
    clock = _Clock(facts, record, path)
    answers = [] if hidden else _answers(record)
    journal = _journal(run, record, clock, facts["resolved"], most, budget)
    prompts = (journal["trajectories"] or {"prompts": []})["prompts"]
    return {
        "name": record.name,
        "recipe": facts["recipe"],
        "ended": _ended(record, hidden),
        "steps": record.steps,
        "wall_seconds": round(record.wall_seconds, 1),
        "started": facts["started"],
        "hide_text": hidden,
        "figures": _figures(record),
        "answers": answers,
        "frame": frame_of([a["prompt"] for a in answers] + [p["text"] for p in prompts if "text" in p]),
        "account": _account(record),
        "facts": [] if record.summary is None else list(summary_facts(record.summary).items()),
        "notes": [*filter(None, [journal.pop("lost")]), *([] if hidden else _notes(record))],
        "metrics": _curves(record.metrics),
        "rates": {name: [_short(x), _short(y)] for name, (x, y) in metrics.rates(record.metrics).items()},
        "evaluations": [_evaluation(e) for e in record.evaluations],
        "events": _events(record, path, clock, hidden),
        "settings": settings_of(facts["resolved"]),
        "rejected": [] if hidden else _rejected(path),
        "imports": _imports(path, hidden),
        **journal,
    }


def different(settings: Sequence[Mapping[str, Json]]) -> list[str]:
    """Returns the names of the settings that are not the same in all runs, in the order in which they come."""
    names = list(dict.fromkeys(name for run in settings for name in run))
    return [name for name in names if any(run.get(name) != settings[0].get(name) for run in settings)]


def _ended(record: RunRecord, hidden: bool) -> str:
    if record.summary is not None:
        return "ended"
    if record.failure is not None:
        return f"failed: {record.failure}" + ("" if hidden else f" ({record.failure.message})")
    return "it is running, or was killed: the account and other totals come when it ends"


class _Clock:
    """Seconds since the epoch as wall-clock of the run, which stands still while a run is left."""

    def __init__(self, facts: Mapping[str, Any], record: RunRecord, path: Path) -> None:
        resumed = [fault["time"] for fault in read_faults(path) if fault["kind"] == "resumes"]
        last: dict[int, float] = {}  # wall-clock of each incarnation's last step
        for row in record.metrics:
            if (incarnation := metrics.incarnation_of(row)) is not None:
                last[incarnation] = float(row["wall_seconds"])
        # how far the run had come each time that it was resumed: known of the last, of earlier ones from the steps of
        # the incarnations before; a trainer that was restarted began one too
        begun = [i for i, made in enumerate(facts["incarnations"]) if str(made.get("why")).startswith("resumed")]
        ends = [max((wall for i, wall in last.items() if i < first), default=0.0) for first in begun]
        ends = [*ends[: len(resumed)][:-1], *[facts["clock"]["before"]] * len(resumed)][: len(resumed)]
        self._begins = [facts["started"], *resumed]
        self._walls = [0.0, *ends]

    def wall(self, epoch: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the wall-clock at these moments; 0 for what was before the run, such as imports."""
        part = np.clip(np.searchsorted(self._begins, epoch, "right") - 1, 0, None)
        return np.maximum(0.0, np.asarray(self._walls)[part] + epoch - np.asarray(self._begins)[part])


# Figures, curves, events


def _figures(record: RunRecord) -> list[dict[str, Json]]:
    return [
        {"metric": name, "before": _evaluation(before), "after": after and _evaluation(after)}
        for name, (before, after) in record.figures().items()
    ]


def _evaluation(e: Evaluation) -> dict[str, Json]:
    interval = wilson_interval(e.value * e.n, e.n)
    bounds = {"low": round(interval.low, 4), "high": round(interval.high, 4)}
    found: dict[str, Json] = {"version": str(e.version), "wall": round(e.wall_seconds, 2), "metric": e.metric}
    return found | {"value": round(e.value, 5), "n": e.n, **bounds}


def _notes(record: RunRecord) -> list[str]:
    best = [] if record.best is None else [f"best: {record.best}"]
    return [*record.falls, *record.unreadable, *best]


def _answers(record: RunRecord) -> list[dict[str, Json]]:
    """Returns the held-out problems that are shown, each with the answers of all versions that were evaluated."""
    found: dict[str, dict[str, Json]] = {}
    for answer in record.answers:
        problem = found.setdefault(answer.prompt, {"prompt": answer.prompt[:LONGEST_TEXT], "answers": []})
        problem["answers"].append(
            {
                "version": str(answer.version),
                "text": answer.completion[:LONGEST_TEXT],
                "correct": answer.correct,
                "reward": answer.reward,
            }
        )
    return list(found.values())


def _account(record: RunRecord) -> dict[str, Json] | None:
    if record.summary is None:
        return None
    units = {"tokens": record.summary.tokens, "trajectories": record.summary.trajectories}
    return {name: {**asdict(ledger), "difference": ledger.difference} for name, ledger in units.items()}


def _curves(rows: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Returns the metrics as columns; of many steps each point is the mean of a few that follow each other."""
    each = max(1, -(-len(rows) // POINTS))
    columns: dict[str, Json] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = np.array([value if is_number(value := row.get(name)) else np.nan for row in rows], dtype=np.float64)
        if np.isnan(values).all():
            continue
        if name in ("step", "wall_seconds"):  # of the last
            columns[name] = _short(np.pad(values, (0, -len(values) % each), "edge")[each - 1 :: each])
        else:  # the mean of those that are known
            whole = np.pad(values, (0, -len(values) % each), constant_values=np.nan).reshape(-1, each)
            columns[name] = _short(np.ma.masked_invalid(whole).mean(axis=1).filled(np.nan))
    return {"steps_per_point": each, "columns": columns}


def _events(record: RunRecord, path: Path, clock: _Clock, hidden: bool) -> list[dict[str, Json]]:
    """Returns what happened when, in order: evaluations, reference resets, faults, searchers that came and left."""
    found: list[dict[str, Json]] = []

    def add(wall: object, kind: str, text: str) -> None:
        if isinstance(wall, int | float) and np.isfinite(wall):
            found.append({"wall": round(float(wall), 2), "kind": kind, "text": text})

    by_version: dict[tuple[float, str], list[str]] = {}
    for e in record.evaluations:
        by_version.setdefault((e.wall_seconds, e.version.in_words), []).append(f"{e.metric} {percent(e.value)}")
    for (wall, version), figures in by_version.items():
        add(wall, "evaluation", f"{version} evaluated: " + ", ".join(figures))
    for fault in read_faults(path):
        text = str(fault["kind"]).replace("_", " ") + ("" if hidden or not fault["what"] else f": {fault['what']}")
        if isinstance(fault["time"], int | float):
            add(clock.wall(np.array([fault["time"]])).item(), "fault", text)
    for row in record.metrics if record.summary is None else ():
        if isinstance(row.get("reference_step"), int | float) and row["reference_step"] == row["step"]:
            add(row["wall_seconds"], "reset", f"reference reset after step {row['step']}")
    if record.summary is not None:
        for reset in record.summary.reference_resets:
            add(reset.get("wall_seconds"), "reset", f"reference reset after step {reset.get('step')}")
        for change in record.summary.control:
            at = next((r["wall_seconds"] for r in record.metrics if r["step"] == change.get("step")), None)
            add(at, "control", f"control: k = {change.get('sync_every')}, m = {change.get('m')}")
        for searcher in record.summary.joined:
            add(searcher.get("joined"), "searcher", f"{searcher.get('name')} joined")
            add(searcher.get("left"), "searcher", f"{searcher.get('name')} left: {searcher.get('how')}")
    return sorted(found, key=lambda event: float(event["wall"]))


def settings_of(resolved: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the settings by dotted name; a part that is a class of ours is named by it too."""
    found: dict[str, Json] = {}

    def walk(value: Json, name: str) -> None:
        if isinstance(value, dict):
            if name and isinstance(value.get("class"), str):
                found[name] = value["class"].rpartition(".")[2]
            for key, inner in value.items():
                if key not in _NOT_SETTINGS:
                    walk(inner, f"{name}.{key}" if name else key)
        else:
            found[name] = value if isinstance(value, str | int | float | bool | None) else json.dumps(value)

    walk(dict(resolved), "")
    return {name.replace("_", "-"): value for name, value in found.items()}


def _rejected(path: Path) -> list[str]:
    """Returns what the searchers' logs say of answers that were rejected, the newest last."""
    lines: list[str] = []
    for log in sorted((path / "logs").glob("searcher-*.log")):
        with log.open(errors="replace") as file:
            lines += [line.strip()[:LONGEST_TEXT] for line in file if " answers are rejected" in line][-REJECTED:]
    return lines[-REJECTED:]


def _imports(path: Path, hidden: bool) -> list[dict[str, Json]]:
    """Returns how many lines of each imported file were refused, and why."""
    found = []
    for row in read_lines(path / IMPORTS):
        reasons = row.get("rejected")
        counts = {
            str(reason): rejected.get("count")
            for reason, rejected in (reasons.items() if isinstance(reasons, dict) else ())
            if isinstance(rejected, dict)
        }
        if counts:
            found.append({"source": "" if hidden else str(row.get("source", "")), "refused": counts})
    return found


# Trajectories


def _journal(
    run: RunDirectory, record: RunRecord, clock: _Clock, resolved: Mapping[str, Json], most: int, budget: int
) -> dict[str, Json]:
    journal = run.journal_there()
    if not journal.is_file():
        return {"searchers": [], "fates": None, "trajectories": None, "lost": None}
    hidden = setting(resolved, "record", "hide_text") is True
    checkpoint, _ = newest_sound(run.checkpoints, verify=False)
    known = checkpoint is not None
    held = held_by_journal(run)
    with JournalQueries(journal, deadline_s=DEADLINE_S) as reader:
        lost = missing_from(reader.totals, held, run.marks)
        facts = read_facts(reader, fates_of(run))
        samples = _trained_samples(reader, record.directory)
        rows = choose_rows(facts, most, np.array(sorted(samples), np.int64))
        excerpt = _Excerpt(facts, record, clock, hidden, resolved, samples, known)
        for row, trajectory in read_bodies(reader, facts, rows):
            if not excerpt.add(row, trajectory, budget):
                break
    return {
        "searchers": _searchers(facts, clock),
        "fates": {"as_of": str(checkpoint.version), "counts": _fates(facts)} if checkpoint is not None else None,
        "trajectories": excerpt.to_json(_pieces(run, excerpt.token_ids)),
        "lost": lost,
    }


def _searchers(facts: Facts, clock: _Clock) -> list[dict[str, Json]]:
    """Returns what each owner has put, and from when to when."""
    found = []
    wall = clock.wall(facts.created)
    for number, name in enumerate(facts.owners):
        own = facts.owner == number
        reward = facts.reward[own]
        found.append(
            {
                "name": name,
                "first": round(float(wall[own].min()), 1),
                "last": round(float(wall[own].max()), 1),
                "trajectories": int(own.sum()),
                "tokens": int(facts.tokens[own].sum()),
                "reward": as_json(np.round(np.nanmean(reward), 4)) if not np.isnan(reward).all() else None,
            }
        )
    return found


def _fates(facts: Facts) -> dict[str, Json]:
    """Returns [trajectories, tokens] of each fate, over the whole journal."""
    fate = _fate(facts)
    return {name: [int((fate == i).sum()), int(facts.tokens[fate == i].sum())] for i, name in enumerate(FATES)}


def _fate(facts: Facts) -> npt.NDArray[np.int8]:
    """Returns [N] indices of `FATES`."""
    fate = np.where(facts.uses > 0, FATES.index("trained"), FATES.index("waiting")).astype(np.int8)
    for left, name in UNUSED_FATES.items():
        fate[facts.uses == left] = FATES.index(name)
    return fate


def _trained_samples(reader: JournalQueries, path: Path) -> dict[int, list[dict[str, Json]]]:
    """Returns the lines of samples.jsonl by the trajectories' places: when each was in a batch."""
    by_uid: dict[str, list[dict[str, Json]]] = {}
    for row in read_samples(path):
        uid, step = row.get("uid"), row.get("step")
        if isinstance(uid, str) and is_text(uid) and isinstance(step, int):
            by_uid.setdefault(uid, []).append(row)
    found = {}
    for uid, lines in by_uid.items():
        for (place,) in reader.query("SELECT seq FROM trajectories WHERE uid = ?", uid)[1]:
            found[int(place)] = lines
    return found


class _Excerpt:
    """Trajectories as columns of JSON, added until their bytes are used up."""

    def __init__(
        self,
        facts: Facts,
        record: RunRecord,
        clock: _Clock,
        hidden: bool,
        resolved: Mapping[str, Json],
        samples: Mapping[int, Sequence[Mapping[str, Json]]],
        uses_known: bool,
    ) -> None:
        self._facts, self._hidden, self._samples, self._uses_known = facts, hidden, samples, uses_known
        self._wall, self._fates = clock.wall(facts.created), _fate(facts)
        self._metrics = record.metrics
        # at which what a searcher records is the policy's own log-probability
        temperature = setting(resolved, "policy_temperature")
        self._policy_sampling = Sampling(float(temperature) if is_number(temperature) else 1.0, 1.0)
        self._rows: list[tuple[int, dict[str, Json]]] = []
        self._prompts: dict[int, dict[str, Json]] = {}  # by the digest, in the order of their numbers
        self._gone = 0  # chosen, but without a body
        self._bytes = self._round = 0

    def add(self, row: int, t: Trajectory | None, budget: int) -> bool:
        """Add one; returns False, and adds nothing, where its round no longer fits into `budget` bytes."""
        facts = self._facts
        if self._bytes > budget and facts.round.item(row) != self._round:
            return False
        self._round = facts.round.item(row)
        if t is None:
            self._gone += 1
            return True
        prompt = facts.prompt.item(row)
        if prompt not in self._prompts:
            self._prompts[prompt] = self._prompt(t)
            self._bytes += len(json.dumps(self._prompts[prompt]))
        line = self._line(row, t)
        size = len(json.dumps(line["text"], ensure_ascii=False).encode(errors="replace")) + 110
        if not self._hidden and self._bytes < budget / 2:  # the rest of the bytes is for the texts of more answers
            line |= _token_columns(t)
            size += 4 * sum(len(line[name] or ()) for name in TOKENS)
        self._bytes += size
        self._rows.append((row, line))
        return True

    @property
    def token_ids(self) -> set[int]:
        """Returns the tokens that occur."""
        return {token for _, line in self._rows for token in line.get("tokens") or ()}

    def _prompt(self, t: Trajectory) -> dict[str, Json]:
        if self._hidden:
            return {"key": t.prompt.key}
        fields = json.dumps(as_json(dict(t.prompt.fields)), ensure_ascii=False) if t.prompt.fields else ""
        return {"key": t.prompt.key, "text": t.prompt.text[:LONGEST_TEXT], "fields": fields[:LONGEST_TEXT]}

    def _line(self, row: int, t: Trajectory) -> dict[str, Json]:
        facts, c = self._facts, t.completion
        behavior = None if c.log_behavior is None else float(np.sum(c.log_behavior, dtype=np.float64))
        reference = float(np.sum(t.log_reference, dtype=np.float64))
        return {
            "place": facts.place.item(row),
            "round": facts.round.item(row),
            "prompt": facts.prompt.item(row),
            "searcher": facts.owner.item(row),
            "version": str(t.version),
            "wall": round(float(self._wall[row]), 2),
            "reward": as_json(round(t.reward, 5)) if np.isfinite(t.reward) else None,
            "parts": {name: as_json(round(float(part), 5)) for name, part in t.reward_parts.items()},
            "length": t.length,
            "stop": c.stop_reason.value,
            "uses": max(0, facts.uses.item(row)) if self._uses_known else None,
            "fate": FATES[self._fates[row]] if self._uses_known else None,
            "log_reference": as_json(round(reference, 3)),
            "ratio": None if behavior is None else as_json(round(behavior - reference, 3)),
            "reference": str(t.reference),
            "sampling": None if c.sampling is None else str(c.sampling),
            "as_policy": c.sampling is not None and c.sampling == self._policy_sampling,
            "trained": [_trained(sample, self._hidden) for sample in self._samples.get(facts.place.item(row), ())],
            "text": None if self._hidden else c.text[:LONGEST_TEXT],
        }

    def to_json(self, pieces: Mapping[int, str]) -> dict[str, Json]:
        """Returns the columns, in the order of arrival, with what belongs to them and how the sample was made."""
        rows = [line for _, line in sorted(self._rows, key=lambda item: item[0])]
        numbers = {digest: i for i, digest in enumerate(self._prompts)}
        rounds = {number: i for i, number in enumerate(dict.fromkeys(line["round"] for line in rows))}
        for line in rows:
            line["prompt"], line["round"] = numbers[line["prompt"]], rounds[line["round"]]
        _add_residuals(rows, self._metrics)
        columns: dict[str, Json] = {}
        for name in rows[0] if rows else ():
            if name not in ("parts", "as_policy", *TOKENS):
                columns[name] = [line[name] for line in rows]
        for name in TOKENS:
            columns[name] = [line.get(name) for line in rows]
        parts = list(dict.fromkeys(part for line in rows for part in line["parts"]))
        for name in ("version", "stop", "fate", "reference", "sampling"):
            columns[name] = _numbered(columns.get(name, ()))
        return {
            "of": len(self._facts),
            "shown": len(rows),
            "with_tokens": sum(1 for line in rows if line.get("tokens")),
            "bodies_gone": self._gone,
            "columns": columns,
            "parts": {part: [line["parts"].get(part) for line in rows] for part in parts},
            "prompts": list(self._prompts.values()),
            "searchers": list(self._facts.owners),
            "pieces": {str(token): piece for token, piece in pieces.items()},
        }


def _numbered(values: Iterable[str | None]) -> dict[str, Json]:
    """Returns texts that repeat as numbers of a list."""
    kinds: dict[str, int] = {}
    of = [None if value is None else kinds.setdefault(value, len(kinds)) for value in values]
    return {"kinds": list(kinds), "of": of}


def _token_columns(t: Trajectory) -> dict[str, Json]:
    """Returns tokens, and log-probabilities in hundredths of nats."""
    c = t.completion
    behavior = None if c.log_behavior is None else np.asarray(c.log_behavior, np.float64)[:LONGEST_TOKENS]
    reference = np.asarray(t.log_reference, np.float64)[:LONGEST_TOKENS]
    return {
        "tokens": c.tokens[:LONGEST_TOKENS].tolist(),
        "log_behavior": None if behavior is None else _hundredths(behavior),
        "log_ratio": None if behavior is None else _hundredths(behavior - reference),
    }


def _hundredths(values: npt.ArrayLike) -> list[int]:
    known = np.nan_to_num(np.asarray(values, np.float64), nan=0.0, posinf=99.0, neginf=-99.0)
    return [int(value) for value in np.round(100 * known)]


def _trained(sample: Mapping[str, Json], hidden: bool) -> dict[str, Json]:
    """Returns when it was trained on, and what the policy gave each token then, if that was recorded."""
    logs = None if hidden else sample.get("log_policy")
    known = logs[:LONGEST_TOKENS] if isinstance(logs, list) and all(is_number(x) for x in logs) else None
    return {"step": sample["step"], "log_policy": None if known is None else _hundredths(known)}


def _add_residuals(rows: Sequence[dict[str, Json]], metrics_of: Sequence[Mapping[str, Json]]) -> None:
    """Give each row its residual log Z + log(pi / pi_ref) - r / beta at the time of sampling, log Z estimated from its
    round; None where the policy's own log-probabilities are unknown, or there is no beta.
    """
    steps, betas = column(metrics_of, "beta", over="step")  # in the order of steps, but for those made again
    order = np.argsort(steps, kind="stable")
    rounds: dict[int, list[dict[str, Json]]] = {}
    for line in rows:
        line["residual"] = None
        rounds.setdefault(int(line["round"]), []).append(line)
    for group in rounds.values():
        at = int(np.searchsorted(steps[order], int(group[0]["version"].partition(".")[2] or 0), "right"))
        beta = float(betas[order[max(0, at - 1)]]) if len(betas) else None  # of the last step until then
        known = all(g["as_policy"] and g["ratio"] is not None and g["reward"] is not None for g in group)
        if beta and known and len(group) > 1:
            gaps = [g["reward"] / beta - g["ratio"] for g in group]
            log_z = sum(gaps) / len(gaps)
            for line, gap in zip(group, gaps, strict=True):
                line["residual"] = round(log_z - gap, 3)


def _pieces(run: RunDirectory, ids: set[int]) -> dict[int, str]:
    """Returns the text of each token, by the tokenizer of the newest checkpoint; nothing where there is none."""
    files = sorted(run.checkpoints.glob("step-*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    if not files or not ids:
        return {}
    try:
        tokenizer = Tokenizer.from_file(str(files[-1]))
    except Exception as error:  # the library has none of its own
        raise UserError(f"{files[-1]} cannot be read ({error}): remove it, and tokens are shown as numbers") from error
    pieces = {token: piece for token in ids if (piece := tokenizer.id_to_token(token)) is not None}
    if (decoder := tokenizer.decoder) is None:
        return pieces
    # behind another token: a blank that begins a text may be left out
    return {token: decoder.decode(["a", piece])[1:] for token, piece in pieces.items()}


def _short(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Returns the values with five significant digits, or to the hundredth; what is not finite as None."""
    return [float(f"{v:.5g}") if abs(v) < 1e5 else round(v, 2) if np.isfinite(v) else None for v in values.tolist()]
