"""A teacher on a server: an OpenAI-compatible endpoint that gives the log-probabilities of tokens it is sent.

Invariant: tokens are sent, never texts, so that what is scored is what was said. A score that came is stored
beside the answer by whoever asked, and not asked for again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from tba.errors import SeveralSegments, UserError
from tba.fields import as_declared
from tba.json_input import check_json
from tba.models.huggingface import HuggingFace
from tba.protocols import GradingCalls, Task, Work
from tba.rewards.endpoint import Endpoint, EndpointClient
from tba.rewards.threads import run_in_threads
from tba.types import Completion, Json, Prompt, TokenScores, TopScores, Version

MIN_LOG_PROBABILITY = -1e5  # of a token, in nats: servers write -9999 where they mean none at all
_LEAST_REST = 1e-9  # probability of all tokens that a server does not name; rounded, the others can sum up to 1
_ROUNDING = 1e-3  # by which a log-probability in half precision may be above 0


@dataclass(frozen=True)
@as_declared
class EndpointTeacher:
    """A teacher behind an OpenAI-compatible endpoint whose `completions` take token ids and score them, as vLLM's do.

    Give it to `Teacher(models=...)`. Its tokenizer is read here; the weights are not.
    """

    endpoint: Endpoint = field(default_factory=Endpoint)  # where it is; its `concurrency` and sampling have no effect
    path: str = ""  # its tokenizer: a folder, or a name on the Hub
    scores: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"  # what asks for the scores: of vLLM; of others
    positions: int | None = None  # tokens of a prompt and its answer that the server takes; None: any number
    concurrency: int = 8  # simultaneous calls of one searcher
    deadline: float = 600.0  # seconds for all answers of a round

    def __post_init__(self) -> None:
        if self.concurrency < 1 or not self.deadline > 0:
            raise UserError(
                f"the teacher's concurrency is {self.concurrency} and its deadline {self.deadline}: give 1 or more "
                "calls at once, and seconds above 0"
            )

    def prepared(self, task: Task, log: Callable[[str], None] = lambda line: None) -> EndpointTeacher:
        """Returns itself: there is nothing to make. Raises `UserError` without a tokenizer."""
        if not self.path:
            raise UserError("a teacher behind an endpoint needs path, its tokenizer: give a folder or a Hub name")
        EndpointClient(self.endpoint)  # says what it lacks
        return self

    def tokenizer(self) -> Any:
        """Returns the teacher's own tokenizer. Raises `UserError` when it cannot be loaded."""
        return HuggingFace(self.path).tokenizer()

    def memory(self, work: Work) -> None:
        """Returns nothing: the server has its own memory."""

    def reference(self, temperature: float, version: Version) -> EndpointReference:
        """Returns what asks the server; no call is made yet. Raises `UserError` for a policy temperature other than 1,
        at which servers do not score.
        """
        if temperature != 1:
            raise UserError(
                f"--policy-temperature is {temperature}, but a teacher behind an endpoint scores at temperature 1: set "
                "it to 1"
            )
        return EndpointReference(self, version)


class EndpointReference:
    """Log-probabilities of answers under a model that a server runs."""

    def __init__(self, settings: EndpointTeacher, version: Version, top: int = 0, below: int | None = None) -> None:
        self.version = version
        self._top, self._below = top, below
        self._settings = settings
        self._client = EndpointClient(replace(settings.endpoint, api="completions", concurrency=settings.concurrency))
        scores = {"echo": True, "logprobs": 1} if settings.scores == "echo" else {"prompt_logprobs": max(1, top)}
        self._request_fields = {"model": settings.endpoint.model, "max_tokens": 1, "temperature": 0} | scores

    def with_top(self, count: int, below: int | None = None) -> EndpointReference:
        """Returns a scorer by the same server that also gives its `count` most probable tokens at each place, or as
        many as it gives, of those with numbers `below` a bound (None: of all). Raises `UserError` for the `echo` kind,
        which names no tokens.
        """
        if self._settings.scores == "echo":
            raise UserError(
                f"--teacher.top is {count}, but the teacher's scores are of the kind echo, which names no top "
                "tokens: take a server with `prompt_logprobs`, such as vLLM's"
            )
        return EndpointReference(self._settings, self.version, count, below)

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[TokenScores]]:
        """Score completions of several prompts, each by one call: [i][j] is of the i-th prompt's j-th completion,
        float32 [T], 0 where the policy did not sample; with top tokens `TopScores`.

        Raises `UserError` for a refusal and for an episode of several segments, `Refused` when no call succeeds,
        `DeadlineExceeded` when it takes too long.
        """
        pairs = [(prompt, completion) for prompt, completions in answered for completion in completions]
        calls = [partial(self._score, *pair) for pair in pairs]
        if not calls:
            return [[] for _ in answered]
        settings, description = self._settings, str(self._client)
        rows = iter(run_in_threads(calls, settings.concurrency, settings.deadline, lambda _: description, "`deadline`"))
        return [[next(rows) for _ in completions] for _, completions in answered]

    @property
    def scoring(self) -> GradingCalls:
        """Returns that each answer is scored by its own call, which searchers make beside those of the reward."""
        return GradingCalls(str(self._client), self._scores, "answer", self._settings.concurrency, copies=False)

    def _scores(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[TokenScores]:
        return [self._score(prompt, completion) for prompt, completion in answered]

    def load(self, weights: Mapping[str, Any], version: Version) -> None:
        """Raises `UserError`: the server's weights are its own."""
        raise UserError(f"{self._client} cannot be given weights: a reference that is reset has to be a model here")

    def load_first(self) -> None:
        """Do nothing: the server's weights are the first and only ones."""

    def _score(self, prompt: Prompt, completion: Completion) -> TokenScores:
        if completion.begins is not None:
            raise SeveralSegments(len(completion.segments), "a teacher behind an endpoint scores")
        tokens = [*prompt.tokens.tolist(), *completion.tokens.tolist()]
        if self._settings.positions is not None and len(tokens) >= self._settings.positions:
            return self._unscorable(completion)
        reply = self._client.ask({**self._request_fields, "prompt": tokens})
        try:
            check_json(reply, {"choices": list[dict[str, Any]]}, "it")
            choice = reply["choices"][0]
            if self._settings.scores == "echo":
                scores = choice["logprobs"]["token_logprobs"][: len(tokens)]
            else:
                entries = zip(tokens, choice["prompt_logprobs"], strict=True)
                scores = [None if entry is None else entry[str(token)]["logprob"] for token, entry in entries]
            logs = np.array(list(map(_log_probability, scores[len(prompt.tokens) :])), np.float32)
            places = [t for t in range(len(completion.tokens)) if completion.mask is None or completion.mask[t]]
            if self._top:
                named = [choice["prompt_logprobs"][len(prompt.tokens) + t] for t in places]
                top = [_top_tokens(entry, self._top, self._below) for entry in named]
        except (ValueError, KeyError, TypeError, IndexError):
            logs = np.zeros(0, np.float32)
        if len(logs) != len(completion.tokens):
            raise UserError(
                f"{self._client} does not give the log-probabilities of the tokens it was sent "
                f"({self._settings.scores}; each a number from {MIN_LOG_PROBABILITY:,.0f} to 0): take a server that "
                "does, such as vLLM's, or another `scores`"
            )
        log_T = logs if completion.mask is None else np.where(completion.mask, logs, np.float32(0))
        if not self._top:
            return log_T
        ids, top_logs = zip(*top, strict=True) if top else ((), ())
        ids_MK = np.array(ids, np.int32).reshape(-1, self._top)
        return TopScores(log_T, ids_MK, np.array(top_logs, np.float16).reshape(-1, self._top + 1))

    def _unscorable(self, completion: Completion) -> TokenScores:
        """Returns scores that are no numbers, with which an answer is rejected and counted."""
        log_T = np.full(len(completion.tokens), np.nan, np.float32)
        if not self._top:
            return log_T
        places = len(log_T) - completion.observed
        return TopScores(log_T, np.zeros((places, self._top), np.int32), np.zeros((places, self._top + 1), np.float16))


def _top_tokens(entry: Mapping[str, Any], count: int, below: int | None) -> tuple[list[int], list[float]]:
    """Returns the `count` most probable tokens of a place, their log-probabilities and that of all others. Where the
    server gives fewer, the first stands again for each that is missing, with -inf. Raises `ValueError` or `KeyError`
    for what no server gives.
    """
    scores = {int(token): _log_probability(score["logprob"]) for token, score in entry.items()}
    known_ids = [token for token in scores if below is None or 0 <= token < below]
    ids = sorted(known_ids, key=lambda token: -scores[token])[:count]
    logs = [scores[token] for token in ids]
    log_rest = math.log(max(1 - sum(map(math.exp, logs)), _LEAST_REST))
    missing = count - len(ids)
    return ids + ids[:1] * missing, [*logs, *[-math.inf] * missing, log_rest]


def _log_probability(score: Json) -> float:
    """Returns a score that can be the log-probability of a token, or is not finite, and rejected later. Raises
    `ValueError` for any other.
    """
    if type(score) not in (int, float) or score > _ROUNDING or -math.inf < score < MIN_LOG_PROBABILITY:
        raise ValueError("no log-probability of a token")
    return float(min(score, 0.0))
