"""Which models score an answer: the reference, which may be another than the policy's start, and the teachers.

Invariant: whoever scores has the policy's own tokenizer, which is checked before anything is scored, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from tba.errors import UserError
from tba.foreign import problems_of
from tba.protocols import Model, Reference, Task
from tba.recipe import Recipe
from tba.types import Version

_CHARACTERS = 256  # tokens of a vocabulary up to which it may be one of a task's characters, and write no others
_PROMPTS = 20  # of the task whose encodings are compared
_SAMPLE = "Ünïcode 12.345, (x + y)^2 = 0?\n\tdef f(a): return {'a': [1, 2]}  # 東京\n"


def _nothing(line: str) -> None:
    """Says nothing."""


def reference_of(recipe: Recipe, model: Model) -> Reference:
    """Returns the reference that a run of a prepared model begins with. Raises `UserError` for another tokenizer."""
    if recipe.reference is None:
        return model.reference(recipe.policy_temperature, Version())
    return _scoring(recipe, model, _other(recipe, model, recipe.reference, "--reference"), "--reference")


def teachers_of(recipe: Recipe, model: Model) -> list[Reference]:
    """Returns the recipe's teachers, in order. Raises as `reference_of` does."""
    return [_scoring(recipe, model, teacher, what) for what, teacher in _teachers(recipe, model)]


def scorers_of(recipe: Recipe, model: Model, say: Callable[[str], None] = _nothing) -> dict[str, Model]:
    """Returns the models that score answers besides the policy's own, prepared, by what they are called: `reference`,
    `teacher 1`, ... `say` is called when one is made now. Raises `UserError` for one that is not there.
    """
    found = {}
    if recipe.reference is not None:
        found["reference"] = _other(recipe, model, recipe.reference, "--reference", say)
    return found | {f"teacher {i}": one for i, (_, one) in enumerate(_teachers(recipe, model, say), start=1)}


def require_scorers(recipe: Recipe, model: Model, say: Callable[[str], None]) -> None:
    """Find or make all models that score. Raises `UserError` for one that is not there, or has another tokenizer."""
    for what, scorer in scorers_of(recipe, model, say).items():
        _require_same_tokenizer(recipe.task, model, scorer, what)


def _teachers(recipe: Recipe, model: Model, say: Callable[[str], None] = _nothing) -> Iterator[tuple[str, Model]]:
    for path in recipe.teachers.paths:
        yield "--teacher.paths", _other(recipe, model, path, "--teacher.paths", say)
    for one in () if recipe.teachers.paths else recipe.teachers.models:
        yield "a teacher", one.prepared(recipe.task, say)


def _other(recipe: Recipe, model: Model, path: str, flag: str, say: Callable[[str], None] = _nothing) -> Model:
    other: Any = getattr(model, "other", None)
    if other is None:
        raise UserError(
            f"{flag} is {path}, but {type(model).__name__} does not load a model from a path: use tba.HuggingFace"
        )
    found: Model = other(path).prepared(recipe.task, say)
    return found


def _scoring(recipe: Recipe, model: Model, scorer: Model, what: str) -> Reference:
    _require_same_tokenizer(recipe.task, model, scorer, what)
    return scorer.reference(recipe.policy_temperature, Version())


def _require_same_tokenizer(task: Task, model: Model, other: Model, what: str) -> None:
    """Raises `UserError` unless both write the same tokens: one tokenizer, or equal vocabularies, ends and encodings of
    some texts.
    """
    own, theirs = model.tokenizer(), other.tokenizer()
    differs = None
    if own.eos_token_id != theirs.eos_token_id:
        differs = f"texts end in token {theirs.eos_token_id} there, in {own.eos_token_id} here"
    elif _written(own) == _written(theirs):
        return
    elif _vocabulary(own) != _vocabulary(theirs):
        differs = "the vocabularies differ"
    else:
        for text in (*([_SAMPLE] if len(_vocabulary(own)) > _CHARACTERS else []), *_texts(task)):
            if own.encode(text, add_special_tokens=False) != theirs.encode(text, add_special_tokens=False):
                differs = f"{text[:40]!r} is encoded in another way"
                break
    if differs is not None:
        raise UserError(
            f"{what}: {getattr(other, 'path', '') or other} has another tokenizer than the policy ({differs}), and "
            "answers are scored token by token: give a model with the policy's own"
        )


def _written(tokenizer: Any) -> Any:
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
