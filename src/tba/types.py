"""The nouns of Trajectory Balance with Asynchrony, frozen. Read this file first.

Invariant: a stage never edits what it was given, it makes the next noun
(`Problem` -> `Prompt` -> `Completion` -> `Trajectory` -> `Group`). Standard library and numpy only.

Shape legend: P prompt tokens, T completion tokens, S segments of a completion.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Json: TypeAlias = Any  # what json.dumps takes: None, bool, int, float, str, lists and dicts of these
_LONGEST_NAME = 200  # bytes: names derived from it are a few longer, and file systems allow 255
_SCALARS = frozenset({str, int, float, bool, type(None)})


def deep_copy(value: Json) -> Json:
    """Returns a deep copy of lists and dictionaries, for code of a user, which may change its arguments.

    An object that cannot be copied, such as an open connection, stays itself.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return [deep_copy(item) for item in value]
    if kind is dict:
        return {key: deep_copy(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except TypeError:
        return value


def python_values(value: Any) -> Any:
    """Returns a value with numbers and arrays of numpy as Python's: a float of fewer bits is the shortest decimal that
    rounds to it (0.1, not 0.10000000149), as it is written in a file.
    """
    if isinstance(value, np.generic):
        return float(str(value)) if isinstance(value, np.floating) else value.item()
    if isinstance(value, np.ndarray):
        return python_values(list(value) if value.ndim else value[()])
    if isinstance(value, Mapping):
        return {name: python_values(inner) for name, inner in value.items()}
    return type(value)(map(python_values, value)) if type(value) in (list, tuple) else value


def is_text(text: str) -> bool:
    """Returns whether the text can be encoded; JSON can spell halves of surrogate pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def quote(text: str, max_length: int = 200) -> str:
    """Returns `text` in quotes on one line for messages, control characters spelt out; `...` says that it was cut."""
    return repr(text if len(text) <= max_length else f"{text[: max_length - 3]}...")


def is_name(text: str) -> bool:
    """Returns whether a text can name a file or folder: no path, not hidden, and no option where it is an argument."""
    return re.fullmatch(r"\w[\w.+=-]*", text) is not None and len(text.encode(errors="replace")) <= _LONGEST_NAME


Split: TypeAlias = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")
Message: TypeAlias = Mapping[str, Any]  # {"role": "user", "content": "..."}; also tool_calls, name, ...


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """Names one set of weights: `step` optimizer updates within `incarnation`.

    Each resume raises the incarnation, so no two sets of weights share a name. Ordered, newest last.
    """

    SPELLING: ClassVar[str] = "a version such as '0.12'"

    incarnation: int = 0  # one more with each resume of the run
    step: int = 0  # optimizer updates of the run

    def __str__(self) -> str:
        if self.is_average:
            return f"{self.average}a"
        return "none" if self.incarnation < 0 else f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Returns the version that `str` has written as `text`; raises `ValueError` for any other text."""
        if text == "none":
            return ELSEWHERE
        incarnation, _, step = text.removesuffix("a").partition(".")
        version = cls(int(incarnation), int(step))
        return version.average if text.endswith("a") else version

    @property
    def in_words(self) -> str:
        """Returns the version in words: `step 50`, or in a run that was resumed `step 50 of incarnation 1`."""
        if self.is_average:
            return f"the average at {self.average.in_words}"
        incarnation_words = f" of incarnation {self.incarnation}" if self.incarnation else ""
        return "none" if self.incarnation < 0 else f"step {self.step}{incarnation_words}"

    @property
    def average(self) -> Version:
        """Returns the name of the average of weights up to these, or for an average its newest weights. Averages are
        evaluated and never sampled from, and compare as older than all weights.
        """
        return Version(-2 - self.incarnation, self.step)

    @property
    def is_average(self) -> bool:
        return self.incarnation <= -2

    def lag(self, now: Version) -> int:
        """Returns the trainer updates from these weights to `now`.

        Weights of an earlier incarnation are older than all of the present one's. Their updates are not comparable, so
        they count as `now.step + 1` behind.
        """
        if self.incarnation == now.incarnation:
            return now.step - self.step
        return now.step + 1


TOP_IDS = "teacher_top_ids"  # what a teacher finds most probable at each of M trained tokens, [M, K] uint16 or int32
TOP_LOGS = "teacher_top_logs"  # their log-probabilities, and that of all other tokens together, [M, K + 1] float16
TEACHER = "log_teacher"  # the array of a trajectory with its log-probabilities under N teachers, [N, T] float32
LEFT_OUT = "left_out"  # in the provenance: answers to its prompt that were rejected, for each that was not
ELSEWHERE = Version(-1, 0)  # of what no weights of this run sampled: before every incarnation, so it is never recent


@dataclass(frozen=True)
class Problem:
    """A question as its task states it, before any tokenizer has seen it; `Task.problems` returns these.

    `fields` are handed to the reward by name and never shown to the model.
    """

    prompt: str | tuple[Message, ...]  # text exactly as the model is to see it, or chat messages for its template
    fields: Mapping[str, Json] = field(default_factory=dict)  # what the reward needs, e.g. {"answer": "72"}
    demonstration: str | tuple[str, ...] | None = None  # a worked answer for a warm start; in an environment by turns
    seed: int | None = None  # of the world that an environment makes for it; another seed is another problem
    tools: tuple[Json, ...] = ()  # JSON schemas of what may be called, for the chat template


# what families write around thoughts
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class Prompt:
    """A tokenised question with the fields by which its reward grades an answer: what engines answer.

    Two prompts are the same if their `key` is, whatever their text and fields. All answers to one prompt meet the same
    world, whose seed is therefore part of its key.
    """

    task: str  # the name of the task that asked
    tokens: IntArray  # [P], P >= 1
    text: str = ""  # what the tokens were made from, chat template applied
    fields: Mapping[str, Json] = field(default_factory=dict)  # the problem's
    seed: int | None = None  # the problem's; None: there is no world, or only one
    earlier_turns: tuple[str, ...] = ()  # turns so far of an episode that continues from its middle (never stored)
    messages: tuple[Message, ...] | None = None  # the chat that it was made from, for rewards (never stored)
    thoughts: tuple[tuple[str, str], ...] = THOUGHTS  # what stands around thoughts in answers, which graders do not
    # read; empty: they do (never stored)

    @property
    def world(self) -> int:
        """Returns the seed of the world that answers meet."""
        return int(self.key[:7], 16) if self.seed is None else self.seed

    def answer_in(self, text: str) -> str:
        """Returns the part of a completion's text that follows its thoughts; empty where a thought has no end."""
        for begin, end in self.thoughts:
            _, has_end, text_behind = text.rpartition(end)
            if not has_end and self.text.rstrip().endswith(begin):
                return ""  # the prompt has begun a thought
            text = text_behind.partition(begin)[0]
        return text

    @cached_property
    def key(self) -> str:
        """Returns a digest of task, tokens and seed (16 hex digits), which unlike an index survives a new order."""
        digest = hashlib.blake2b(self.task.encode() + b"\0", digest_size=8)
        digest.update(np.ascontiguousarray(self.tokens, dtype="<i4").tobytes())
        if self.seed is not None:
            digest.update(b"seed %d" % self.seed)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion was drawn. Behaviour only: it never enters Trajectory Balance.

    In this order: the repetition penalty, the temperature, min-p, top-k, and top-p of what these leave.
    """

    temperature: float = 1.0  # logits are divided by it; 0 is greedy
    top_p: float = 1.0  # the smallest set of tokens with this much probability is sampled from; 1: all
    top_k: int = 0  # so many of the most probable tokens are sampled from; 0: all
    min_p: float = 0.0  # tokens with less than this share of the best one's probability are not sampled
    repetition_penalty: float = 1.0  # tokens of the prompt and of the answer so far have their logits divided by it if
    # they are positive, else multiplied; 1: no penalty

    @property
    def cuts(self) -> bool:
        """Returns whether only some of the tokens are drawn from."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def full_support(self) -> bool:
        """Returns whether every sequence keeps a chance above 0 (Trajectory Balance determines nothing elsewhere)."""
        return self.temperature > 0 and not self.cuts

    def __str__(self) -> str:
        penalty = self.repetition_penalty
        options = {"top-k": (self.top_k, 0), "min-p": (self.min_p, 0), "repetition penalty": (penalty, 1)}
        extras = "".join(f", {name} {value:g}" for name, (value, default) in options.items() if value != default)
        return f"T {self.temperature:g}, top-p {self.top_p:g}{extras}"


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # an EOS token, which is part of the completion
    STOP_STRING = "stop_string"
    LENGTH = "length"  # truncated: there is no EOS
    INTERRUPTED = "interrupted"  # generation was told to stop; never judged, counted as in flight
    EXTERNAL = "external"  # it came from elsewhere


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt, as an engine (or somebody else) gave it, before it is judged.

    Arrays are of the T completion tokens, in their order, without the prompt's. Log-probabilities are in nats. In an
    environment an answer has several turns, and between them what the environment said: observations, which are no
    tokens of the policy and whose mask is False.

    An episode may have several segments, one behind another: each reads only itself, its positions start at 0, and it
    opens with its own context, whose mask is False. The first segment reads the prompt, and is empty where the first
    of the others begins at 0.

    Raises `ValueError` for segments that do not begin in order, each with a token of context.
    """

    tokens: IntArray  # [T], T >= 1, EOS included when stop_reason is EOS; T = 0: it could not be written, is rejected
    text: str  # decoded, special tokens and a matched stop string removed
    stop_reason: StopReason  # eos, stop_string, length (truncated), interrupted, external
    versions: tuple[Version, Version]  # the first and the last weights that sampled it
    sampling: Sampling | None = None  # None: it came from elsewhere
    log_behavior: FloatArray | None = None  # [T] under the sampling distribution, renormalised after top-p
    mask: BoolArray | None = None  # [T] which tokens the policy sampled; None = all
    judgement: Judgement | None = None  # its environment's, which nobody else could give; None: a reward grades it
    begins: IntArray | None = None  # [S - 1] where each later one of S segments begins; None: there is one segment
    episode: EpisodeRecord | None = None  # of an agent that called a server; its reward reads it, and it is not stored

    def __post_init__(self) -> None:
        if self.begins is None:
            return
        places, length = np.asarray(self.begins).tolist(), len(self.tokens)
        is_ordered = all(a < b for a, b in pairwise([-1, *places, length]))
        mask = np.zeros(0) if self.mask is None else np.asarray(self.mask)
        if not places or not is_ordered or len(mask) != length or mask[places].any():
            raise ValueError(
                f"the later segments of a completion of {length} tokens begin at {quote(str(places))}, but they have "
                "to go up from 0 to below its length, each with a first token whose mask is False"
            )

    @cached_property
    def digest(self) -> str:
        """Returns a digest of the tokens (16 hex digits); completions of one prompt are *the same* if these agree."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.tokens, dtype="<i4").tobytes(), digest_size=8)
        if self.mask is not None:
            digest.update(np.packbits(self.mask).tobytes())
        if self.begins is not None:  # else as it was before there were segments
            digest.update(b"begins" + np.ascontiguousarray(self.begins, dtype="<i4").tobytes())
        return digest.hexdigest()

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Returns the (begin, end) of each segment, as places among the tokens."""
        places = [] if self.begins is None else self.begins.tolist()
        return list(pairwise(sorted({0, *places, len(self.tokens)})))

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Returns the (begin, end) of each turn of the policy, as places among the tokens."""
        if self.mask is None:
            return [(0, len(self.tokens))]
        steps = np.diff(self.mask.astype(np.int8), prepend=0, append=0)
        return list(zip(np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist(), strict=True))

    @property
    def observed(self) -> int:
        """Returns how many of the tokens are observations."""
        return 0 if self.mask is None else len(self.mask) - int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class EpisodeRecord:
    """Holds what is known of an agent's episode besides its tokens."""

    messages: tuple[Message, ...]  # its longest conversation, answers included
    artifact: Json = None  # what the agent handed in at the end
    provenance: Mapping[str, Json] = field(default_factory=dict)  # goes to the trajectory's


@dataclass(frozen=True, slots=True)
class Judgement:
    """Holds what a reward says of one completion: the number, and its parts.

    Objectives see `reward` alone; parts are recorded for people.
    """

    reward: float  # r(x, y), higher is better; beta is in its units
    parts: Mapping[str, float] = field(default_factory=dict)  # what it was made of, by name, unweighted

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_brief(value)}" for name, value in self.parts.items())
        return _brief(self.reward) + (f" ({parts})" if parts else "")


def _brief(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # an int, which may have any number of digits
        return "an integer of more than 300 digits"


def copies_for_reward(answers: Sequence[tuple[Prompt, Completion]]) -> list[tuple[Prompt, Completion]]:
    """Returns answers with copies of all that a reward's `judge` could change, so that other calls see no changes."""
    return [(_copy_of_prompt(prompt), _copy_of_completion(completion)) for prompt, completion in answers]


def _copy_of_prompt(prompt: Prompt) -> Prompt:
    messages = None if prompt.messages is None else tuple(deep_copy(dict(message)) for message in prompt.messages)
    return replace(prompt, tokens=prompt.tokens.copy(), fields=deep_copy(dict(prompt.fields)), messages=messages)


def _copy_of_completion(completion: Completion) -> Completion:
    log_behavior, mask, judgement = completion.log_behavior, completion.mask, completion.judgement
    begins = completion.begins
    return replace(
        completion,
        tokens=completion.tokens.copy(),
        log_behavior=None if log_behavior is None else log_behavior.copy(),
        mask=None if mask is None else mask.copy(),
        judgement=None if judgement is None else replace(judgement, parts=dict(judgement.parts)),
        begins=None if begins is None else begins.copy(),
    )


@dataclass(frozen=True, slots=True)
class TopScores:
    """Holds a teacher's log-probabilities of an answer's T tokens, and the K tokens that it finds most probable at each
    of the M places where the policy sampled.
    """

    log_T: FloatArray  # float32, of the answer's tokens; 0 where the policy did not sample
    ids_MK: npt.NDArray[Any]  # uint16 where the vocabulary allows it, else int32
    logs_MC: npt.NDArray[np.float16]  # [M, K + 1] of these tokens, and of all others together; -inf: there is none


TokenScores: TypeAlias = FloatArray | TopScores  # of an answer, by one model


def are_finite(scores: TokenScores) -> bool:
    """Returns whether an answer can be trained on with these scores."""
    if isinstance(scores, TopScores):
        return bool(np.isfinite(scores.log_T).all()) and not np.isnan(scores.logs_MC).any()
    return bool(np.isfinite(scores).all())


def teacher_arrays(scores: Sequence[TokenScores]) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays of a trajectory, from its answer's scores under each teacher."""
    if scores and isinstance(scores[0], TopScores):  # it is the only one
        return {TEACHER: scores[0].log_T[None], TOP_IDS: scores[0].ids_MK, TOP_LOGS: scores[0].logs_MC}
    return {TEACHER: np.stack([np.asarray(log_T) for log_T in scores])} if scores else {}


@dataclass(frozen=True)
class Trajectory:
    """A completion that has been judged: what searchers send to the replay buffer and trainers learn from.

    Complete in itself: it can be stored, printed and trained on without anything else. `log_reference` has the length
    of the completion, T, and is in nats.
    """

    uid: str  # unique in a run; the idempotency key of the journal
    prompt: Prompt
    completion: Completion
    reward: float  # r(x, y), computed by this run, never taken from outside
    log_reference: FloatArray  # [T], log pi_ref of each token, at the recipe's policy_temperature
    reference: Version  # which reference policy gave log_reference
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # the judgement's parts
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)  # step boundaries, `TEACHER`, ...
    provenance: Mapping[str, Json] = field(default_factory=dict)  # {"searcher": "searcher-0", "round": 3}
    created: float = 0.0  # seconds since the epoch, when it was sent

    @property
    def version(self) -> Version:
        """Returns the oldest weights that sampled a part of the completion."""
        return self.completion.versions[0]

    @property
    def imported(self) -> bool:
        """Returns whether no weights of this run sampled it, so that its lag behind the trainer means nothing."""
        return self.version == ELSEWHERE

    @property
    def has_reference(self) -> bool:
        """Returns whether the reference scored it; where teachers are the whole target, zeros stand for its scores."""
        return TEACHER not in self.arrays or bool(np.any(self.log_reference))

    @property
    def length(self) -> int:
        """Returns the number of completion tokens, the unit of the token ledger."""
        return len(self.completion.tokens)


@dataclass(frozen=True)
class Group:
    """Trajectories of one prompt under one reference: the unit of sampling, of baselines and of log Z.

    Raises `ValueError` when it is empty, or when two prompts or two references meet in it.
    """

    trajectories: tuple[Trajectory, ...]  # K of them, in no particular order
    as_sampled: bool = True  # what an answer says had no part in its being here: neither its reward, nor an equal one

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise ValueError("a group needs at least one trajectory")
        for t in self.trajectories[1:]:
            if t.prompt.key != self.prompt.key:
                raise ValueError(f"a group has one prompt, but got {self.prompt.key} and {t.prompt.key}")
            if t.reference != self.reference:
                raise ValueError(f"a group has one reference, but got {self.reference} and {t.reference}")

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Group:
        """Returns a group of any sequence of trajectories."""
        return cls(tuple(trajectories))

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def prompt(self) -> Prompt:
        return self.trajectories[0].prompt

    @property
    def reference(self) -> Version:
        return self.trajectories[0].reference


@dataclass(frozen=True)
class Score:
    """The log-probabilities of one trajectory under a later reference."""

    uid: str
    reference: Version
    log_reference: FloatArray  # [T], at the recipe's policy_temperature


Outcome: TypeAlias = tuple[int, float, float]  # of a leased prompt's answers: its position, successes, failures


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One measured figure of one version on the held-out split.

    Shares (accuracy, pass@k) are in 0..1; what the held-out problems are, the recipe's task says.
    """

    version: Version  # the weights that were measured
    wall_seconds: float  # since the run began
    metric: str  # pass@1/greedy, pass@1/sampled, pass@8/sampled, ...
    value: float  # the mean over problems
    n: int  # problems
    seconds: float = 0.0  # time it took (reported apart from generation)
    tokens: int = 0  # tokens it generated (reported apart from generation)
