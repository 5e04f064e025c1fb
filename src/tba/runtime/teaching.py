"""Finds the models that score an answer: the reference, which may be another than the policy's start, and the teachers.

Invariant: whoever scores token by token has the policy's own tokenizer, which is checked before anything is scored, not
assumed. A teacher with another one scores the text of an answer, as a whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tba.chat_prompts import chat_markup, prompt_tokens
from tba.errors import UserError
from tba.markup import continuation, decoded, encoded, plain
from tba.protocols import (
    Acted,
    HasLogZ,
    LoadedOnDevice,
    LoadsOtherModels,
    Model,
    Reference,
    ScoringModel,
    Task,
    path_of,
)
from tba.recipe import Recipe
from tba.turns import AssistantTurn, Frame, assistant_turn
from tba.types import Completion, FloatArray, Prompt, StopReason, Version
from tba.user_code import problems_of

_Pairs: TypeAlias = "list[tuple[Prompt, Completion]]"
_CHARACTERS = 256  # tokens of a vocabulary up to which it may be one of a task's characters, and write no others
_PROMPTS = 20  # of the task whose encodings are compared
_PARTS, _PART_BYTES = 64, 1 << 14  # of a file of weights, for its fingerprint
_BEFORE = 4  # tokens of a prompt with which its answer is decoded: some tokenizers leave out a text's first blank
_SAMPLE = "Ünïcode 12.345, (x + y)^2 = 0?\n\tdef f(a): return {'a': [1, 2]}  # 東京\n"


def _nothing(line: str) -> None:
    """Says nothing."""


def reference_of(recipe: Recipe, model: Model) -> Reference:
    """Returns the reference that a run of a prepared model begins with. Raises `UserError` for another tokenizer."""
    if recipe.reference is None:
        return model.reference(recipe.policy_temperature, Version())
    other = _other(recipe, model, recipe.reference, "--reference")
    _require_same_tokenizer(recipe.task, model, other)
    return other.reference(recipe.policy_temperature, Version())


def teachers_of(recipe: Recipe, model: Model, reference: Reference) -> list[Reference]:
    """Returns the recipe's teachers, in order; one with another tokenizer as a `ScoredByText`, which needs the run's
    reference. Raises `UserError` where the recipe needs the log-probability of each token.
    """
    return [_teaching(recipe, model, reference, teacher) for teacher in _teachers(recipe, model)]


def scorers_of(recipe: Recipe, model: Model, say: Callable[[str], None] = _nothing) -> dict[str, ScoringModel]:
    """Returns the models that score answers besides the policy's own, prepared, by what they are called: `reference`,
    `teacher 1`, ... `say` is called when one is made now. Raises `UserError` for one that is not there.
    """
    found: dict[str, ScoringModel] = {}
    if recipe.reference is not None:
        found["reference"] = _other(recipe, model, recipe.reference, "--reference", say)
    return found | {f"teacher {i}": one for i, one in enumerate(_teachers(recipe, model, say), start=1)}


def fingerprints_of(recipe: Recipe, model: Model) -> dict[str, str]:
    """Returns a fingerprint of each model that scores answers and whose weights are here, by what it is called."""
    return {
        name: _fingerprint(folder)
        for name, scorer in scorers_of(recipe, model).items()
        if (folder := Path(path_of(scorer))).is_dir() and folder != Path()
    }


def _fingerprint(folder: Path) -> str:
    """Returns a digest of a model's configuration, and of parts of its weights that no two trainings share."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(file for pattern in ("config.json", "*.safetensors") for file in folder.glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            for part in range(_PARTS):
                content.seek(part * size // _PARTS)
                digest.update(content.read(_PART_BYTES))
    return digest.hexdigest()


def require_scorers(recipe: Recipe, model: Model, say: Callable[[str], None]) -> None:
    """Find or make all models that score. Raises `UserError` for one that is not there, or has another tokenizer where
    tokens are scored.
    """
    for what, scorer in scorers_of(recipe, model, say).items():
        if what == "reference":
            _require_same_tokenizer(recipe.task, model, scorer)
        elif differs := _difference(recipe.task, model, scorer):
            _require_sums(recipe, scorer, differs)
            say(f"{what} has another tokenizer than the policy ({differs}): it scores the text of each answer")
        if not isinstance(scorer, LoadedOnDevice):  # so that asking what it cannot do loads nothing
            scorer.reference(recipe.policy_temperature, Version())


@dataclass(frozen=True)
class ScoredByText:
    """A teacher with a tokenizer of its own, which scores an answer's text: the log-probability of all of it is at the
    answer's last token, and 0 at the others. That is right where only sums over an answer count.

    The prompt is written by the teacher's own chat template. An answer that has ended is followed by the teacher's end
    of a turn; one that was cut off by nothing, as under the policy, so that the probability is that of a text that
    begins so. To leave it out would teach nothing about long answers. One that is too long for the teacher is NaN.

    A policy can write a text in many ways, only one of which its tokenizer does. Were each as likely as the text, the
    unusual ones would be learnt. Another way has the text's log-probability plus log(pi_ref of it / pi_ref of the usual
    one): the teacher decides among texts, the reference among the ways to write one.
    """

    teacher: Reference
    reference: Reference  # of the policy
    own: Any  # the policy's tokenizer
    theirs: Any  # the teacher's
    chat: bool  # prompts are chats
    positions: int | None = None  # of the teacher, for a prompt and its answer; None: no limit

    @property
    def version(self) -> Version:
        """Returns the version of the teacher's weights."""
        return self.teacher.version

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        """Returns scores of several prompts: [i][j] is of the j-th completion of the i-th prompt, float32 [T].

        Raises `UserError` for a chat of which only the student's text is known.
        """
        texts: _Pairs = []  # as the teacher writes them
        unusual: list[tuple[int, Prompt, Completion, Completion]] = []  # the place, as sampled, as is usual
        for prompt, completions in answered:
            asked = self._asked(prompt)
            for completion in completions:
                text, ended = self._text(prompt, completion)
                usual = self._usual(prompt, text, ended, completion)
                if not np.array_equal(usual.tokens, completion.tokens):
                    unusual.append((len(texts), prompt, completion, usual))
                texts.append((asked, self._written(asked, text, ended, completion)))
        totals = self._totals(texts)
        ways = _sums(self.reference, [(prompt, c) for _, prompt, *two in unusual for c in two])
        for (place, *_), sampled, usual_way in zip(unusual, ways[::2], ways[1::2], strict=True):
            totals[place] += sampled - usual_way
        found = iter(totals)
        return [[_at_end(next(found), c) for c in completions] for _, completions in answered]

    def _totals(self, texts: _Pairs) -> list[float]:
        """Returns the score of each text."""
        fits = [self.positions is None or len(p.tokens) + len(c.tokens) <= self.positions for p, c in texts]
        scores = iter(_sums(self.teacher, [pair for pair, fit in zip(texts, fits, strict=True) if fit]))
        return [next(scores) if fit else math.nan for fit in fits]

    def load(self, weights: Mapping[str, Any], version: Version) -> None:
        """Become another teacher, in place. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        self.teacher.load(weights, version)

    def _asked(self, prompt: Prompt) -> Prompt:
        if self.chat and prompt.messages is None:
            raise UserError("a teacher with another tokenizer needs the messages of a chat: give them, not their text")
        text = prompt.text if prompt.messages is None else chat_markup(self.theirs, prompt.messages)
        tokens = np.array(prompt_tokens(self.theirs, [text], self.chat)[0], np.int32)
        return replace(prompt, tokens=tokens, text=plain(text) if self.chat else text)

    def _text(self, prompt: Prompt, completion: Completion) -> tuple[str, bool]:
        """Returns an answer's text, and whether it has ended."""
        before, tokens = prompt.tokens[-_BEFORE:].tolist(), completion.tokens.tolist()
        begin, text = (decoded(self.own, ids) for ids in (before, [*before, *tokens]))
        text = text[len(begin) :] if text.startswith(begin) else decoded(self.own, tokens)
        ended = completion.stop_reason is StopReason.EOS or tokens[-1] in self._turns[0].ends | {self.own.eos_token_id}
        return text if ended else text.rstrip("\ufffd"), ended  # the first bytes of a character that was cut off

    def _written(self, asked: Prompt, text: str, ended: bool, completion: Completion) -> Completion:
        """Returns an answer in the teacher's tokens; without any where nothing is said."""
        turn = self._turns[1] if self.chat else self._turns[1].behind(asked.text)
        encode, frame = partial(encoded, self.theirs), Frame(turn.last.opening)
        tokens = turn.tokens(text, encode, None if ended else frame) if ended or text else []
        return replace(completion, tokens=np.array(tokens, np.int32), text=text)

    def _usual(self, prompt: Prompt, text: str, ended: bool, completion: Completion) -> Completion:
        """Returns an answer as the policy's tokenizer writes it, with the end that it has."""
        turn = self._turns[0] if self.chat else self._turns[0].behind(prompt.text)
        markup = turn.control.markup(text, turn=True)
        tokens = continuation(partial(encoded, self.own), markup, turn.lead) if text else []
        end = completion.tokens[-1:].tolist() if ended else []
        return replace(completion, tokens=np.array([*tokens, *end], np.int32), text=text)

    @cached_property
    def _turns(self) -> tuple[AssistantTurn, AssistantTurn]:
        """Returns how the policy's turns are written, and the teacher's."""
        return assistant_turn(self.own, self.chat), assistant_turn(self.theirs, self.chat)


def _sums(scorer: Reference, pairs: _Pairs) -> list[float]:
    """Returns the log-probability of each whole answer; 0 of one without tokens."""
    said = [pair for pair in pairs if len(pair[1].tokens)]
    asked = [(some[0][0], [c for _, c in some]) for some in (list(g) for _, g in groupby(said, lambda p: id(p[0])))]
    scores = (float(log_T.sum(dtype=float)) for rows in scorer.log_probabilities_of(asked) for log_T in rows)
    return [next(scores) if len(c.tokens) else 0.0 for _, c in pairs]


def _at_end(total: float, completion: Completion) -> FloatArray:
    log_T = np.zeros(len(completion.tokens), np.float32)
    log_T[-1] = total
    return log_T


def _teachers(recipe: Recipe, model: Model, say: Callable[[str], None] = _nothing) -> Iterator[ScoringModel]:
    for path in recipe.teachers.paths:
        yield _other(recipe, model, path, "--teacher.paths", say)
    for one in () if recipe.teachers.paths else recipe.teachers.models:
        yield one.prepared(recipe.task, say)


def _teaching(recipe: Recipe, model: Model, reference: Reference, teacher: ScoringModel) -> Reference:
    differs = _difference(recipe.task, model, teacher)
    if differs:
        _require_sums(recipe, teacher, differs)
    scorer = teacher.reference(recipe.policy_temperature, Version())
    if not differs:
        return scorer
    tokenizers = model.tokenizer(), teacher.tokenizer()
    return ScoredByText(scorer, reference, *tokenizers, is_chat(recipe.task), teacher.positions)


def _other(recipe: Recipe, model: Model, path: str, flag: str, say: Callable[[str], None] = _nothing) -> Model:
    if not isinstance(model, LoadsOtherModels):
        raise UserError(
            f"{flag} is {path}, but {type(model).__name__} does not load a model from a path: use tba.HuggingFace"
        )
    return model.other(path).prepared(recipe.task, say)


def _require_same_tokenizer(task: Task, model: Model, other: ScoringModel) -> None:
    """Raises `UserError` for a reference with another tokenizer."""
    if differs := _difference(task, model, other):
        raise UserError(
            f"--reference: {_name(other)} has another tokenizer than the policy ({differs}), and a reference scores "
            "token by token: give a model with the policy's own, or make it a teacher (--teacher.paths)"
        )


def _require_sums(recipe: Recipe, teacher: ScoringModel, differs: str) -> None:
    """Raises `UserError` where a teacher with another tokenizer cannot score a recipe's answers."""
    first = next(iter(problems_of(recipe.task, "train")))
    because = None
    if not isinstance(recipe.objective, HasLogZ):
        because = "the objective needs the log-probability of each token: choose TrajectoryBalance"
    elif isinstance(recipe.task, Acted) or first.tools:
        because = "it cannot write an environment's turns or tools in its own way"
    if because is not None:
        raise UserError(
            f"the teacher {_name(teacher)} has another tokenizer than the policy ({differs}), so that it scores the "
            f"text of an answer, and {because}, or give a teacher with the policy's tokenizer"
        )
    if not isinstance(first.prompt, str):
        chat_markup(teacher.tokenizer(), first.prompt)


def is_chat(task: Task) -> bool:
    """Returns whether a task asks in chats."""
    return not isinstance(next(iter(problems_of(task, "train"))).prompt, str)


def _name(model: ScoringModel) -> str:
    return path_of(model) or str(model)


def _difference(task: Task, model: Model, other: ScoringModel) -> str:
    """Returns how two models' tokenizers differ, in words; empty where both write the same tokens: one tokenizer, or
    equal vocabularies, ends and encodings of some texts.
    """
    own, theirs = model.tokenizer(), other.tokenizer()
    if own.eos_token_id != theirs.eos_token_id:
        return f"texts end in token {theirs.eos_token_id} there, in {own.eos_token_id} here"
    if _description(own) == _description(theirs):
        return ""
    if _vocabulary(own) != _vocabulary(theirs):
        return "the vocabularies differ"
    for text in (*([_SAMPLE] if len(_vocabulary(own)) > _CHARACTERS else []), *_texts(task)):
        if own.encode(text, add_special_tokens=False) != theirs.encode(text, add_special_tokens=False):
            return f"{text[:40]!r} is encoded in another way"
    return ""


def _description(tokenizer: Any) -> Any:
    """Returns all that a tokenizer does, written down; itself where it cannot be."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return tokenizer if backend is None else backend.to_str()


def _vocabulary(tokenizer: Any) -> Any:
    return tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else tokenizer


def _texts(task: Task) -> Iterator[str]:
    for problem in islice(problems_of(task, "train"), _PROMPTS):
        if isinstance(problem.prompt, str):
            yield problem.prompt
        else:
            yield from (str(message.get("content", "")) for message in problem.prompt)
