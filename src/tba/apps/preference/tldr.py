"""Summaries of posts, scored by a reward model: TL;DR (Völske et al. 2017; Stiennon et al., arXiv 2009.01325) etc.

Rows have a post and a person's summary of it, under the usual field names; a post is either in training or in
evaluation. The policy is trained on the score of `reward_model`. An evaluation counts an answer as a win if `gold` (by
default the same model) scores it above the person's summary; the mean is the win rate.

Invariant: a row without a post or a summary in words, or with a post of more than `longest` characters, is left out and
counted.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tba.apps.preference.reward_model import LengthPricedScore, ModelScore, Win
from tba.apps.preference.similarity import split_sentences
from tba.errors import UserError
from tba.fields import as_declared
from tba.tasks.held_out import check_share, is_held_out
from tba.tasks.problem_rows import ProblemRow, read_rows, rows_from_hub
from tba.types import Message, Problem, Split, is_text

log = logging.getLogger("tba.task")
_POSTS = ("query", "prompt", "post", "content", "document", "source", "article", "text")
_SUMMARIES = ("reference_response", "tldr", "summary", "reference", "target", "label")
_CUE = "TL;DR:"
_POST = "{post}"
_END = "<|endoftext|>"  # with which some data sets spell the end of a summary


@dataclass(frozen=True)
@as_declared
class Tldr:
    """Posts with summaries, from a JSON Lines file or the Hub."""

    path: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"  # or a .jsonl (.gz) file
    reward_model: str = ""  # reward model for training: a folder or a Hub name
    gold: str = ""  # reward model for evaluation; empty: the same
    ask: str = ""  # what a chat model is asked, with {post} in it; empty: no chat, the post and `TL;DR:`
    words: int = 0  # words that a summary should have; 0: any number
    per_length: float = 1.0  # what the reward loses for a summary e times as long, or as short; only with `words`
    without_eos: float | None = -1.0  # reward of a summary without EOS; None: its score
    longest: int = 20_000  # characters of the longest post
    max_tokens: int = 640  # of post and summary, as the reward models read them; longer ones lose tokens of the post
    held_out: float = 0.1  # share of posts reserved for evaluation, if the data has one split
    demonstrated: Literal["summary", "sentence", "sentences", "echo"] = "summary"  # what a supervised start learns: the
    # person's summary; or, to teach copying: one sentence of the post, each of them, each as if it were the whole post
    batch_tokens: int = 16384  # padded tokens that a reward model reads in one pass
    device: str = "cpu"  # device of the reward models

    def __post_init__(self) -> None:
        check_share(self.held_out, "tldr's held_out")
        if self.ask and _POST not in self.ask:
            raise UserError(f"tldr asks {self.ask!r}: put {_POST} where the post goes")
        if self.words < 0 or self.per_length < 0:
            raise UserError(
                f"tldr wants {self.words} words at {self.per_length} per length: give 0 or more of each (0 words: any)"
            )

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the field without effect."""
        return {} if self.words else {"per_length": "words above 0"}

    @property
    def name(self) -> str:
        return "tldr"

    def problems(self, split: Split) -> list[Problem]:
        """Returns problems in the order of the rows, each post once. Raises `UserError` when there are none."""
        refused: Counter[str] = Counter()
        pairs_by_prompt: dict[str, tuple[str, str]] = {}  # by prompt
        for row in self._rows(split):
            pair = self._post_and_summary(row, refused)
            if pair is not None and (self._on_hub or self._is_in_split(split, _prompt(pair[0]))):
                pairs_by_prompt.setdefault(_prompt(pair[0]), pair)
        for reason, count in refused.items():
            log.warning("tldr leaves out %d rows: %s", count, reason)
        if not pairs_by_prompt:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in refused.most_common())
            raise UserError(f"{self.path} leaves no post for {split} ({reasons or 'no rows'}): give another file")
        return [problem for post, summary in pairs_by_prompt.values() for problem in self._problems(post, summary)]

    def reward(self) -> ModelScore | LengthPricedScore:
        """Raises `UserError` without a reward model."""
        score = self._score(self.reward_model)
        return LengthPricedScore(score, self.words, self.per_length) if self.words else score

    def examination(self) -> Win:
        """Returns the reward of evaluations: wins by the gold model. Raises `UserError` without a model."""
        return Win(self._score(self.gold or self.reward_model))

    def memory(self) -> Mapping[str, Mapping[str, int]]:
        """Returns the bytes that each searcher needs for the reward models, by device and part."""
        from tba.apps.preference.frozen import reward_model_bytes

        paths = {"reward model": self.reward_model, "gold model": self.gold or self.reward_model}
        sizes = {part: n for part, path in paths.items() if path and (n := reward_model_bytes(path, self.batch_tokens))}
        return {self.device: sizes} if sizes else {}

    def _score(self, path: str) -> ModelScore:
        if not path:
            raise UserError(
                "tldr needs a reward model: give --task.reward-model with a folder that `tba reward-model --out` made"
            )
        return ModelScore(path, self.without_eos, self.max_tokens, "end", self.device, self.batch_tokens)

    @property
    def _on_hub(self) -> bool:
        return not Path(self.path).is_file()

    def _rows(self, split: Split) -> list[ProblemRow]:
        if self._on_hub:
            return rows_from_hub(
                "tldr", self.path, "train" if split == "train" else "validation", "a .jsonl file (--task.path)"
            )
        return read_rows(Path(self.path))

    def _is_in_split(self, split: Split, prompt: str) -> bool:
        return is_held_out(prompt, self.held_out) == (split == "eval")

    def _post_and_summary(self, row: ProblemRow, refused: Counter[str]) -> tuple[str, str] | None:
        post, summary = (_first_text(row, names) for names in (_POSTS, _SUMMARIES))
        if post is None or summary is None:
            refused["no post" if post is None else "no summary"] += 1
            return None
        if not (_has_words(post) and _has_words(summary)):
            refused["a post or a summary without words"] += 1
            return None
        if len(post) > self.longest:
            refused[f"a post of more than {self.longest} characters"] += 1
            return None
        return post, summary.strip().removesuffix(_END).rstrip()

    def _problems(self, post: str, summary: str) -> list[Problem]:
        """Returns one problem, or several if each sentence is demonstrated."""
        text = _post_body(post)
        if self.demonstrated == "summary":
            return [self._problem(post, summary, summary)]
        demonstrations = split_sentences(text)
        if self.demonstrated == "echo":
            return [self._problem(sentence, summary, sentence) for sentence in demonstrations]
        if self.demonstrated == "sentence":
            demonstrations = [demonstrations[zlib.crc32(text.encode()) % len(demonstrations)]]
        return [self._problem(post, summary, sentence) for sentence in demonstrations]

    def _problem(self, post: str, summary: str, demonstration: str) -> Problem:
        if not self.ask:
            return Problem(_prompt(post), {"reference": f" {summary}"}, f" {demonstration}")
        text = _post_body(post)
        messages: tuple[Message, ...] = ({"role": "user", "content": self.ask.replace(_POST, text)},)
        return Problem(messages, {"reference": summary, "document": text}, demonstration)


def _post_body(post: str) -> str:
    return post.rstrip().removesuffix(_CUE).strip()


def _has_words(text: str) -> bool:
    return is_text(text) and any(map(str.isalnum, _post_body(text).removesuffix(_END)))


def _prompt(post: str) -> str:
    return post if post.rstrip().endswith(_CUE) else f"{post.strip()}\n\n{_CUE}"


def _first_text(row: ProblemRow, names: tuple[str, ...]) -> str | None:
    return next((v for name in names if isinstance(v := row.values.get(name), str) and v.strip()), None)
