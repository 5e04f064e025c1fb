"""Episodes of agents behind an HTTP server: who may call, what each call goes on from, and what an episode was worth.

It runs in the event loop of the server's thread. The searcher's thread samples (`engine.py`), grades and sends.

Invariant: each call belongs to the episode whose key it carries; nothing is guessed. An episode ends once: by its
agent, for want of calls, or with the run. Rewards are computed by the run; a claimed one is recorded as claimed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tba.imported_answers.report import Report
from tba.protocols import ShowsFields, Task, TurnLimits
from tba.rollout.searcher import OpenAnswer
from tba.serving.chat import BASE, POLICY, AnswerMessage, ChatAnswer, ChatRequest, RequestRefused
from tba.serving.engine import (
    EndedEpisode,
    Mailbox,
    NoMoreEpisodes,
    SampleRequest,
    SearcherWork,
    Seat,
    SeatRequest,
    run_ended,
)
from tba.serving.episode import AgentCall, ConversationEncoder, ConversationTree, SampledAnswer
from tba.serving.judging import EpisodeJudge
from tba.types import Completion, EpisodeRecord, Json, Prompt, Sampling
from tba.user_code import problems_of

T = TypeVar("T")
MOST_ROLLOUTS = 256  # of one request: the engine stands still while they are graded and scored
_SWEEP_SECONDS = 1.0  # between two looks for episodes without calls
_ENDED_KEPT = 4096  # episodes that ended, which are remembered
_TAG_CHARACTERS = 4096  # of a tag, which is stored with the episode


@dataclass(frozen=True)
class ServingLimits:
    """Limits what agents may ask of a server."""

    max_tokens: int  # of the completion that an episode makes, contexts of further conversations included
    max_calls: int = 256  # of an episode
    episodes_per_token: int = 256  # that are open or wait to begin at once, of one token
    calls_per_token: int = 256  # that wait for their answers at once
    idle_seconds: float = 600.0  # without a call, after which an episode is ended
    answer_seconds: float = 1800.0  # that a call may wait for its answer
    seat_seconds: float = 120.0  # that a new episode may wait until the run wants one
    reward_seconds: float = 600.0  # that the end of an episode may wait for its reward


@dataclass(eq=False)
class ServedEpisode:
    """An episode of an agent: its problem, its calls, and what is known of its end."""

    id: str
    owner: str  # the name of the token that began it
    seat: Seat
    tree: ConversationTree
    tag: Json = None
    used_at: float = field(default_factory=time.monotonic)
    tokens_read: int = 0  # that no parked row had read before
    base_calls: int = 0  # of the model as it was before training
    waiting: int = 0  # requests that wait for answers, with the retries that wait for the same
    overrides: Counter[str] = field(default_factory=Counter)  # fields of requests that the run has decided
    answers: dict[str, asyncio.Task[tuple[AgentCall, ChatAnswer]]] = field(default_factory=dict)  # by the body's digest
    samples: dict[AgentCall, SampleRequest] = field(default_factory=dict)  # of calls that are not answered
    end: asyncio.Future[Json] | None = None  # its result; None: it goes on

    @property
    def calls_made(self) -> int:
        return len(self.tree.calls) + self.base_calls


@dataclass(frozen=True)
class PastEpisode:
    """Holds what is remembered of an episode that has ended."""

    owner: str
    end: asyncio.Future[Json] | None  # its result; None: it was abandoned


class EpisodeServer:
    """The open episodes of a server, in the name of which agents call."""

    def __init__(
        self,
        mailbox: Mailbox,
        tokenizer: Any,
        task: Task,
        prompts: Sequence[Prompt],
        limits: ServingLimits,
        weights: Callable[[], str],
        sampling: Sampling | None = None,
        judge: EpisodeJudge | None = None,
        import_rollouts: Callable[[Sequence[Json], str], Report] | None = None,
    ) -> None:
        """prompts: the task's, for training. weights: returns the version that answers now. judge: where environments
        judge episodes. import_rollouts: takes episodes that others have played, under the name of their source; it is
        called in the searcher's thread.
        """
        self._sampling, self._import_rollouts = sampling or Sampling(), import_rollouts
        self._judge = judge
        self.mailbox, self.limits, self.weights = mailbox, limits, weights
        self.tools = problems_of(task, "train")[0].tools  # one set for all problems of a task
        self.shown_fields = task.shown_fields if isinstance(task, ShowsFields) else ()
        self.prompts = {prompt.key: prompt for prompt in prompts}
        self.instance = secrets.token_hex(4)  # begins the keys of this server's episodes
        self.counts: Counter[str] = Counter()
        self.new_segments: Counter[str] = Counter()  # conversations that went on from no answer, by the reason
        self._tokenizer, self._encoder = tokenizer, ConversationEncoder(tokenizer)
        self._episodes: dict[str, ServedEpisode] = {}
        self._ended: dict[str, PastEpisode] = {}
        self._waiting_to_begin: Counter[str] = Counter()  # by owner
        self._importing_owners: set[str] = set()  # whose rollouts are being taken
        self._rewards: dict[int, tuple[Completion, asyncio.Future[Json]]] = {}  # by the identity of the completion
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle_since = time.monotonic()
        self._has_open_groups = False  # prompts that some agents have answered, and perhaps not all

    # Episodes

    async def begin(self, owner: str, key: str | None, tag: Json) -> ServedEpisode:
        """Returns a new episode: of the prompt with this key, or of the next one of the run's order. Raises
        `RequestRefused`.
        """
        open_count = sum(episode.owner == owner for episode in self._episodes.values())
        if open_count + self._waiting_to_begin[owner] >= self.limits.episodes_per_token:
            raise RequestRefused(
                429, f"{self.limits.episodes_per_token} episodes of this token are open: end one first", "rate_limit"
            )
        if key is not None and key not in self.prompts:
            raise RequestRefused(
                404, f"the run has no training prompt with the key {key!r:.40}: GET /prompts lists keys", "no_prompt"
            )
        if (length := len(json.dumps(tag))) > _TAG_CHARACTERS:
            raise RequestRefused(400, f"tag has {length:,} characters of JSON: give at most {_TAG_CHARACTERS:,}", "tag")
        self._waiting_to_begin[owner] += 1
        try:
            seat = await self._seat(None if key is None else self.prompts[key])
        finally:
            self._waiting_to_begin[owner] -= 1
        tree = ConversationTree(seat.prompt, self._encoder, self.limits.max_tokens, self._sampling)
        episode = ServedEpisode(f"{self.instance}{secrets.token_hex(14)}", owner, seat, tree, tag)
        self._episodes[episode.id] = episode
        self._has_open_groups |= not seat.is_chosen
        self.counts["episodes"] += 1
        return episode

    async def _seat(self, prompt: Prompt | None) -> Seat:
        """Returns a seat of a prompt, or of the next one. Raises `RequestRefused` where the run wants no episode."""
        request = SeatRequest(prompt, Future())
        self.mailbox.post(request)
        try:
            return await _result_within(request.future, self.limits.seat_seconds)
        except TimeoutError:
            raise RequestRefused(
                503, f"the run wanted no further episode for {self.limits.seat_seconds:g} s: try again", "no_seat"
            ) from None

    def has_episode(self, id_: str) -> bool:
        """Returns whether an episode with this id is open or has ended."""
        return id_ in self._episodes or id_ in self._ended

    def past_episode(self, id_: str) -> PastEpisode | None:
        """Returns what is remembered of an episode that has ended; None where none of this id has."""
        return self._ended.get(id_)

    def episode(self, id_: str) -> ServedEpisode:
        """Returns the open episode with this id. Raises `RequestRefused` for one that is over, or of nobody."""
        if (episode := self._episodes.get(id_)) is not None:
            return episode
        if id_ in self._ended:
            raise _episode_ended()
        if len(id_) == 36 and not id_.startswith(self.instance):
            raise RequestRefused(410, "the episode was lost when its server ended: begin another one", "episode_lost")
        raise RequestRefused(401, "the key is of no episode: give the api_key that POST /episodes returned", "no_key")

    async def end(
        self, episode: ServedEpisode | PastEpisode, artifact: Json = None, claimed_reward: Json = None
    ) -> Json:
        """Returns the reward of an episode, once it is on the disk; a repeated call waits for the same."""
        if episode.end is None:
            episode = self._open(episode)
            episode.end = asyncio.ensure_future(self._end(episode, artifact, claimed_reward))
            episode.end.add_done_callback(_retrieve_error)
        assert episode.end is not None
        return await asyncio.shield(episode.end)

    async def abandon(self, episode: ServedEpisode | PastEpisode) -> None:
        """End an episode without a reward: another one takes its place. Raises `RequestRefused` where it has ended."""
        if episode.end is not None:
            raise _episode_ended()
        if not isinstance(episode, PastEpisode):
            self._close(self._open(episode), None)
            self.counts["abandoned episodes"] += 1

    def _open(self, episode: ServedEpisode | PastEpisode) -> ServedEpisode:
        """Returns the episode. Raises `RequestRefused` where it has ended, perhaps while a body was read."""
        if isinstance(episode, PastEpisode) or episode.id not in self._episodes:
            raise _episode_ended()
        return episode

    async def _end(self, episode: ServedEpisode, artifact: Json, claimed_reward: Json) -> Json:
        completion = episode.tree.completion()
        if completion is None:
            self._close(episode, None)
            return {"reward": None, "parts": {}, "on_disk": False, "reason": "none of its calls was answered"}
        record = EpisodeRecord(episode.tree.transcript(), artifact, self._provenance(episode, claimed_reward))
        completion, refusal = replace(completion, episode=record), ""
        if self._judge is not None:
            completion, refusal = await self._judge.judge(episode.seat.prompt, completion)
        reward: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._rewards[id(completion)] = completion, reward
        self._close(episode, completion)
        try:
            async with asyncio.timeout(self.limits.reward_seconds):
                result: Json = await reward
                return {**result, "reason": refusal} if refusal else result
        except TimeoutError:
            raise RequestRefused(
                504, f"the reward was not there within {self.limits.reward_seconds:g} s; the answer is not lost"
            ) from None
        finally:
            self._rewards.pop(id(completion), None)

    def describe(self, prompt: Prompt) -> dict[str, Json]:
        """Returns what an agent is shown of a prompt: what the model is told, its tools, and the fields that its task
        shows. The others are for the reward alone.
        """
        messages = prompt.text if prompt.messages is None else list(prompt.messages)
        fields = {name: prompt.fields[name] for name in self.shown_fields if name in prompt.fields}
        return {"problem": prompt.key, "prompt": messages, "tools": list(self.tools), "fields": fields}

    def _provenance(self, episode: ServedEpisode, claimed_reward: Json) -> dict[str, Json]:
        provenance: dict[str, Json] = {"agent": episode.owner, "calls": len(episode.tree.delivered_calls)}
        provenance["tokens_read"] = episode.tokens_read
        if episode.tree.new_segments:
            provenance["new_segments"] = dict(episode.tree.new_segments)
        if episode.tree.undelivered_count:
            provenance["undelivered"] = episode.tree.undelivered_count
        if episode.tag is not None:
            provenance["tag"] = episode.tag
        if claimed_reward is not None:
            provenance["claimed_reward"] = claimed_reward
        return provenance

    def _close(self, episode: ServedEpisode, completion: Completion | None) -> None:
        """Give an episode's seat back to the searcher."""
        del self._episodes[episode.id]
        self._ended[episode.id] = PastEpisode(episode.owner, episode.end)
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        if not episode.seat.is_chosen:
            self._idle_since = time.monotonic()
        self.new_segments.update(episode.tree.new_segments)
        self.counts.update({f"{name} overridden": count for name, count in episode.overrides.items()})
        self.counts["answers"] += len(episode.tree.delivered_calls)
        self.counts["answers that nobody received"] += episode.tree.undelivered_count
        if completion is None:
            answers = [call.answer for call in episode.tree.calls if call.answer is not None]
            self.counts["tokens of episodes without a row"] += sum(len(answer.tokens) for answer in answers)
        self.counts["episodes of one segment"] += completion is not None and completion.begins is None
        parked = [call.answer.request for call in episode.tree.calls if call.answer is not None]
        requests = [request for request in parked if request is not None]
        self.mailbox.post(EndedEpisode(episode.seat, completion, requests, list(episode.samples.values())))

    async def take_rollouts(self, owner: str, rollouts: Json) -> Json:
        """Returns what became of episodes that were played elsewhere, whose lines are as in a file of `tba import`."""
        if not isinstance(rollouts, list) or not 1 <= len(rollouts) <= MOST_ROLLOUTS:
            raise RequestRefused(400, f"the body is no list of 1 to {MOST_ROLLOUTS} rollouts: send them in parts")
        if self._import_rollouts is None:
            raise RequestRefused(404, "this server takes no rollouts: use `tba import`")
        if owner in self._importing_owners:
            raise RequestRefused(429, "rollouts of this token are being taken: send these after them", "rate_limit")
        work = SearcherWork(partial(self._import_rollouts, rollouts, f"rollouts:{owner}"), Future())
        self._importing_owners.add(owner)
        try:
            self.mailbox.post(work)
            async with asyncio.timeout(self.limits.reward_seconds):
                report: Report = await asyncio.wrap_future(work.future)
        except TimeoutError:
            raise RequestRefused(
                504, f"the rollouts were not graded within {self.limits.reward_seconds:g} s: send fewer at once"
            ) from None
        finally:
            self._importing_owners.discard(owner)
        self.counts["rollouts"] += report.imported
        self.counts["rejected rollouts"] += report.refused
        return report.to_json()

    # Calls

    def begin_call(
        self, episode: ServedEpisode, request: ChatRequest, body: bytes, is_retry: bool
    ) -> asyncio.Task[tuple[AgentCall, ChatAnswer]]:
        """Returns the task that answers a call; a retry of a call joins it. Raises `RequestRefused`."""
        episode.used_at = time.monotonic()
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        if is_retry and (task := episode.answers.get(digest)) is not None and not _has_failed(task):
            if not task.done():
                self._require_quota(episode.owner)
                _count_waiting(episode, task)
            self.counts["retries"] += 1
            return task
        if self._open(episode).end is not None:
            raise _episode_ended()
        if request.model not in ("", POLICY, BASE):
            self.counts["calls under another model's name"] += 1
        if episode.calls_made >= self.limits.max_calls:
            raise RequestRefused(
                400, f"the episode has made its {self.limits.max_calls} calls: end it", "context_length_exceeded"
            )
        self._require_quota(episode.owner)
        if request.model == BASE:
            call = AgentCall(None, self._encoder.whole(request.messages, request.tools), (), "")
            episode.base_calls += 1
        else:
            call = episode.tree.begin_call(request)
        episode.overrides.update(request.overrides.keys())
        episode.answers[digest] = task = asyncio.ensure_future(self._answer(episode, call, request))
        task.add_done_callback(_retrieve_error)
        _count_waiting(episode, task)
        return task

    def _require_quota(self, owner: str) -> None:
        """Raises `RequestRefused` where as many requests of a token wait for answers as may."""
        waiting_count = sum(episode.waiting for episode in self._episodes.values() if episode.owner == owner)
        if waiting_count >= self.limits.calls_per_token:
            raise RequestRefused(
                429, f"{self.limits.calls_per_token} calls of this token wait for their answers: wait too", "rate_limit"
            )

    def count_tokens(self, episode: ServedEpisode, request: ChatRequest) -> int:
        """Returns how many tokens the messages of a request are as a prompt. Raises `RequestRefused`."""
        self._open(episode).used_at = time.monotonic()
        return len(self._encoder.whole(request.messages, request.tools))

    async def _answer(
        self, episode: ServedEpisode, call: AgentCall, request: ChatRequest
    ) -> tuple[AgentCall, ChatAnswer]:
        tokens, is_base = call.tokens(), request.model == BASE
        parent = None if call.parent is None else call.parent.answer
        is_tip = call.parent is None or call.parent.children[0] is call
        limits = TurnLimits(request.max_tokens if is_base else call.reserved, request.stop_strings)
        sample = SampleRequest(
            seat=episode.seat,
            prompt=Prompt(episode.seat.prompt.task, tokens),
            new_tokens=call.read,
            limits=limits,
            future=Future(),
            parked=parent.request if parent is not None and is_tip else None,
            is_base=is_base,
        )
        episode.samples[call] = sample
        self.counts["calls of the base" if is_base else "calls"] += 1
        try:
            self._open(episode)  # it may have ended since the call was accepted
            self.mailbox.post(sample)
            answer = await _result_within(sample.future, self.limits.answer_seconds)
        except BaseException as error:
            if not is_base:
                episode.tree.drop_call(call)
            if episode.id not in self._episodes:
                raise _episode_ended() from None
            if isinstance(error, TimeoutError):
                raise RequestRefused(504, f"no answer within {self.limits.answer_seconds:g} s") from None
            raise
        finally:
            del episode.samples[call]
        text = self._encoder.writer(request.tools).encoder.turn_text(answer.tokens.tolist(), answer.text)
        message = AnswerMessage.of(text, bool(request.tools))
        episode.used_at = time.monotonic()
        if is_base:
            self.counts["tokens of the base"] += len(answer.tokens)
        else:
            episode.tree.answer_call(call, answer, message)
            self.counts["tokens read"] += answer.tokens_read
            episode.tokens_read += answer.tokens_read
        chat_answer = ChatAnswer(
            model=BASE if is_base else POLICY,
            answer=message,
            stop_reason=answer.stop_reason,
            prompt_tokens=len(tokens),
            cached_tokens=len(tokens) - answer.tokens_read,
            completion_tokens=len(answer.tokens),
            logprobs=self._logprobs(answer) if request.has_logprobs else None,
        )
        return call, chat_answer

    def _logprobs(self, answer: SampledAnswer) -> Json:
        """Returns the log-probability of each token, as OpenAI's API writes them."""
        entries = []
        for token, log_probability in zip(answer.tokens.tolist(), answer.log_behavior.tolist(), strict=True):
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            entry = {"token": text, "logprob": log_probability, "bytes": list(text.encode(errors="replace"))}
            entries.append({**entry, "top_logprobs": []})
        return {"content": entries, "refusal": None}

    # The searcher's news, and the passing of time

    def note_done(self, answer: OpenAnswer) -> None:
        """Tell the agent of an answer that it is on the disk, or rejected. The searcher's thread calls this."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._resolve, answer)

    def _resolve(self, answer: OpenAnswer) -> None:
        _, future = self._rewards.get(id(answer.completion), (None, None))
        if future is None or future.done():
            return
        if answer.trajectory is None:
            judgement = None if answer.grade is None else answer.grade.judgement
            reward = None if judgement is None or not np.isfinite(judgement.reward) else judgement.reward
            future.set_result({"reward": reward, "parts": {}, "on_disk": False, "reason": "the answer was rejected"})
        else:
            trajectory = answer.trajectory
            parts = dict(trajectory.reward_parts)
            future.set_result({"reward": trajectory.reward, "parts": parts, "on_disk": True, "uid": trajectory.uid})

    async def sweep(self) -> None:
        """End episodes that are not called any more, for as long as the server runs."""
        self._loop = asyncio.get_running_loop()
        while True:  # ends with the server's event loop
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for episode in list(self._episodes.values()):
                if not episode.waiting and episode.end is None and now - episode.used_at > self.limits.idle_seconds:
                    self.counts["idle episodes"] += 1
                    episode.end = asyncio.ensure_future(self._end(episode, None, None))
                    episode.end.add_done_callback(_retrieve_error)
            if any(not episode.seat.is_chosen for episode in self._episodes.values()):
                continue
            if self._has_open_groups and now - self._idle_since > self.limits.idle_seconds:
                with suppress(RequestRefused):  # the run has ended
                    self.mailbox.post(NoMoreEpisodes())
                self._has_open_groups = False

    def close(self) -> None:
        """Refuse all that waits, because the run has ended. Any thread may call this."""
        self.mailbox.close()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._refuse_rewards)

    def _refuse_rewards(self) -> None:
        for _, future in self._rewards.values():
            if not future.done():
                future.set_exception(run_ended())

    @property
    def figures(self) -> Mapping[str, int]:
        """Returns what was served, for people."""
        segments = {f"new segment: {reason}": count for reason, count in self.new_segments.items()}
        return {name: count for name, count in ({**self.counts, **segments}).items() if count}


async def _result_within(future: Future[T], seconds: float) -> T:
    """Returns the result of a future that the searcher's thread gives. Raises `TimeoutError` only where nobody has
    begun to give it: what is given is never dropped.
    """
    waiting = asyncio.wrap_future(future)
    await asyncio.wait([waiting], timeout=seconds)
    if not future.done() and future.cancel():
        raise TimeoutError
    return await waiting


def _episode_ended() -> RequestRefused:
    return RequestRefused(410, "the episode has ended: begin another one", "episode_ended")


def _count_waiting(episode: ServedEpisode, task: asyncio.Future[Any]) -> None:
    """Count one more request that waits, until the task is done."""

    def forget(_: object) -> None:
        episode.waiting -= 1

    episode.waiting += 1
    task.add_done_callback(forget)


def _has_failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _retrieve_error(task: asyncio.Future[Any]) -> None:
    """Take the error of a task that nobody may be waiting for, which asyncio would log."""
    if not task.cancelled():
        task.exception()
