"""Models that are taught demonstrations: a small one made untrained (a warm start), or one that is there (`tba sft`).

Invariant: what is made is cached under a digest of all that decides it. A prompt of a demonstration has the tokens that
a run gives it, and a response ends as the model's turns do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from tba.chat_prompts import chat_markup, prompt_tokens, with_arguments
from tba.environments.scripted import acted, written
from tba.environments.speech import Speech
from tba.errors import UserError
from tba.fields import BY_CODE, as_declared
from tba.json_input import read_json
from tba.markup import continuations, plain
from tba.models.source import whole
from tba.policy.loading import load_model, no_bars
from tba.protocols import Acted, Task
from tba.training.cache import cached_folder, supervised_key
from tba.training.supervised import Pair, SupervisedSettings, supervise
from tba.training.tiny_models import ScratchModel, character_tokenizer, train_bpe_tokenizer
from tba.turns import add_ends, assistant_turn
from tba.types import Json, Problem
from tba.user_code import problems_of
from tba.weights.atomic_dir import cache_folder

FACTS = "warm_start.json"


@dataclass(frozen=True)
@as_declared
class Lesson:
    """One part of a warm start: the task's demonstrations, possibly with some of its fields changed."""

    settings: SupervisedSettings
    task_fields: Mapping[str, Json] = field(default_factory=dict)  # the task's fields that differ here; a task without
    # one of these does without the lesson
    prompts: bool = False  # the prompts' own tokens are learnt too: language, where answers are few and short

    def is_for(self, task: Task) -> bool:
        """Returns whether the task has the fields that the lesson changes."""
        return self.task_fields.keys() <= {f.name for f in fields(task)} if is_dataclass(task) else not self.task_fields

    def pairs(self, task: Task, tokenizer: Any) -> list[Pair]:
        changed: Task = replace(cast(Any, task), **self.task_fields) if self.task_fields else task
        pairs = _taught(changed, tokenizer)
        return [_with_prompt(pair) for pair in pairs] if self.prompts else pairs


@dataclass(frozen=True)
@as_declared
class WarmStart:
    """A small model, made untrained and then taught the task's own demonstrations."""

    scratch: ScratchModel = field(default_factory=ScratchModel)
    tokenizer: Literal["characters", "bpe"] = "bpe"  # the task's characters, or byte-level BPE trained on its texts
    vocab_size: int = 2048  # vocabulary of the BPE tokenizer
    sft: SupervisedSettings = field(default_factory=SupervisedSettings)
    before: tuple[Lesson, ...] = ()  # lessons that precede `sft`
    shipped: Path | None = field(default=None, metadata=BY_CODE)  # a folder that may hold the result already

    @property
    def unused(self) -> Mapping[str, str]:
        """The field without effect: the characters of a task are as many as they are."""
        return {"vocab_size": "tokenizer bpe"} if self.tokenizer == "characters" else {}


def warm_started(start: WarmStart, task: Task, log: Callable[[str], None]) -> Path:
    """Returns the folder of the warm start's result for this task: shipped, cached, or made now.

    A task without demonstrations, which replaces the one that the recipe came with, begins with what is shipped.
    Raises `UserError` where nothing is.
    """
    problems = _with_demonstrations(task)
    if not problems and start.shipped is not None:
        log(
            f"task {task.name} has no demonstrations to make a base from: it begins with the recipe's own, "
            f"{start.shipped}, which was taught another task; --model.path names another model"
        )
        return start.shipped
    if not problems:
        raise UserError(
            f"task {task.name} has no demonstrations to make a base from: give --model.path a model (in code: "
            'dataclasses.replace(recipe.model, path="FOLDER", warm_start=None)), or the problems a worked answer '
            "(demonstration=...)"
        )
    tokenizer = tokenizer_for(start, problems, task)
    before = [lesson for lesson in start.before if lesson.is_for(task)]
    lessons = [(lesson.settings, lesson.pairs(task, tokenizer)) for lesson in (*before, Lesson(start.sft))]
    settings = [start.scratch, tokenizer.get_vocab(), *(settings for settings, _ in lessons)]
    key = supervised_key(settings, [pair for _, pairs in lessons for pair in pairs])
    if start.shipped is not None and _is_result_of(start.shipped, key):
        return start.shipped
    folder = folder_of_results()
    if not (folder / key).is_dir():
        log(f"supervised warm start on the demonstrations of {task.name}, once for these settings: {folder / key}")

    def make(path: Path) -> None:
        teach(start.scratch.start(tokenizer), tokenizer, lessons, key, path, log)

    return cached_folder(folder, key, make)


def _with_demonstrations(task: Task) -> list[Problem]:
    return [p for p in problems_of(task, "train") if p.demonstration is not None]


def folder_of_results() -> Path:
    """Returns the folder of all results, one for each digest."""
    return cache_folder("warm-starts")


def continued(
    path: str, settings: SupervisedSettings, task: Task, log: Callable[[str], None], arguments: Sequence[str] = ()
) -> Path:
    """Returns the model at `path` taught the task's demonstrations: cached, or made now."""
    return taught(path, settings, lambda tokenizer: _taught(task, tokenizer), log, arguments)


def taught(
    path: str,
    settings: SupervisedSettings,
    pairs_in: Callable[[Any], list[Pair]],
    log: Callable[[str], None],
    arguments: Sequence[str] = (),
) -> Path:
    """Returns the model at `path` taught what `pairs_in` makes of its tokenizer: cached, or made now. The tokenizer's
    template has the arguments from then on.
    """
    model, tokenizer = load_model(whole(path, log), "cpu", torch.float32)
    pairs = pairs_in(with_arguments(tokenizer, arguments))
    beside = [json.loads(model.config.to_json_string()), model.generation_config.to_dict(), *_written_out(tokenizer)]
    key = supervised_key([settings, *arguments, *beside], pairs, dict(model.state_dict()))
    return cached_folder(
        folder_of_results(), key, lambda out: teach(model, tokenizer, [(settings, pairs)], key, out, log)
    )


def _written_out(tokenizer: Any) -> Iterator[Json]:
    """Yields what a tokenizer's files say, of which the taught model's are made."""
    yield tokenizer.chat_template
    yield {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    if tokenizer.is_fast:
        yield tokenizer.backend_tokenizer.to_str()


def teach(
    model: Any,
    tokenizer: Any,
    lessons: Sequence[tuple[SupervisedSettings, list[Pair]]],
    key: str,
    path: Path,
    log: Callable[[str], None],
) -> None:
    """Train, lesson by lesson, and save into `path`, with the key of what it was made from."""

    def progress(step: int, steps: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            log(f"sft step {step} of {steps}, loss {loss:.3f}")

    found = [supervise(model, tokenizer, pairs, settings, progress) for settings, pairs in lessons]
    add_ends(model.generation_config, tokenizer)
    with no_bars():
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    last = found[-1]
    facts = {"key": key, "loss": last.steps[-1], "held_out_loss": last.held_out, "too_long": last.too_long}
    (path / FACTS).write_text(json.dumps(facts) + "\n")


def tokenizer_for(start: WarmStart, problems: list[Problem], task: Task) -> Any:
    """Returns a tokenizer of the characters that occur, or BPE trained on the texts."""
    acting = task if isinstance(task, Acted) else None
    texts = [text for p in problems for text in (str(p.prompt), _text_of(p, acting))]
    if start.tokenizer == "characters":
        return character_tokenizer("".join(sorted(set("".join(texts)))))
    return train_bpe_tokenizer(texts, start.vocab_size)


def pairs_of(problems: list[Problem], tokenizer: Any) -> Iterator[Pair]:
    """Yields problems as (prompt, response) token ids; encoded all at once, which is several times faster."""
    if not problems:
        return
    texts, chats = [_text(p, tokenizer) for p in problems], [_is_chat(p) for p in problems]
    forms = {chat: assistant_turn(tokenizer, chat) for chat in {*chats}}
    turns = [forms[chat] if chat else forms[chat].behind(text) for chat, text in zip(chats, texts, strict=True)]
    answers = [
        turn.text(p.demonstration) if isinstance(p.demonstration, str) else ""
        for p, turn in zip(problems, turns, strict=True)
    ]
    of = {
        chat: iter(prompt_tokens(tokenizer, [t for t, own in zip(texts, chats, strict=True) if own is chat], chat))
        for chat in forms
    }
    responses = continuations(tokenizer, answers, [turn.lead for turn in turns])
    eos = tokenizer.eos_token_id
    for chat, response, turn in zip(chats, responses, turns, strict=True):
        yield Pair(next(of[chat]), response, end=_unless(eos, turn.last.token))


def _is_chat(problem: Problem) -> bool:
    return not isinstance(problem.prompt, str)


def _unless(eos: int | None, end: int | None) -> int | None:
    """Returns the token that ends a response as `Pair` has it."""
    return None if end == eos else end


def _taught(task: Task, tokenizer: Any) -> list[Pair]:
    """Returns a task's demonstrations as (prompt, response) token ids; of episodes the policy's turns are learnt."""
    problems = _with_demonstrations(task)
    if not problems:
        raise UserError(
            f"task {task.name} has no demonstrations to learn: give its problems a worked answer (demonstration=...)"
        )
    if not isinstance(task, Acted):
        return list(pairs_of(problems, tokenizer))
    speech = Speech(tokenizer, _is_chat(problems[0]), problems[0].tools)
    pairs = []
    for problem, asked in zip(problems, pairs_of(problems, tokenizer), strict=True):
        completion = written(*acted(task, problem, _shown(problem, tokenizer)), speech)
        pair = Pair.of(asked.prompt, completion, completion.tokens[-1:].tolist())
        pairs.append(replace(pair, end=_unless(tokenizer.eos_token_id, pair.end)))
    return pairs


def _with_prompt(pair: Pair) -> Pair:
    """Returns the pair whose prompt is learnt, too, but for its first token."""
    moved = len(pair.prompt) - 1
    observed = tuple((begin + moved, end + moved) for begin, end in pair.observed)
    return replace(pair, prompt=pair.prompt[:1], response=[*pair.prompt[1:], *pair.response], observed=observed)


def _text(problem: Problem, tokenizer: Any) -> str:
    if isinstance(problem.prompt, str):
        return problem.prompt
    return chat_markup(tokenizer, problem.prompt, problem.tools)


def _shown(problem: Problem, tokenizer: Any) -> str:
    return problem.prompt if isinstance(problem.prompt, str) else plain(_text(problem, tokenizer))


def _text_of(problem: Problem, task: Acted | None) -> str:
    """Returns the text of a demonstration; of an episode all that is said in it."""
    if task is None:
        return problem.demonstration if isinstance(problem.demonstration, str) else ""
    parts, _ = acted(task, problem, str(problem.prompt))
    return "".join(part.text for part in parts)


def _is_result_of(folder: Path, key: str) -> bool:
    facts = folder / FACTS
    return facts.is_file() and read_json(facts, "remove it", key=str)["key"] == key
