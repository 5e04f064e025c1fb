"""Finds the models that score an answer: the reference, which may be another than the policy's start, and the teachers.

Invariant: whoever scores token by token has the policy's own tokenizer, which is checked before anything is scored, not
assumed. A teacher with another one scores the text of an answer, as a whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tba.assistant_turns import AnswerFrame, AssistantTurn, assistant_turn
from tba.chat_prompts import chat_markup, prompt_tokens
from tba.errors import SeveralSegments, UserError
from tba.markup import decode_tokens, encode_continuation, encode_markup, visible_text
from tba.protocols import (
    Acted,
    AnswerScorer,
    Concurrent,
    HasLogZ,
    LoadedOnDevice,
    LoadsOtherModels,
    Model,
    Reference,
    ReferenceScorer,
    ScoresTopTokens,
    ScoringModel,
    Task,
    path_of,
)
from tba.recipe import Recipe
from tba.types import ELSEWHERE, Completion, FloatArray, Prompt, StopReason, Version
from tba.user_code import problems_of

_Pairs: TypeAlias = "list[tuple[Prompt, Completion]]"
_CHARACTER_VOCABULARY = 256  # tokens; one that is not larger may have a task's characters only, and write no others
_COMPARED_PROMPTS = 20  # of the task whose encodings are compared
_PARTS, _PART_BYTES = 64, 1 << 14  # of a file of weights, for its fingerprint
_CONTEXT_TOKENS = 4  # of a prompt with which its answer is decoded: some tokenizers leave out a text's first blank
_SAMPLE = "Ünïcode 12.345, (x + y)^2 = 0?\n\tdef f(a): return {'a': [1, 2]}  # 東京\n"


def _ignore(line: str) -> None:
    """Ignore a line for people."""


@dataclass
class NoReference:
    """Stands in for a reference that has no part in the target: nothing is loaded, and every score is 0."""

    version: Version
    concurrent: bool = True  # it computes nothing
    _first_version: Version = field(init=False)

    def __post_init__(self) -> None:
        self._first_version = self.version

    def log_probabilities_of(self, answers: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        """Returns zeros, float32 [T], for each completion."""
        return [[np.zeros(len(c.tokens), np.float32) for c in completions] for _, completions in answers]

    def load(self, weights: Mapping[str, Any], version: Version) -> None:
        """Take another version's name."""
        self.version = version

    def load_first(self) -> None:
        """Take the first version's name again."""
        self.version = self._first_version


def reference_of(recipe: Recipe, model: Model) -> Reference:
    """Returns the reference that a searcher begins with, of a prepared model; `NoReference` where it has no part in the
    target, or where the trainer scores: no version of it scored such answers. Raises `UserError` for another tokenizer.
    """
    if recipe.has_trainer_scores:
        return NoReference(ELSEWHERE)
    return _scored_reference(recipe, model) if recipe.scores_reference else NoReference(Version())


def loads_reference(recipe: Recipe, model: Model) -> bool:
    """Returns whether searchers load the reference: it is scored, or a teacher that scores texts asks it."""
    teachers = _teachers(recipe, model)
    is_scored_here = recipe.scores_reference and not recipe.has_trainer_scores
    return is_scored_here or any(_difference(recipe.task, model, teacher) for teacher in teachers)


def reference_model_of(recipe: Recipe, model: Model) -> Model:
    """Returns the model that the reference is: another one, or the prepared model of the run. Raises `UserError` for
    another tokenizer.
    """
    if recipe.reference is None:
        return model
    reference_model = _load_model(recipe, model, recipe.reference, "--reference")
    _require_same_tokenizer(recipe.task, model, reference_model)
    return reference_model


def _scored_reference(recipe: Recipe, model: Model) -> Reference:
    return reference_model_of(recipe, model).reference(recipe.policy_temperature, Version())


def teachers_of(recipe: Recipe, model: Model, reference: Reference) -> list[AnswerScorer]:
    """Returns the recipe's teachers, in order. A teacher with another tokenizer is wrapped in a `ScoredByText`, which
    needs the run's reference, and loads it where that is a `NoReference`. Raises `UserError` where the recipe needs the
    log-probability of each token.
    """
    teachers = list(_teachers(recipe, model))
    if isinstance(reference, NoReference) and any(_difference(recipe.task, model, teacher) for teacher in teachers):
        reference = _scored_reference(recipe, model)
    return [_teacher_reference(recipe, model, reference, teacher) for teacher in teachers]


def scorers_of(recipe: Recipe, model: Model, say: Callable[[str], None] = _ignore) -> dict[str, ScoringModel]:
    """Returns the prepared models that score answers besides the policy's own, by name: `reference`, `teacher 1`, ...
    `say` is called with a line for people when a model is made now. Raises `UserError` for a missing model.
    """
    scorers: dict[str, ScoringModel] = {}
    if recipe.reference is not None:
        scorers["reference"] = _load_model(recipe, model, recipe.reference, "--reference", say)
    return scorers | {f"teacher {i}": teacher for i, teacher in enumerate(_teachers(recipe, model, say), start=1)}


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
    """Find or make all models that score answers. Raises `UserError` for a model that is missing, or has another
    tokenizer where tokens are scored.
    """
    for name, scorer in scorers_of(recipe, model, say).items():
        if name == "reference":
            _require_same_tokenizer(recipe.task, model, scorer)
        elif difference := _difference(recipe.task, model, scorer):
            _require_sums(recipe, scorer, difference)
            say(f"{name} has another tokenizer than the policy ({difference}): it scores the text of each answer")
        if not isinstance(scorer, LoadedOnDevice):  # so that asking what it cannot do loads nothing
            answer_scorer = scorer.reference(recipe.policy_temperature, Version())
            if name != "reference" and recipe.teachers.top:
                _with_top(recipe, model, answer_scorer, scorer)


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

    teacher: ReferenceScorer
    reference: ReferenceScorer  # of the policy
    policy_tokenizer: Any  # the policy's tokenizer
    teacher_tokenizer: Any  # the teacher's
    chat: bool  # prompts are chats
    positions: int | None = None  # of the teacher, for a prompt and its answer; None: no limit

    @property
    def version(self) -> Version:
        """Returns the version of the teacher's weights."""
        return self.teacher.version

    @property
    def concurrent(self) -> bool:
        """Returns whether both models can score in one thread while an engine samples in another."""
        return all(isinstance(s, Concurrent) and s.concurrent for s in (self.teacher, self.reference))

    def log_probabilities_of(self, answers: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        """Returns scores of several prompts: [i][j] is of the j-th completion of the i-th prompt, float32 [T].

        Raises `UserError` for a chat of which only the student's text is known, and for an episode of several segments.
        """
        teacher_pairs: _Pairs = []  # as the teacher writes them
        variants: list[tuple[int, Prompt, Completion, Completion]] = []  # place, as sampled, as usual
        for prompt, completions in answers:
            teacher_prompt = self._teacher_prompt(prompt)
            for completion in completions:
                if completion.begins is not None:
                    raise SeveralSegments(len(completion.segments), "a teacher with another tokenizer scores")
                text, has_ended = self._answer_text(prompt, completion)
                usual_form = self._in_usual_form(prompt, text, has_ended, completion)
                if not np.array_equal(usual_form.tokens, completion.tokens):
                    variants.append((len(teacher_pairs), prompt, completion, usual_form))
                teacher_pairs.append((teacher_prompt, self._for_teacher(teacher_prompt, text, has_ended, completion)))
        totals = self._totals(teacher_pairs)
        scores = _sums(self.reference, [(prompt, c) for _, prompt, *writings in variants for c in writings])
        for (place, *_), score, usual_score in zip(variants, scores[::2], scores[1::2], strict=True):
            totals[place] += score - usual_score
        remaining_totals = iter(totals)
        return [[_scores_at_end(next(remaining_totals), c) for c in completions] for _, completions in answers]

    def _totals(self, pairs: _Pairs) -> list[float]:
        """Returns the score of each text."""
        are_short = [self.positions is None or len(p.tokens) + len(c.tokens) <= self.positions for p, c in pairs]
        scores = iter(_sums(self.teacher, [pair for pair, is_short in zip(pairs, are_short, strict=True) if is_short]))
        return [next(scores) if is_short else math.nan for is_short in are_short]

    def _teacher_prompt(self, prompt: Prompt) -> Prompt:
        if self.chat and prompt.messages is None:
            raise UserError("a teacher with another tokenizer needs the messages of a chat: give them, not their text")
        text = prompt.text if prompt.messages is None else chat_markup(self.teacher_tokenizer, prompt.messages)
        tokens = np.array(prompt_tokens(self.teacher_tokenizer, [text], self.chat)[0], np.int32)
        return replace(prompt, tokens=tokens, text=visible_text(text) if self.chat else text)

    def _answer_text(self, prompt: Prompt, completion: Completion) -> tuple[str, bool]:
        """Returns an answer's text, and whether it has ended."""
        prompt_end, tokens = prompt.tokens[-_CONTEXT_TOKENS:].tolist(), completion.tokens.tolist()
        prompt_text, text = (decode_tokens(self.policy_tokenizer, ids) for ids in (prompt_end, [*prompt_end, *tokens]))
        text = (
            text[len(prompt_text) :] if text.startswith(prompt_text) else decode_tokens(self.policy_tokenizer, tokens)
        )
        stop_tokens = self._turns[0].end_tokens | {self.policy_tokenizer.eos_token_id}
        has_ended = completion.stop_reason is StopReason.EOS or tokens[-1] in stop_tokens
        return text if has_ended else text.rstrip("\ufffd"), has_ended  # without the bytes of a character cut off

    def _for_teacher(self, prompt: Prompt, text: str, has_ended: bool, completion: Completion) -> Completion:
        """Returns an answer in the teacher's tokens; an empty answer has none."""
        turn = self._turns[1] if self.chat else self._turns[1].after_prompt(prompt.text)
        encode, frame = partial(encode_markup, self.teacher_tokenizer), AnswerFrame(turn.final_frame.opening)
        tokens = turn.tokens(text, encode, None if has_ended else frame) if has_ended or text else []
        return replace(completion, tokens=np.array(tokens, np.int32), text=text)

    def _in_usual_form(self, prompt: Prompt, text: str, has_ended: bool, completion: Completion) -> Completion:
        """Returns an answer in the tokens that the policy's tokenizer gives its text, with the end that was sampled."""
        turn = self._turns[0] if self.chat else self._turns[0].after_prompt(prompt.text)
        markup = turn.control.markup(text, is_turn=True)
        tokens = encode_continuation(partial(encode_markup, self.policy_tokenizer), markup, turn.lead) if text else []
        end_tokens = completion.tokens[-1:].tolist() if has_ended else []
        return replace(completion, tokens=np.array([*tokens, *end_tokens], np.int32), text=text)

    @cached_property
    def _turns(self) -> tuple[AssistantTurn, AssistantTurn]:
        """Returns how the policy's turns and the teacher's are written."""
        return assistant_turn(self.policy_tokenizer, self.chat), assistant_turn(self.teacher_tokenizer, self.chat)


def _sums(scorer: ReferenceScorer, pairs: _Pairs) -> list[float]:
    """Returns the log-probability of each whole answer; 0 of one without tokens."""
    pairs_with_tokens = [pair for pair in pairs if len(pair[1].tokens)]
    groups = (list(group) for _, group in groupby(pairs_with_tokens, lambda pair: id(pair[0])))
    answers = [(group[0][0], [completion for _, completion in group]) for group in groups]
    scores = (float(log_T.sum(dtype=float)) for rows in scorer.log_probabilities_of(answers) for log_T in rows)
    return [next(scores) if len(c.tokens) else 0.0 for _, c in pairs]


def _scores_at_end(total: float, completion: Completion) -> FloatArray:
    log_T = np.zeros(len(completion.tokens), np.float32)
    log_T[-1] = total
    return log_T


def _teachers(recipe: Recipe, model: Model, say: Callable[[str], None] = _ignore) -> Iterator[ScoringModel]:
    for path in recipe.teachers.paths:
        yield _load_model(recipe, model, path, "--teacher.paths", say)
    for teacher in () if recipe.teachers.paths else recipe.teachers.models:
        yield teacher.prepared(recipe.task, say)


def _teacher_reference(recipe: Recipe, model: Model, reference: Reference, teacher: ScoringModel) -> AnswerScorer:
    difference = _difference(recipe.task, model, teacher)
    if difference:
        _require_sums(recipe, teacher, difference)
    scorer = teacher.reference(recipe.policy_temperature, Version())
    if not difference:
        return scorer if not recipe.teachers.top else _with_top(recipe, model, scorer, teacher)
    tokenizers = model.tokenizer(), teacher.tokenizer()
    return ScoredByText(scorer, reference, *tokenizers, is_chat(recipe.task), teacher.positions)


def _with_top(recipe: Recipe, model: Model, scorer: ReferenceScorer, teacher: ScoringModel) -> AnswerScorer:
    """Returns a scorer of top tokens. A model's head may have more rows than there are tokens, and the teacher's others
    than the policy's: only the tokenizer's tokens are named.
    """
    count, vocabulary = recipe.teachers.top, _vocabulary(model.tokenizer())
    if not isinstance(scorer, ScoresTopTokens):
        raise UserError(
            f"--teacher.top is {count}, but {_name(teacher)} cannot say which tokens it finds most probable: choose "
            "another teacher, or an objective that needs sampled tokens only (TrajectoryBalance)"
        )
    return scorer.with_top(count, max(vocabulary.values()) + 1 if isinstance(vocabulary, Mapping) else None)


def _load_model(recipe: Recipe, model: Model, path: str, flag: str, say: Callable[[str], None] = _ignore) -> Model:
    if not isinstance(model, LoadsOtherModels):
        raise UserError(f"{flag} is {path}, but {type(model).__name__} loads no model from a path: use tba.HuggingFace")
    return model.with_path(path).prepared(recipe.task, say)


def _require_same_tokenizer(task: Task, model: Model, scorer: ScoringModel) -> None:
    """Raises `UserError` for a reference with another tokenizer."""
    if difference := _difference(task, model, scorer):
        raise UserError(
            f"--reference: {_name(scorer)} has another tokenizer than the policy ({difference}), and a reference "
            "scores token by token: give a model with the policy's own, or make it a teacher (--teacher.paths)"
        )


def _require_sums(recipe: Recipe, teacher: ScoringModel, difference: str) -> None:
    """Raises `UserError` where a teacher with another tokenizer cannot score a recipe's answers."""
    first_problem = next(iter(problems_of(recipe.task, "train")))
    reason = None
    if not isinstance(recipe.objective, HasLogZ):
        reason = "the objective needs the log-probability of each token: choose TrajectoryBalance"
    elif isinstance(recipe.task, Acted) or first_problem.tools:
        reason = "it cannot write an environment's turns or tools in its own way"
    if reason is not None:
        raise UserError(
            f"the teacher {_name(teacher)} has another tokenizer than the policy ({difference}), so that it scores the "
            f"text of an answer, and {reason}, or give a teacher with the policy's tokenizer"
        )
    if not isinstance(first_problem.prompt, str):
        chat_markup(teacher.tokenizer(), first_problem.prompt)


def is_chat(task: Task) -> bool:
    """Returns whether a task asks in chats."""
    return not isinstance(next(iter(problems_of(task, "train"))).prompt, str)


def _name(model: ScoringModel) -> str:
    return path_of(model) or str(model)


def _difference(task: Task, model: Model, scorer: ScoringModel) -> str:
    """Returns how two models' tokenizers differ, in words; empty where both write the same tokens: one tokenizer, or
    equal vocabularies, ends and encodings of some texts.
    """
    tokenizer, other_tokenizer = model.tokenizer(), scorer.tokenizer()
    if tokenizer.eos_token_id != other_tokenizer.eos_token_id:
        return f"texts end in token {other_tokenizer.eos_token_id} there, in {tokenizer.eos_token_id} here"
    if _description(tokenizer) == _description(other_tokenizer):
        return ""
    if _vocabulary(tokenizer) != _vocabulary(other_tokenizer):
        return "the vocabularies differ"
    for text in (*([_SAMPLE] if len(_vocabulary(tokenizer)) > _CHARACTER_VOCABULARY else []), *_texts(task)):
        if tokenizer.encode(text, add_special_tokens=False) != other_tokenizer.encode(text, add_special_tokens=False):
            return f"{text[:40]!r} is encoded in another way"
    return ""


def _description(tokenizer: Any) -> Any:
    """Returns all that a tokenizer does, written down; itself where it cannot be."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return tokenizer if backend is None else backend.to_str()


def _vocabulary(tokenizer: Any) -> Any:
    return tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else tokenizer


def _texts(task: Task) -> Iterator[str]:
    for problem in islice(problems_of(task, "train"), _COMPARED_PROMPTS):
        if isinstance(problem.prompt, str):
            yield problem.prompt
        else:
            yield from (str(message.get("content", "")) for message in problem.prompt)
