r"""Reads preferences: which of two answers to a prompt a person preferred. JSON Lines (gzipped or not) or Parquet.

Invariant: every line either gives at least one pair or is refused under a reason that is counted. Pairs of one document
share its name, by which they are split, so that no document is on both sides.

The formats of a line (with the usual field names):

    {"prompt": P, "chosen": A, "rejected": B}     P also as post, question, instruction (+ input), context, document;
                                                  A and B as text, as a message, or as a list of messages that begins
                                                  with the prompt
    {"chosen": "...\n\nAssistant: A", "rejected": "...\n\nAssistant: B"}       whole dialogues that begin alike
    {"post": P, "summaries": [{"text": A}, {"text": B}], "choice": 0}          also under "info": {"post": P}
    {"document": P, "summaries": [{"text": A, "score": 0.7}, ...]}             every pair of different scores
    {"prompt": P, "response": A, "reward": 0.7}                                the same, an answer per line, those to a
                                                                               prompt together (tba sample)
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from tba.errors import UserError
from tba.tables import Refusal, Values, read_table
from tba.types import Json, is_text

_PROMPTS = ("prompt", "post", "question", "instruction", "context", "document", "article", "query")
_DOCUMENTS = ("document_id", "doc_id")  # not "id", which most often numbers lines: two of one prompt would be parted
_TURN = "\n\nAssistant:"


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt."""

    prompt: str
    chosen: str
    rejected: str
    document: str  # the document they are about: its pairs stay together


@dataclass
class PairReport:
    """Counts what became of a file's lines."""

    lines: int = 0
    pairs: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # reason -> lines, or pairs within a line
    examples: dict[str, str] = field(default_factory=dict)  # reason -> where it was first

    def refuse(self, reason: str, place: str) -> None:
        self.refused[reason] += 1
        self.examples.setdefault(reason, place)


def read_pairs(path: Path, score: str = "score") -> tuple[list[PreferencePair], PairReport]:
    """Returns all pairs of a file, in order; `score` is the field of the score where answers are scored one by one.

    Raises `UserError` when the file cannot be opened or has no pair.
    """
    return preference_pairs(read_table(path), str(path), score)


def preference_pairs(
    lines: Iterable[tuple[int, Values | Refusal]], source: str, score: str = "score"
) -> tuple[list[PreferencePair], PairReport]:
    """Returns all pairs of numbered lines of any source, in order, and the report on the lines."""
    pairs: list[PreferencePair] = []
    report = PairReport()
    for number, count, line in _grouped_lines(lines):
        report.lines += count
        place = f"line {number}"
        if isinstance(line, Refusal):
            report.refuse(line.reason, place)
            continue
        for pair in _line_pairs(line, score):
            if isinstance(pair, Refusal):
                report.refuse(pair.reason, place)
            else:
                pairs.append(pair)
    report.pairs = len(pairs)
    if not pairs:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in report.refused.most_common(3))
        raise UserError(
            f"{source} has no pairs of answers ({reasons or 'it is empty'}): give lines with prompt, chosen, rejected"
        )
    return pairs, report


def _grouped_lines(lines: Iterable[tuple[int, Values | Refusal]]) -> Iterator[tuple[int, int, Values | Refusal]]:
    """Yields (number of the first, how many, line), with lines of one answer to the same prompt made one line."""
    group_lines: list[tuple[int, Values]] = []
    for number, line in lines:
        answer_line = None if isinstance(line, Refusal) or "chosen" in line or "response" not in line else line
        if group_lines and not (answer_line is not None and _prompt(answer_line) == _prompt(group_lines[0][1])):
            yield _merged_line(group_lines)
            group_lines = []
        if answer_line is not None:
            group_lines.append((number, answer_line))
        else:
            yield number, 1, line
    if group_lines:
        yield _merged_line(group_lines)


def _merged_line(group_lines: Sequence[tuple[int, Values]]) -> tuple[int, int, Values]:
    number, first_line = group_lines[0]
    answers = [{**row, "text": row["response"], "score": row.get("score", row.get("reward"))} for _, row in group_lines]
    return number, len(group_lines), {**first_line, "summaries": answers}


def folds(pairs: Sequence[PreferencePair], count: int) -> list[list[int]]:
    """Returns the pairs' indices in `count` parts with nearly the same number of documents, none of them in two parts.

    Raises `UserError` for fewer than 2 parts, or fewer documents than parts.
    """
    names = sorted({pair.document for pair in pairs}, key=_digest)
    if not 2 <= count <= len(names):
        raise UserError(f"{count} folds of {len(names)} documents: give at least 2, and a document for each")
    fold_of_name = {name: i % count for i, name in enumerate(names)}
    fold_indices: list[list[int]] = [[] for _ in range(count)]
    for index, pair in enumerate(pairs):
        fold_indices[fold_of_name[pair.document]].append(index)
    return fold_indices


def held_out_indices(pairs: Sequence[PreferencePair], held_out: float) -> list[int]:
    """Returns the indices of the pairs of a share of the documents, at least one and not all of them."""
    names = sorted({pair.document for pair in pairs}, key=_digest)
    held_out_names = set(names[: min(len(names) - 1, max(1, round(held_out * len(names))))])
    return [index for index, pair in enumerate(pairs) if pair.document in held_out_names]


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass")).digest()


def _line_pairs(line: Values, score: str) -> Iterator[PreferencePair | Refusal]:
    summaries = line.get("summaries", line.get("responses"))
    if isinstance(summaries, list):
        yield from _list_pairs(line, summaries, score)
        return
    missing_fields = [name for name in ("chosen", "rejected") if name not in line]
    if missing_fields:
        yield Refusal(f"no field {missing_fields[0]!r}")
        return
    split = _split(line)
    yield split if isinstance(split, Refusal) else _pair(*split, line)


def _list_pairs(line: Values, summaries: list[Json], score: str) -> Iterator[PreferencePair | Refusal]:
    """Yields pairs from answers with scores, or from two answers with the number of the chosen one."""
    prompt = _prompt(line)
    texts = [entry.get("text") if isinstance(entry, Mapping) else entry for entry in summaries]
    if prompt is None:
        yield Refusal("no prompt")
        return
    if not all(isinstance(text, str) for text in texts):
        yield Refusal("an answer is no text")
        return
    choice = line.get("choice")
    if choice is not None:
        if len(texts) != 2 or choice not in (0, 1):
            yield Refusal("a choice that is not between two answers")
        else:
            yield _pair(prompt, str(texts[int(choice)]), str(texts[1 - int(choice)]), line)
        return
    scores = [_score(entry.get(score)) if isinstance(entry, Mapping) else None for entry in summaries]
    if len(texts) < 2:
        yield Refusal("fewer than two answers")
    elif None not in scores and len(set(scores)) == 1:
        yield Refusal("answers with equal marks")
    for (a, p), (b, q) in combinations(zip(texts, scores, strict=True), 2):
        if p is None or q is None:
            yield Refusal(f"answers without a choice or a number under {score!r}")
        elif p != q:  # equal scores are no preference
            yield _pair(prompt, str(a if p > q else b), str(b if p > q else a), line)


def _score(score: Json) -> float | None:
    """Returns the score if it is a finite number, else None."""
    if not isinstance(score, int | float) or isinstance(score, bool):
        return None
    try:
        number = float(score)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _pair(prompt: str, chosen: str, rejected: str, line: Values) -> PreferencePair | Refusal:
    if not all(is_text(text) for text in (prompt, chosen, rejected)):
        return Refusal("half of a surrogate pair in a text")
    if not prompt.strip():
        return Refusal("an empty prompt")
    if not (chosen.strip() and rejected.strip()):
        return Refusal("an empty answer")
    if chosen.strip() == rejected.strip():
        return Refusal("two equal answers")
    document = next((str(line[name]) for name in _DOCUMENTS if isinstance(line.get(name), str | int)), None)
    return PreferencePair(prompt, chosen, rejected, document or prompt)


def _split(line: Values) -> tuple[str, str, str] | Refusal:
    """Split a conversation into its prompt, the chosen and the rejected answer."""
    chosen, rejected, prompt = line["chosen"], line["rejected"], _prompt(line)
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _split_messages(chosen, rejected, prompt)
    a, b = _text(chosen), _text(rejected)
    if a is None or b is None:
        return Refusal("an answer is no text")
    if prompt is not None:
        repeats_prompt = a.startswith(prompt) and b.startswith(prompt)  # in both, or it is the answer's own
        return (prompt, a.removeprefix(prompt), b.removeprefix(prompt)) if repeats_prompt else (prompt, a, b)
    beginning = a[: a.rfind(_TURN) + len(_TURN)] if _TURN in a else ""
    if not beginning or not b.startswith(beginning):
        return Refusal("no prompt, and no dialogues that begin alike")
    return beginning, a.removeprefix(beginning).lstrip(), b.removeprefix(beginning).lstrip()


def _split_messages(chosen: list[Json], rejected: list[Json], prompt: str | None) -> tuple[str, str, str] | Refusal:
    a, b = ([_text(message) for message in messages] for messages in (chosen, rejected))
    if not a or not b or None in a or None in b:
        return Refusal("an answer is no text")
    if a[:-1] != b[:-1]:
        return Refusal("two dialogues that differ before their last answer")
    beginning = "\n\n".join(str(text) for text in a[:-1])
    if not beginning and prompt is None:
        return Refusal("no prompt")
    return beginning or str(prompt), str(a[-1]), str(b[-1])


def _prompt(line: Values) -> str | None:
    info = line.get("info")
    for values in (line, info if isinstance(info, Mapping) else {}):
        for name in _PROMPTS:
            text = _text(values.get(name))
            if text is not None:
                input_text = values.get("input") if name == "instruction" else None
                return f"{text}\n\n{input_text}" if isinstance(input_text, str) and input_text.strip() else text
    return None


def _text(value: Json, depth: int = 4) -> str | None:
    """Returns a text, the content of a message, or all contents of a list of messages."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if isinstance(value, list):
        parts = [_text(part, depth - 1) if depth else None for part in value]
        return None if None in parts or not parts else "\n\n".join(str(part) for part in parts)
    return value if isinstance(value, str) else None
