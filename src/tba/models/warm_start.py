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

from tba.assistant_turns import add_end_tokens, assistant_turn
from tba.chat_prompts import chat_markup, prompt_tokens, with_arguments
from tba.environments.scripted import encode_parts, play_demonstration
from tba.environments.turn_encoding import TurnEncoder
from tba.errors import UserError
from tba.fields import BY_CODE, as_declared
from tba.json_input import read_json
from tba.markup import encode_continuations, visible_text
from tba.models.source import resolve_model_path
from tba.policy.loading import load_model, no_bars
from tba.protocols import Acted, Task
from tba.training.cache import cached_folder, supervised_key
from tba.training.supervised import Pair, SupervisedSettings, supervise
from tba.training.tiny_models import ScratchModel, character_tokenizer, train_bpe_tokenizer
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
        lesson_task: Task = replace(cast(Any, task), **self.task_fields) if self.task_fields else task
        pairs = _task_pairs(lesson_task, tokenizer)
        return [_with_prompt(pair) for pair in pairs] if self.prompts else pairs


@dataclass(frozen=True)
@as_declared
class WarmStart:
    """A small model, made untrained and then taught the task's own demonstrations."""

    scratch: ScratchModel = field(default_factory=ScratchModel)
    tokenizer: Literal["characters", "bpe"] = "bpe"  # the task's characters, or byte-level BPE trained on its texts
    vocab_size: int = 2048  # vocabulary of the BPE tokenizer
    chat_template: str = field(default="", metadata=BY_CODE)  # of the tokenizer, in Jinja; empty: prompts are texts
    sft: SupervisedSettings = field(default_factory=SupervisedSettings)
    before: tuple[Lesson, ...] = ()  # lessons that precede `sft`
    shipped: Path | None = field(default=None, metadata=BY_CODE)  # a folder that may hold the result already

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the field without effect: the characters of a task are as many as they are."""
        return {"vocab_size": "tokenizer bpe"} if self.tokenizer == "characters" else {}


def prepare_warm_start(start: WarmStart, task: Task, log: Callable[[str], None]) -> Path:
    """Returns the folder of the warm start's result for this task: shipped, cached, or made now.

    A task without demonstrations, which replaces the one that the recipe came with, begins with what is shipped.
    Raises `UserError` where nothing is.
    """
    problems = _demonstrated_problems(task)
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
    earlier_lessons = [lesson for lesson in start.before if lesson.is_for(task)]
    lessons = [(lesson.settings, lesson.pairs(task, tokenizer)) for lesson in (*earlier_lessons, Lesson(start.sft))]
    settings = [start.scratch, tokenizer.get_vocab(), *(settings for settings, _ in lessons)]
    settings += [start.chat_template] if start.chat_template else []
    key = supervised_key(settings, [pair for _, pairs in lessons for pair in pairs])
    if start.shipped is not None and _is_result_of(start.shipped, key):
        return start.shipped
    folder = results_folder()
    if not (folder / key).is_dir():
        log(f"supervised warm start on the demonstrations of {task.name}, once for these settings: {folder / key}")

    def make(path: Path) -> None:
        teach(start.scratch.start(tokenizer), tokenizer, lessons, key, path, log)

    return cached_folder(folder, key, make)


def _demonstrated_problems(task: Task) -> list[Problem]:
    return [p for p in problems_of(task, "train") if p.demonstration is not None]


def results_folder() -> Path:
    """Returns the folder of all results, one for each digest."""
    return cache_folder("warm-starts")


def teach_demonstrations(
    path: str, settings: SupervisedSettings, task: Task, log: Callable[[str], None], arguments: Sequence[str] = ()
) -> Path:
    """Returns the model at `path` taught the task's demonstrations: cached, or made now."""
    return teach_pairs(path, settings, lambda tokenizer: _task_pairs(task, tokenizer), log, arguments)


def teach_pairs(
    path: str,
    settings: SupervisedSettings,
    pairs_in: Callable[[Any], list[Pair]],
    log: Callable[[str], None],
    arguments: Sequence[str] = (),
) -> Path:
    """Returns the model at `path` taught what `pairs_in` makes of its tokenizer: cached, or made now. The tokenizer's
    template has the arguments from then on.
    """
    model, tokenizer = load_model(resolve_model_path(path, log), "cpu", torch.float32)
    pairs = pairs_in(with_arguments(tokenizer, arguments))
    facts = [json.loads(model.config.to_json_string()), model.generation_config.to_dict(), *_tokenizer_facts(tokenizer)]
    key = supervised_key([settings, *arguments, *facts], pairs, dict(model.state_dict()))
    return cached_folder(results_folder(), key, lambda out: teach(model, tokenizer, [(settings, pairs)], key, out, log))


def _tokenizer_facts(tokenizer: Any) -> Iterator[Json]:
    """Yields the contents of a tokenizer's files, which decide those of the taught model."""
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
    """Train a model lesson by lesson, and save it into `path` with the key of all that decides it."""

    def progress(step: int, steps: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            log(f"sft step {step} of {steps}, loss {loss:.3f}")

    results = [supervise(model, tokenizer, pairs, settings, progress) for settings, pairs in lessons]
    add_end_tokens(model.generation_config, tokenizer)
    with no_bars():
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    result = results[-1]
    facts = {"key": key, "loss": result.steps[-1], "held_out_loss": result.held_out, "too_long": result.too_long}
    (path / FACTS).write_text(json.dumps(facts) + "\n")


def tokenizer_for(start: WarmStart, problems: list[Problem], task: Task) -> Any:
    """Returns a tokenizer of the characters that occur, or BPE trained on the texts, with the chat template."""
    acted_task = task if isinstance(task, Acted) else None
    texts = [text for p in problems for text in (str(p.prompt), _demonstration_text(p, acted_task))]
    texts += [start.chat_template] if start.chat_template else []
    if start.tokenizer == "characters":
        tokenizer = character_tokenizer("".join(sorted(set("".join(texts)))))
    else:
        tokenizer = train_bpe_tokenizer(texts, start.vocab_size)
    tokenizer.chat_template = start.chat_template or None
    return tokenizer


def demonstration_pairs(problems: list[Problem], tokenizer: Any) -> Iterator[Pair]:
    """Yields problems as (prompt, response) token ids; encoded all at once, which is several times faster."""
    if not problems:
        return
    texts, chats = [_prompt_text(p, tokenizer) for p in problems], [_is_chat(p) for p in problems]
    forms = {chat: assistant_turn(tokenizer, chat) for chat in {*chats}}
    inputs = list(zip(chats, texts, strict=True))
    turns = [forms[chat] if chat else forms[chat].after_prompt(text) for chat, text in inputs]
    answers = [
        turn.text(p.demonstration) if isinstance(p.demonstration, str) else ""
        for p, turn in zip(problems, turns, strict=True)
    ]
    texts_of = {form: [text for chat, text in inputs if chat is form] for form in forms}
    prompts_of = {form: iter(prompt_tokens(tokenizer, texts_of[form], form)) for form in forms}
    responses = encode_continuations(tokenizer, answers, [turn.lead for turn in turns])
    eos = tokenizer.eos_token_id
    for chat, response, turn in zip(chats, responses, turns, strict=True):
        yield Pair(next(prompts_of[chat]), response, end=_end_token(eos, turn.final_frame.token))


def _is_chat(problem: Problem) -> bool:
    return not isinstance(problem.prompt, str)


def _end_token(eos: int | None, end: int | None) -> int | None:
    """Returns the token that ends a response as `Pair` has it."""
    return None if end == eos else end


def _task_pairs(task: Task, tokenizer: Any) -> list[Pair]:
    """Returns a task's demonstrations as (prompt, response) token ids; of episodes the policy's turns are learnt."""
    problems = _demonstrated_problems(task)
    if not problems:
        raise UserError(
            f"task {task.name} has no demonstrations to learn: give its problems a worked answer (demonstration=...)"
        )
    if not isinstance(task, Acted):
        return list(demonstration_pairs(problems, tokenizer))
    encoder = TurnEncoder(tokenizer, _is_chat(problems[0]), problems[0].tools)
    pairs = []
    for problem, prompt_pair in zip(problems, demonstration_pairs(problems, tokenizer), strict=True):
        completion = encode_parts(*play_demonstration(task, problem, _readable_prompt(problem, tokenizer)), encoder)
        pair = Pair.of(prompt_pair.prompt, completion, completion.tokens[-1:].tolist())
        pairs.append(replace(pair, end=_end_token(tokenizer.eos_token_id, pair.end)))
    return pairs


def _with_prompt(pair: Pair) -> Pair:
    """Returns the pair whose prompt is learnt, too, but for its first token."""
    offset = len(pair.prompt) - 1
    spans = tuple((begin + offset, end + offset) for begin, end in pair.observed)
    return replace(pair, prompt=pair.prompt[:1], response=[*pair.prompt[1:], *pair.response], observed=spans)


def _prompt_text(problem: Problem, tokenizer: Any) -> str:
    if isinstance(problem.prompt, str):
        return problem.prompt
    return chat_markup(tokenizer, problem.prompt, problem.tools)


def _readable_prompt(problem: Problem, tokenizer: Any) -> str:
    return problem.prompt if isinstance(problem.prompt, str) else visible_text(_prompt_text(problem, tokenizer))


def _demonstration_text(problem: Problem, task: Acted | None) -> str:
    """Returns the text of a demonstration; of an episode all that is said in it."""
    if task is None:
        return problem.demonstration if isinstance(problem.demonstration, str) else ""
    parts, _ = play_demonstration(task, problem, str(problem.prompt))
    return "".join(part.text for part in parts)


def _is_result_of(folder: Path, key: str) -> bool:
    facts = folder / FACTS
    return facts.is_file() and read_json(facts, "remove it", key=str)["key"] == key
