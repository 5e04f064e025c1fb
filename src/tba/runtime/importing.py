"""Importing trajectories into a run, built from the run's directory: the run may be going on, ended or not begun.

Invariant: one import into a run at a time (a lock next to its journal, released when its process ends); everything is
scored under the reference that the run has now. Nothing here waits.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from tba.environments.episode import EpisodeFailed
from tba.environments.hosts import Hosts, InProcessHost
from tba.environments.recorded import EpisodeReplays, chat_writer, episode_writer
from tba.environments.scripted import encode_parts, play_demonstration
from tba.errors import UserError
from tba.imported_answers.encoding import Encoder, TaskPrompts
from tba.imported_answers.importer import AnswerImporter, Entry
from tba.markup import thoughts_of
from tba.protocols import Acted, AnswerScorer, Journal, Reference, Reward, Tokenizer
from tba.recipe import Recipe, differences, settings_json
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.reading import JournalFile
from tba.rollout.prompts import encode
from tba.runtime.engines import turn_encoder_of, worlds_of
from tba.runtime.graders import grader_of
from tba.runtime.run_directory import IMPORTS, PREPARED, RunDirectory
from tba.runtime.teaching import reference_of, teachers_of
from tba.tables import STATE, Refusal, read_table
from tba.types import Json, Prompt, Split, Trajectory, Version
from tba.user_code import problems_of
from tba.weights.directory import WeightDirectory

_DECIDING_NAMES = (
    "task",
    "model",
    "policy_temperature",
    "reference",
    "teacher",
)  # settings that decide how a line is tokenised and scored
_CHUNK_ROWS = 1024  # trajectories of another run's journal read at a time


@contextmanager
def importer_of(recipe: Recipe, run: RunDirectory, believe: bool, max_tokens: int | None) -> Iterator[AnswerImporter]:
    """Yields an `AnswerImporter` that takes trajectories into the run. `max_tokens` of an answer: None, as many as the
    run's own may have.

    Raises `UserError` while another import into the same run is going on. The reward has its deadline here too: a
    reward that hangs ends the import, and what was taken in until then stays.
    """
    model, hosts = recipe.model.prepared(recipe.task), replay_hosts_of(recipe)
    path, prepared_recipe = run.journal(recipe), replace(recipe, model=model)
    try:
        with JournalWriter(path, IMPORTS) as journal, _import_lock(Path(f"{path}-import"), run):
            reference = _reference(prepared_recipe, run)
            teachers, reward = teachers_of(recipe, model, reference), grader_of(recipe, run, retries=0)
            yield build_importer(prepared_recipe, reward, reference, teachers, journal, hosts, believe, max_tokens)
    finally:
        if isinstance(hosts, Hosts):
            hosts.end()


def replay_hosts_of(recipe: Recipe) -> InProcessHost | Hosts | None:
    """Returns where imported episodes are acted again; None where the task has no environment. Call it before there is
    a model, whose memory the processes would share.
    """
    return worlds_of(recipe.task, recipe.runtime == "inline") if isinstance(recipe.task, Acted) else None


def build_importer(
    recipe: Recipe,
    reward: Reward,
    reference: Reference,
    teachers: Sequence[AnswerScorer],
    journal: Journal,
    hosts: InProcessHost | Hosts | None,
    believe: bool = False,
    max_tokens: int | None = None,
    task_prompts_only: bool = False,
) -> AnswerImporter:
    """Returns an importer into a run, from parts that a process of the run may have already.

    hosts: what `replay_hosts_of` returns; they play nothing else. believe, max_tokens: as in `importer_of`.
    task_prompts_only: refuse prompts that the task lacks, whose fields, and so whose rewards, whoever sends them would
    decide. No two importers may import under the same source at the same time.
    """
    replay = None
    if hosts is not None:
        tokenizer = recipe.model.prepared(recipe.task).tokenizer()
        replay = EpisodeReplays(hosts, turn_encoder_of(recipe.task, tokenizer))
    return AnswerImporter(
        encoder=replace(encoder_of(recipe, max_tokens), task_prompts_only=task_prompts_only),
        reward=reward,
        reference=reference,
        journal=journal,
        teachers=teachers,
        believe=believe,
        needs_behavior="log_behavior" in recipe.objective.needs,
        largest_reward=recipe.largest_reward,
        replay=replay,
    )


def encoder_of(recipe: Recipe, max_tokens: int | None = None) -> Encoder:
    """Returns what writes answers from elsewhere as the run's tokens. max_tokens: as in `importer_of`."""
    model = recipe.model.prepared(recipe.task)
    tokenizer = model.tokenizer()
    train = _prompts(recipe, tokenizer, "train")
    # a prompt on both sides (in a task with a single prompt, that one) is not held out
    shared_keys = {prompt.key for prompt in train}
    first_problem = problems_of(recipe.task, "train")[0]
    is_acted = isinstance(recipe.task, Acted)
    return Encoder(
        task=recipe.task.name,
        tokenizer=tokenizer,
        train=TaskPrompts(train),
        held_out=TaskPrompts(prompt for prompt in _prompts(recipe, tokenizer, "eval") if prompt.key not in shared_keys),
        chat=not isinstance(first_problem.prompt, str),
        max_prompt_tokens=recipe.prompts.max_tokens,
        max_tokens=max_tokens or model.max_completion_tokens,
        turn_writer=episode_writer(turn_encoder_of(recipe.task, tokenizer)) if is_acted else chat_writer(tokenizer),
        positions=model.positions,
        thoughts=() if recipe.prompts.grade_thoughts else thoughts_of(tokenizer),
        acted=is_acted,
        tools=first_problem.tools if is_acted else (),
    )


def entries_of(path: Path, into: RunDirectory) -> Iterator[Entry]:
    """Yields the entries of a file of rows, of another run's folder, or of a journal (`.sqlite`).

    Raises `UserError` when nothing is there, or it is the run that imports.
    """
    if path.is_dir() and not (path / STATE).is_file():
        if path.resolve() == into.path.resolve():
            raise UserError(f"{path} is the run itself: give a file, or another run")
        return _trajectories(RunDirectory.open(path).journal_to_read())
    return _trajectories(path) if path.suffix == ".sqlite" else read_table(path)


def demonstrations(recipe: Recipe, count: int) -> Iterator[Entry]:
    """Yields the first `most` of the task's own demonstrations; in environments they are acted now."""
    task = recipe.task
    if isinstance(task, Acted):
        yield from _act_demonstrations(recipe, task, count)
        return
    demonstrated = (problem for problem in problems_of(task, "train") if problem.demonstration is not None)
    for number, problem in enumerate(islice(demonstrated, count), start=1):
        prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
        yield number, {"prompt": prompt, "response": problem.demonstration}


def _act_demonstrations(recipe: Recipe, task: Acted, count: int) -> Iterator[Entry]:
    tokenizer = recipe.model.prepared(recipe.task).tokenizer()
    encoder = turn_encoder_of(recipe.task, tokenizer)
    problems = [problem for problem in problems_of(recipe.task, "train") if problem.demonstration is not None]
    for number, problem in enumerate(problems[:count], start=1):
        (prompt,) = encode([problem], recipe.task.name, tokenizer, recipe.prompts).prompts
        try:
            parts, judgement = play_demonstration(task, problem, prompt.text)
        except EpisodeFailed as error:
            yield number, Refusal("a demonstration whose environment failed", str(error))
            continue
        completion = encode_parts(parts, judgement, encoder)
        unscored = np.zeros(len(completion.tokens), dtype=np.float32)
        yield number, Trajectory("", prompt, completion, judgement.reward, unscored, Version())


def _trajectories(path: Path) -> Iterator[Entry]:
    number = 0
    with JournalFile(path) as file, JournalFollower(path, file=file) as journal:
        while chunk := journal.drain(_CHUNK_ROWS):
            for trajectory in chunk:
                number += 1
                yield number, trajectory


def _prompts(recipe: Recipe, tokenizer: Tokenizer, split: Split) -> list[Prompt]:
    """Returns all prompts of a split, including those that this run does not use."""
    return encode(
        problems_of(recipe.task, split), recipe.task.name, tokenizer, replace(recipe.prompts, limit=None)
    ).prompts


def _reference(recipe: Recipe, run: RunDirectory) -> Reference:
    """Returns the reference that the newest published weights name, or the one that the run begins with."""
    reference = reference_of(recipe, recipe.model)
    weights = WeightDirectory(run.weights)
    newest = weights.newest()
    version = None if newest is None else weights.at(newest).manifest.reference
    if version is not None and version != reference.version:
        reference.load(weights.at(version).read(), version)
    return reference


@contextmanager
def _import_lock(path: Path, run: RunDirectory) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another import into {run.path} is in progress: wait until it has ended") from error
        yield


def prepare_run(path: Path, name: str, overrides: list[str], recipe: Recipe) -> RunDirectory:
    """Make a run that has not begun and can import trajectories; `tba train` begins it.

    Raises `UserError` as `create`.
    """
    run = RunDirectory.create(path, name, overrides, recipe)
    run.write_facts({**run.facts, PREPARED: True})
    return run


def is_prepared(path: Path) -> bool:
    """Returns whether there is a run that was made for imports and has not begun."""
    return (path / "recipe.json").is_file() and bool(RunDirectory.open(path).facts.get(PREPARED))


def adopt_imports(path: Path, recipe: Recipe) -> None:
    """Let the run of this recipe begin at `path` with what was imported there.

    Raises `UserError` when the imports were tokenised or scored by another model, task, policy temperature, reference
    or teacher.
    """
    old_settings, new_settings = map(_deciding, (RunDirectory.open(path).facts["resolved"], settings_json(recipe)))
    names = [name for name in _DECIDING_NAMES if any(differences(old_settings[name], new_settings[name], name))]
    if names:
        raise UserError(
            f"{path} was prepared with another {' and '.join(names)}, by which its imports are tokenised and scored: "
            "give the same settings, or another --run-name and --data to import them again"
        )
    (path / "recipe.json").unlink()


def _deciding(settings: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the settings that decide how rows are tokenised and scored; of the teachers only their names."""
    teacher = settings.get("teacher") or {}
    teacher_names = teacher.get("paths") or teacher.get("models") or []
    return {name: settings.get(name) for name in _DECIDING_NAMES} | {"teacher": list(teacher_names)}
