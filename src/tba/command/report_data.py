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
from tba.runtime.checkpointing import describe_missing_rows, held_by_journal
from tba.runtime.run_directory import RunDirectory, setting
from tba.training.checkpoint import newest_sound_checkpoint
from tba.types import Evaluation, Json, Sampling, Trajectory, is_text

MAX_POINTS = 1500  # of a curve at most; of more steps each point is the mean of several
LONGEST_TEXT = 8_000  # characters of a prompt or an answer that are shown
LONGEST_TOKENS = 1_000  # tokens of an answer that are coloured
MAX_REJECTIONS = 200  # lines of logs about rejected answers
DEADLINE_S = 600.0  # of reading the journal
TOKEN_COLUMNS = ("tokens", "log_behavior", "log_ratio", "begins")  # columns of the answers that are coloured
FATES = ("trained", "waiting", "evicted", "duplicate", "damaged")
_DESCRIPTIVE_KEYS = ("class", "description")


def report_data(path: Path, row_limit: int, byte_limit: int) -> dict[str, Json]:
    """Returns the data of a run's report, with at most about `row_limit` trajectories in about `byte_limit` bytes."""
    run, record = RunDirectory.open(path), RunRecord.read(path)
    facts = run.facts
    hides_text = setting(facts["resolved"], "record", "hide_text") is True
    clock = _Clock(facts, record, path)
    answers = [] if hides_text else _answers(record)
    journal_data = _journal_data(run, record, clock, facts["resolved"], row_limit, byte_limit)
    prompts = (journal_data["trajectories"] or {"prompts": []})["prompts"]
    return {
        "name": record.name,
        "recipe": facts["recipe"],
        "ended": _ending(record, hides_text),
        "steps": record.steps,
        "wall_seconds": round(record.wall_seconds, 1),
        "started": facts["started"],
        "hide_text": hides_text,
        "figures": _figures(record),
        "answers": answers,
        "frame": frame_of([a["prompt"] for a in answers] + [p["text"] for p in prompts if "text" in p]),
        "account": _account(record),
        "facts": [] if record.summary is None else list(summary_facts(record.summary).items()),
        "notes": [*filter(None, [journal_data.pop("lost")]), *([] if hides_text else _notes(record))],
        "metrics": _curves(record.metrics),
        "rates": {name: [_five_digits(x), _five_digits(y)] for name, (x, y) in metrics.rates(record.metrics).items()},
        "evaluations": [_evaluation(e) for e in record.evaluations],
        "events": _events(record, path, clock, hides_text),
        "settings": settings_of(facts["resolved"]),
        "rejected": [] if hides_text else _rejections(path),
        "imports": _import_refusals(path, hides_text),
        **journal_data,
    }


def differing_settings(settings: Sequence[Mapping[str, Json]]) -> list[str]:
    """Returns the names of the settings that are not the same in all runs, in the order of the first run."""
    names = list(dict.fromkeys(name for run in settings for name in run))
    return [name for name in names if any(run.get(name) != settings[0].get(name) for run in settings)]


def _ending(record: RunRecord, hides_text: bool) -> str:
    if record.summary is not None:
        return "ended"
    if record.failure is not None:
        return f"failed: {record.failure}" + ("" if hides_text else f" ({record.failure.message})")
    return "it is running, or was killed: the account and other totals come when it ends"


class _Clock:
    """Converts seconds since the epoch into the run's wall-clock, which stands still while no process runs it."""

    def __init__(self, facts: Mapping[str, Any], record: RunRecord, path: Path) -> None:
        resume_times = [fault["time"] for fault in read_faults(path) if fault["kind"] == "resumes"]
        last_walls: dict[int, float] = {}  # wall-clock of each incarnation's last step
        for row in record.metrics:
            if (incarnation := metrics.incarnation_of(row)) is not None:
                last_walls[incarnation] = float(row["wall_seconds"])
        # The run's wall-clock at each resume. That of the last is recorded, those of earlier ones follow from the steps
        # of the incarnations before them. A restart of the trainer begins an incarnation too.
        resumes = [i for i, entry in enumerate(facts["incarnations"]) if str(entry.get("why")).startswith("resumed")]
        end_walls = [max((wall for i, wall in last_walls.items() if i < number), default=0.0) for number in resumes]
        n = len(resume_times)
        end_walls = [*end_walls[:n][:-1], *[facts["clock"]["before"]] * n][:n]
        self._start_times = [facts["started"], *resume_times]
        self._start_walls = [0.0, *end_walls]

    def wall(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the wall-clock at these moments, which is 0 before the run began (for imports, for example)."""
        parts = np.clip(np.searchsorted(self._start_times, times, "right") - 1, 0, None)
        return np.maximum(0.0, np.asarray(self._start_walls)[parts] + times - np.asarray(self._start_times)[parts])


# Figures, curves, events


def _figures(record: RunRecord) -> list[dict[str, Json]]:
    return [
        {"metric": name, "before": _evaluation(first_figure), "after": last_figure and _evaluation(last_figure)}
        for name, (first_figure, last_figure) in record.figures().items()
    ]


def _evaluation(e: Evaluation) -> dict[str, Json]:
    interval = wilson_interval(e.value * e.n, e.n)
    bounds = {"low": round(interval.low, 4), "high": round(interval.high, 4)}
    row: dict[str, Json] = {"version": str(e.version), "wall": round(e.wall_seconds, 2), "metric": e.metric}
    return row | {"value": round(e.value, 5), "n": e.n, **bounds}


def _notes(record: RunRecord) -> list[str]:
    best_note = [] if record.best is None else [f"best: {record.best}"]
    return [*record.warnings, *record.unreadable, *best_note]


def _answers(record: RunRecord) -> list[dict[str, Json]]:
    """Returns the held-out problems with the recorded answers of every evaluated version."""
    problems: dict[str, dict[str, Json]] = {}
    for answer in record.answers:
        problem = problems.setdefault(answer.prompt, {"prompt": answer.prompt[:LONGEST_TEXT], "answers": []})
        problem["answers"].append(
            {
                "version": str(answer.version),
                "text": answer.completion[:LONGEST_TEXT],
                "correct": answer.correct,
                "reward": answer.reward,
            }
        )
    return list(problems.values())


def _account(record: RunRecord) -> dict[str, Json] | None:
    if record.summary is None:
        return None
    units = {"tokens": record.summary.tokens, "trajectories": record.summary.trajectories}
    return {name: {**asdict(ledger), "difference": ledger.difference} for name, ledger in units.items()}


def _curves(rows: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Returns the metrics as columns; of many steps each point is the mean of a few that follow each other."""
    width = max(1, -(-len(rows) // MAX_POINTS))
    columns: dict[str, Json] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = np.array([value if is_number(value := row.get(name)) else np.nan for row in rows], dtype=np.float64)
        if np.isnan(values).all():
            continue
        if name in ("step", "wall_seconds"):  # the value of the last step of each point
            columns[name] = _five_digits(np.pad(values, (0, -len(values) % width), "edge")[width - 1 :: width])
        else:  # the mean of the steps that have a value
            windows = np.pad(values, (0, -len(values) % width), constant_values=np.nan).reshape(-1, width)
            columns[name] = _five_digits(np.ma.masked_invalid(windows).mean(axis=1).filled(np.nan))
    return {"steps_per_point": width, "columns": columns}


def _events(record: RunRecord, path: Path, clock: _Clock, hides_text: bool) -> list[dict[str, Json]]:
    """Returns evaluations, reference resets, faults, control changes and searchers that joined or left, by time."""
    events: list[dict[str, Json]] = []

    def add(wall: object, kind: str, text: str) -> None:
        if isinstance(wall, int | float) and np.isfinite(wall):
            events.append({"wall": round(float(wall), 2), "kind": kind, "text": text})

    by_version: dict[tuple[float, str], list[str]] = {}
    for e in record.evaluations:
        by_version.setdefault((e.wall_seconds, e.version.in_words), []).append(f"{e.metric} {percent(e.value)}")
    for (wall, version), figures in by_version.items():
        add(wall, "evaluation", f"{version} evaluated: " + ", ".join(figures))
    for fault in read_faults(path):
        text = str(fault["kind"]).replace("_", " ") + ("" if hides_text or not fault["what"] else f": {fault['what']}")
        if isinstance(fault["time"], int | float):
            add(clock.wall(np.array([fault["time"]])).item(), "fault", text)
    for row in record.metrics if record.summary is None else ():
        if isinstance(row.get("reference_step"), int | float) and row["reference_step"] == row["step"]:
            add(row["wall_seconds"], "reset", f"reference reset after step {row['step']}")
    if record.summary is not None:
        for reset in record.summary.reference_resets:
            add(reset.get("wall_seconds"), "reset", f"reference reset after step {reset.get('step')}")
        for change in record.summary.control:
            step_wall = next((r["wall_seconds"] for r in record.metrics if r["step"] == change.get("step")), None)
            add(step_wall, "control", f"control: k = {change.get('sync_every')}, m = {change.get('m')}")
        for searcher in record.summary.joined:
            add(searcher.get("joined"), "searcher", f"{searcher.get('name')} joined")
            add(searcher.get("left"), "searcher", f"{searcher.get('name')} left: {searcher.get('how')}")
    return sorted(events, key=lambda event: float(event["wall"]))


def settings_of(resolved: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the settings by dotted name; a component's own name maps to its class."""
    settings: dict[str, Json] = {}

    def walk(value: Json, name: str) -> None:
        if isinstance(value, dict):
            if name and isinstance(value.get("class"), str):
                settings[name] = value["class"].rpartition(".")[2]
            for key, field_value in value.items():
                if key not in _DESCRIPTIVE_KEYS:
                    walk(field_value, f"{name}.{key}" if name else key)
        else:
            settings[name] = value if isinstance(value, str | int | float | bool | None) else json.dumps(value)

    walk(dict(resolved), "")
    return {name.replace("_", "-"): value for name, value in settings.items()}


def _rejections(path: Path) -> list[str]:
    """Returns the lines of the searchers' logs about rejected answers, the newest last."""
    lines: list[str] = []
    for log_path in sorted((path / "logs").glob("searcher-*.log")):
        with log_path.open(errors="replace") as file:
            lines += [line.strip()[:LONGEST_TEXT] for line in file if " answers are rejected" in line][-MAX_REJECTIONS:]
    return lines[-MAX_REJECTIONS:]


def _import_refusals(path: Path, hides_text: bool) -> list[dict[str, Json]]:
    """Returns how many lines of each imported file were refused, and why."""
    refusals = []
    for row in read_lines(path / IMPORTS):
        reasons = row.get("rejected")
        counts = {
            str(reason): rejection.get("count")
            for reason, rejection in (reasons.items() if isinstance(reasons, dict) else ())
            if isinstance(rejection, dict)
        }
        if counts:
            refusals.append({"source": "" if hides_text else str(row.get("source", "")), "refused": counts})
    return refusals


# Trajectories


def _journal_data(
    run: RunDirectory, record: RunRecord, clock: _Clock, resolved: Mapping[str, Json], row_limit: int, byte_limit: int
) -> dict[str, Json]:
    journal = run.journal_to_read()
    if not journal.is_file():
        return {"searchers": [], "fates": None, "trajectories": None, "lost": None}
    hides_text = setting(resolved, "record", "hide_text") is True
    checkpoint, _ = newest_sound_checkpoint(run.checkpoints, verify=False)
    has_checkpoint = checkpoint is not None
    recorded_counts = held_by_journal(run)
    with JournalQueries(journal, deadline_s=DEADLINE_S) as reader:
        loss_note = describe_missing_rows(reader.totals, recorded_counts, run.marks)
        facts = read_facts(reader, fates_of(run))
        samples = _trained_samples(reader, record.directory)
        chosen_rows = choose_rows(facts, row_limit, np.array(sorted(samples), np.int64))
        excerpt = _Excerpt(facts, record, clock, hides_text, resolved, samples, has_checkpoint)
        for row, trajectory in read_bodies(reader, facts, chosen_rows):
            if not excerpt.add(row, trajectory, byte_limit):
                break
    return {
        "searchers": _searchers(facts, clock),
        "fates": {"as_of": str(checkpoint.version), "counts": _fate_counts(facts)} if checkpoint is not None else None,
        "trajectories": excerpt.to_json(_token_texts(run, excerpt.token_ids)),
        "lost": loss_note,
    }


def _searchers(facts: Facts, clock: _Clock) -> list[dict[str, Json]]:
    """Returns the counts, mean reward and first and last wall-clock of each owner's trajectories."""
    searchers = []
    walls = clock.wall(facts.created)
    for number, name in enumerate(facts.owners):
        owner_mask = facts.owner == number
        reward = facts.reward[owner_mask]
        searchers.append(
            {
                "name": name,
                "first": round(float(walls[owner_mask].min()), 1),
                "last": round(float(walls[owner_mask].max()), 1),
                "trajectories": int(owner_mask.sum()),
                "tokens": int(facts.tokens[owner_mask].sum()),
                "reward": as_json(np.round(np.nanmean(reward), 4)) if not np.isnan(reward).all() else None,
            }
        )
    return searchers


def _fate_counts(facts: Facts) -> dict[str, Json]:
    """Returns [trajectories, tokens] of each fate, over the whole journal."""
    fates = _fate_indices(facts)
    return {name: [int((fates == i).sum()), int(facts.tokens[fates == i].sum())] for i, name in enumerate(FATES)}


def _fate_indices(facts: Facts) -> npt.NDArray[np.int8]:
    """Returns [N] indices of `FATES`."""
    fates = np.where(facts.uses > 0, FATES.index("trained"), FATES.index("waiting")).astype(np.int8)
    for use_code, name in UNUSED_FATES.items():
        fates[facts.uses == use_code] = FATES.index(name)
    return fates


def _trained_samples(reader: JournalQueries, path: Path) -> dict[int, list[dict[str, Json]]]:
    """Returns the lines of samples.jsonl (one for each use in a batch) by the trajectory's place in the journal."""
    by_uid: dict[str, list[dict[str, Json]]] = {}
    for row in read_samples(path):
        uid, step = row.get("uid"), row.get("step")
        if isinstance(uid, str) and is_text(uid) and isinstance(step, int):
            by_uid.setdefault(uid, []).append(row)
    samples_by_place = {}
    for uid, lines in by_uid.items():
        for (place,) in reader.query("SELECT seq FROM trajectories WHERE uid = ?", uid)[1]:
            samples_by_place[int(place)] = lines
    return samples_by_place


class _Excerpt:
    """Holds trajectories as columns of JSON, added until a limit of bytes is reached."""

    def __init__(
        self,
        facts: Facts,
        record: RunRecord,
        clock: _Clock,
        hides_text: bool,
        resolved: Mapping[str, Json],
        samples: Mapping[int, Sequence[Mapping[str, Json]]],
        has_uses: bool,
    ) -> None:
        self._facts, self._hides_text, self._samples, self._has_uses = facts, hides_text, samples, has_uses
        self._walls, self._fates = clock.wall(facts.created), _fate_indices(facts)
        self._metrics_rows = record.metrics
        # A searcher that samples with these settings records the policy's own log-probabilities.
        temperature = setting(resolved, "policy_temperature")
        self._policy_sampling = Sampling(float(temperature) if is_number(temperature) else 1.0, 1.0)
        self._rows: list[tuple[int, dict[str, Json]]] = []
        self._prompts: dict[int, dict[str, Json]] = {}  # by the digest, in the order of their numbers
        self._missing_bodies = 0  # chosen, but without a body
        self._byte_count = self._current_round = 0

    def add(self, row: int, t: Trajectory | None, byte_limit: int) -> bool:
        """Add a trajectory; returns False, and adds nothing, where its round does not fit into `byte_limit` bytes."""
        facts = self._facts
        if self._byte_count > byte_limit and facts.round.item(row) != self._current_round:
            return False
        self._current_round = facts.round.item(row)
        if t is None:
            self._missing_bodies += 1
            return True
        prompt = facts.prompt.item(row)
        if prompt not in self._prompts:
            self._prompts[prompt] = self._prompt(t)
            self._byte_count += len(json.dumps(self._prompts[prompt]))
        line = self._line(row, t)
        size = len(json.dumps(line["text"], ensure_ascii=False).encode(errors="replace")) + 110
        if not self._hides_text and self._byte_count < byte_limit / 2:  # the other half is for texts of more answers
            line |= _token_columns(t)
            size += 4 * sum(len(line[name] or ()) for name in TOKEN_COLUMNS)
        self._byte_count += size
        self._rows.append((row, line))
        return True

    @property
    def token_ids(self) -> set[int]:
        """Returns the distinct tokens of the answers that are coloured."""
        return {token for _, line in self._rows for token in line.get("tokens") or ()}

    def _prompt(self, t: Trajectory) -> dict[str, Json]:
        if self._hides_text:
            return {"key": t.prompt.key}
        fields = json.dumps(as_json(dict(t.prompt.fields)), ensure_ascii=False) if t.prompt.fields else ""
        return {"key": t.prompt.key, "text": t.prompt.text[:LONGEST_TEXT], "fields": fields[:LONGEST_TEXT]}

    def _line(self, row: int, t: Trajectory) -> dict[str, Json]:
        facts, c = self._facts, t.completion
        log_behavior = None if c.log_behavior is None else float(np.sum(c.log_behavior, dtype=np.float64))
        log_reference = float(np.sum(t.log_reference, dtype=np.float64)) if t.has_reference else None
        log_ratio = None if log_behavior is None or log_reference is None else log_behavior - log_reference
        return {
            "place": facts.place.item(row),
            "round": facts.round.item(row),
            "prompt": facts.prompt.item(row),
            "searcher": facts.owner.item(row),
            "version": str(t.version),
            "wall": round(float(self._walls[row]), 2),
            "reward": as_json(round(t.reward, 5)) if np.isfinite(t.reward) else None,
            "parts": {name: as_json(round(float(part), 5)) for name, part in t.reward_parts.items()},
            "length": t.length,
            "segments": len(c.segments),
            "stop": c.stop_reason.value,
            "uses": max(0, facts.uses.item(row)) if self._has_uses else None,
            "fate": FATES[self._fates[row]] if self._has_uses else None,
            "log_reference": None if log_reference is None else as_json(round(log_reference, 3)),
            "ratio": None if log_ratio is None else as_json(round(log_ratio, 3)),
            "reference": str(t.reference),
            "sampling": None if c.sampling is None else str(c.sampling),
            "as_policy": c.sampling is not None and c.sampling == self._policy_sampling,
            "trained": [_training_use(use, self._hides_text) for use in self._samples.get(facts.place.item(row), ())],
            "text": None if self._hides_text else c.text[:LONGEST_TEXT],
        }

    def to_json(self, token_texts: Mapping[int, str]) -> dict[str, Json]:
        """Returns the columns in the order of arrival, with prompts, searchers, token texts and counts."""
        rows = [line for _, line in sorted(self._rows, key=lambda item: item[0])]
        prompt_numbers = {digest: i for i, digest in enumerate(self._prompts)}
        round_numbers = {number: i for i, number in enumerate(dict.fromkeys(line["round"] for line in rows))}
        for line in rows:
            line["prompt"], line["round"] = prompt_numbers[line["prompt"]], round_numbers[line["round"]]
        _add_residuals(rows, self._metrics_rows)
        columns: dict[str, Json] = {}
        for name in rows[0] if rows else ():
            if name not in ("parts", "as_policy", *TOKEN_COLUMNS):
                columns[name] = [line[name] for line in rows]
        for name in TOKEN_COLUMNS:
            columns[name] = [line.get(name) for line in rows]
        parts = list(dict.fromkeys(part for line in rows for part in line["parts"]))
        for name in ("version", "stop", "fate", "reference", "sampling"):
            columns[name] = _category_codes(columns.get(name, ()))
        return {
            "of": len(self._facts),
            "shown": len(rows),
            "with_tokens": sum(1 for line in rows if line.get("tokens")),
            "bodies_gone": self._missing_bodies,
            "columns": columns,
            "parts": {part: [line["parts"].get(part) for line in rows] for part in parts},
            "prompts": list(self._prompts.values()),
            "searchers": list(self._facts.owners),
            "pieces": {str(token): text for token, text in token_texts.items()},
        }


def _category_codes(values: Iterable[str | None]) -> dict[str, Json]:
    """Returns a column of repeating texts as the distinct texts and, for each row, the number of its text."""
    codes_by_text: dict[str, int] = {}
    codes = [None if value is None else codes_by_text.setdefault(value, len(codes_by_text)) for value in values]
    return {"kinds": list(codes_by_text), "of": codes}


def _token_columns(t: Trajectory) -> dict[str, Json]:
    """Returns an answer's tokens, their log-probabilities in hundredths of nats, and where later segments begin."""
    c = t.completion
    log_behavior = None if c.log_behavior is None else np.asarray(c.log_behavior, np.float64)[:LONGEST_TOKENS]
    log_reference = np.asarray(t.log_reference, np.float64)[:LONGEST_TOKENS]
    return {
        "tokens": c.tokens[:LONGEST_TOKENS].tolist(),
        "log_behavior": None if log_behavior is None else _hundredths(log_behavior),
        "log_ratio": _hundredths(log_behavior - log_reference)
        if log_behavior is not None and t.has_reference
        else None,
        "begins": None if c.begins is None else c.begins[c.begins < LONGEST_TOKENS].tolist(),
    }


def _hundredths(values: npt.ArrayLike) -> list[int]:
    finite_values = np.nan_to_num(np.asarray(values, np.float64), nan=0.0, posinf=99.0, neginf=-99.0)
    return [int(value) for value in np.round(100 * finite_values)]


def _training_use(sample: Mapping[str, Json], hides_text: bool) -> dict[str, Json]:
    """Returns the step at which a sample was trained on, and the log-probabilities of its tokens then, if recorded."""
    log_policy = None if hides_text else sample.get("log_policy")
    if isinstance(log_policy, list) and all(is_number(x) for x in log_policy):
        return {"step": sample["step"], "log_policy": _hundredths(log_policy[:LONGEST_TOKENS])}
    return {"step": sample["step"], "log_policy": None}


def _add_residuals(rows: Sequence[dict[str, Json]], metrics_rows: Sequence[Mapping[str, Json]]) -> None:
    """Adds to each row its residual log Z + log(pi / pi_ref) - r / beta at the time of sampling, log Z from its
    round; None where the policy's own log-probabilities are unknown, or there is no beta.
    """
    steps, betas = column(metrics_rows, "beta", over="step")  # in the order of steps, but for those made again
    step_order = np.argsort(steps, kind="stable")
    rounds: dict[int, list[dict[str, Json]]] = {}
    for line in rows:
        line["residual"] = None
        rounds.setdefault(int(line["round"]), []).append(line)
    for group in rounds.values():
        steps_before = int(np.searchsorted(steps[step_order], int(group[0]["version"].partition(".")[2] or 0), "right"))
        beta = float(betas[step_order[max(0, steps_before - 1)]]) if len(betas) else None  # of the last step until then
        is_complete = all(g["as_policy"] and g["ratio"] is not None and g["reward"] is not None for g in group)
        if beta and is_complete and len(group) > 1:
            gaps = [g["reward"] / beta - g["ratio"] for g in group]
            log_z = sum(gaps) / len(gaps)
            for line, gap in zip(group, gaps, strict=True):
                line["residual"] = round(log_z - gap, 3)


def _token_texts(run: RunDirectory, token_ids: set[int]) -> dict[int, str]:
    """Returns the text of each token, by the tokenizer of the newest checkpoint; nothing where there is none."""
    files = sorted(run.checkpoints.glob("step-*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    if not files or not token_ids:
        return {}
    try:
        tokenizer = Tokenizer.from_file(str(files[-1]))
    except Exception as error:  # the library has none of its own
        raise UserError(f"{files[-1]} cannot be read ({error}): remove it, and tokens are shown as numbers") from error
    pieces = {token: piece for token in token_ids if (piece := tokenizer.id_to_token(token)) is not None}
    if (decoder := tokenizer.decoder) is None:
        return pieces
    # Each is decoded behind another token, because decoders may drop a blank that begins a text.
    return {token: decoder.decode(["a", piece])[1:] for token, piece in pieces.items()}


def _five_digits(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Returns the values with five significant digits, or to the hundredth, and None for any that is not finite."""
    return [float(f"{v:.5g}") if abs(v) < 1e5 else round(v, 2) if np.isfinite(v) else None for v in values.tolist()]
