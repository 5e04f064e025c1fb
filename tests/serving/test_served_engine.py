"""Agents' calls through the engine: whatever an agent does with its conversations, the completion of its episode has
the tokens that were sampled, each after the tokens that it was sampled after.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from serving.chat_llama import chat_llama
from tba.generation import generate
from tba.models import memory
from tba.models.huggingface import HuggingFace
from tba.policy.lora import LoraSettings
from tba.rollout.prompts import PromptSettings, encode
from tba.rollout.searcher import OpenAnswer, OpenGroup
from tba.serving.chat import BASE, POLICY, ChatAnswer, RequestRefused, parse_chat_request
from tba.serving.engine import AgentLink, Mailbox, SearcherWork
from tba.serving.server import EpisodeServer, ServedEpisode, ServingLimits, _result_within
from tba.types import Completion, Problem, Prompt, Sampling, StopReason, Trajectory, Version

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "number", "description": "a"}}},
    },
}


@dataclass
class Adding:
    """A task of chats."""

    name: str = "adding"
    shown_fields: tuple[str, ...] = ("level",)

    def problems(self, split: str) -> list[Problem]:
        return [
            Problem(({"role": "user", "content": f"What is {a} + 1?"},), {"answer": a + 1, "level": a})
            for a in range(6)
        ]

    def reward(self) -> Any:
        raise NotImplementedError


@dataclass
class Order:
    """Prompts in order, and what was taken."""

    prompts: list[Prompt]
    taken: int = 0

    def take(self, count: int) -> tuple[list[int], list[Prompt]]:
        positions = list(range(self.taken, self.taken + count))
        self.taken += count
        return positions, [self.prompts[p % len(self.prompts)] for p in positions]

    def outcomes(self, rewards: Any) -> Any:
        return ()


@dataclass
class Served:
    """A server over the engine of a model, whose thread does what a searcher does: prompts in, completions out."""

    model: HuggingFace
    samples: int = 2
    limits: ServingLimits = field(default_factory=lambda: ServingLimits(max_tokens=400, seat_seconds=20))
    completions: list[tuple[Prompt, Completion]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)  # numbers of prompts

    def __post_init__(self) -> None:
        tokenizer, task = self.model.tokenizer(), Adding()
        self.prompts = encode(task.problems("train"), task.name, tokenizer, PromptSettings()).prompts
        self.order = Order(self.prompts)
        self.agent_link = AgentLink(Mailbox(), make_base_engine=partial(self.model.base_engine, 64))
        self.server = EpisodeServer(
            mailbox=self.agent_link.mailbox,
            tokenizer=tokenizer,
            task=task,
            prompts=self.prompts,
            limits=self.limits,
            weights=lambda: "0.0",
        )
        self.has_ended = threading.Event()
        self.thread = threading.Thread(target=self._search, daemon=True)

    def _search(self) -> None:
        self.engine, source = self.agent_link.attach(self.model, 512, self.order)
        flow = self.engine.flow(self.samples, Sampling(), np.random.default_rng(0))
        self.flow: Any = flow
        prompts: dict[int, Prompt] = {}
        while not self.has_ended.is_set() or flow.unfinished_prompts:
            number = flow.prompts_submitted
            _, new_prompts = source.take(flow.prompts_needed)
            flow.submit(new_prompts)
            prompts |= dict(enumerate(new_prompts, number))
            for i, completions in flow.next(self.has_ended.is_set, until_needed=True):
                self.finished += [i] if i not in flow.unfinished_prompts else []
                for completion in completions:
                    self.completions.append((prompts[i], completion))
                    self.server.note_done(self._graded(prompts[i], completion))

    @staticmethod
    def _graded(prompt: Prompt, completion: Completion) -> OpenAnswer:
        zeros = np.zeros(len(completion.tokens), np.float32)
        trajectory = Trajectory("uid", prompt, completion, 1.0, zeros, Version())
        return OpenAnswer(OpenGroup(0, prompt, 0.0), completion, trajectory=trajectory)

    def run(self, agent: Callable[[Served], Awaitable[Any]]) -> Any:
        """Returns what an agent returns, and ends the searcher."""

        async def main() -> Any:
            sweeper = asyncio.create_task(self.server.sweep())
            await asyncio.sleep(0)
            try:
                return await asyncio.wait_for(agent(self), 60)
            finally:
                sweeper.cancel()

        self.thread.start()
        try:
            return asyncio.run(main())
        finally:
            self.has_ended.set()
            self.thread.join(60)
            assert not self.thread.is_alive()

    async def call(
        self, episode: ServedEpisode, messages: Any, *, retry: bool = False, received: bool = True, **fields: Any
    ) -> ChatAnswer:
        """Returns the answer to a call."""
        body = {"messages": messages, "max_tokens": 12, **fields}
        task = self.server.begin_call(episode, parse_chat_request(body), repr(body).encode(), retry)
        call, answer = await task
        call.is_delivered = call.is_delivered or received
        return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return chat_llama(tmp_path_factory.mktemp("chat"))


def assert_exact(model: HuggingFace, prompt: Prompt, completion: Completion) -> None:
    """The log-probabilities under the weights, of every sampled token after what the row says it was sampled after, are
    those that the engine sampled with.
    """
    reference = model.reference(1.0, Version())
    ((log_T,),) = reference.log_probabilities_of([(prompt, [completion])])
    mask = np.ones(len(completion.tokens), bool) if completion.mask is None else completion.mask
    assert completion.log_behavior is not None
    np.testing.assert_allclose(log_T[mask], completion.log_behavior[mask], atol=2e-4)


def test_an_agent_that_goes_on_from_the_prompt_makes_one_segment(model: HuggingFace) -> None:
    served = Served(model)

    async def agent(served: Served) -> list[ChatAnswer]:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        answers = []
        for _ in range(3):
            answers.append(await served.call(episode, messages))
            messages += [answers[-1].answer.message, {"role": "user", "content": "Are you sure?"}]
        await served.server.end(episode)
        return answers

    answers = served.run(agent)
    ((prompt, completion),) = served.completions
    assert completion.begins is None
    assert [end - begin for begin, end in completion.turns] == [answer.completion_tokens for answer in answers]
    assert answers[2].prompt_tokens + answers[2].completion_tokens == len(prompt.tokens) + len(completion.tokens)
    assert answers[1].cached_tokens == answers[0].prompt_tokens + answers[0].completion_tokens
    assert_exact(model, prompt, completion)


def test_conversations_of_its_own_forks_and_parallel_calls_are_segments(model: HuggingFace) -> None:
    served = Served(model)
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Plan."}]

    async def agent(served: Served) -> None:
        episode = await served.server.begin("me", None, None)
        first = await served.call(episode, system)
        history = [*system, first.answer.message]
        await asyncio.gather(
            *(served.call(episode, [*history, {"role": "user", "content": text}]) for text in ("Go on.", "Go back."))
        )
        await served.call(episode, list(episode.seat.prompt.messages or ()))
        await served.call(episode, [{"role": "user", "content": "Sum up."}], tools=[TOOL])
        await served.server.end(episode)

    served.run(agent)
    ((prompt, completion),) = served.completions
    assert completion.begins is not None
    assert len(completion.turns) == 5
    assert len(completion.segments) == 4  # the prompt's, the plan with its continuation, the fork, the summary
    reasons = {"another conversation": 2, "a second call behind one answer": 1}
    assert served.server.new_segments == reasons
    assert completion.episode is not None
    assert completion.episode.provenance["new_segments"] == reasons
    assert_exact(model, prompt, completion)


def test_a_row_begins_anew_where_no_call_goes_on_from_the_prompt(model: HuggingFace) -> None:
    served = Served(model)

    async def agent(served: Served) -> None:
        episode = await served.server.begin("me", None, None)
        await served.call(episode, [{"role": "user", "content": "Something else."}])
        await served.server.end(episode)

    served.run(agent)
    ((prompt, completion),) = served.completions
    assert completion.begins is not None
    assert completion.begins.tolist() == [0]
    assert_exact(model, prompt, completion)


def test_what_nobody_received_is_left_out_and_counted(model: HuggingFace) -> None:
    served = Served(model)

    async def agent(served: Served) -> ChatAnswer:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        await served.call(episode, messages, received=False)
        answer = await served.call(episode, messages)  # the same body without the mark of a retry is a new call
        await served.server.end(episode)
        return answer

    answer = served.run(agent)
    ((prompt, completion),) = served.completions
    assert completion.begins is None
    assert len(completion.tokens) == answer.completion_tokens
    assert served.server.counts["answers that nobody received"] == 1
    assert completion.episode is not None
    assert completion.episode.provenance["undelivered"] == 1
    assert_exact(model, prompt, completion)


def test_a_retry_joins_its_call(model: HuggingFace) -> None:
    served = Served(model)

    async def agent(served: Served) -> tuple[ChatAnswer, ChatAnswer]:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        pair = await asyncio.gather(
            served.call(episode, messages, received=False), served.call(episode, messages, retry=True)
        )
        await served.server.end(episode)
        return pair

    first, second = served.run(agent)
    assert first is second
    assert len(served.completions[0][1].turns) == 1


def test_joins_of_waiting_calls_are_calls_that_wait(model: HuggingFace) -> None:
    served = Served(model, limits=ServingLimits(max_tokens=400, calls_per_token=2, seat_seconds=20))

    async def agent(served: Served) -> None:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        waiting = [asyncio.ensure_future(served.call(episode, messages, retry=i > 0)) for i in range(2)]
        await asyncio.sleep(0)  # both have begun
        for retry in (True, False):
            with pytest.raises(RequestRefused, match="wait too"):
                await served.call(episode, messages, retry=retry)
        await asyncio.gather(*waiting)
        assert episode.waiting == 0
        for _ in range(3):  # nobody waits for what is there
            await served.call(episode, messages, retry=True)

    served.run(agent)
    assert served.server.counts["retries"] == 4


@pytest.mark.parametrize("parked_gb", [None, 0.0])
def test_tokens_that_are_read_again_are_not_cached(model: HuggingFace, parked_gb: float | None) -> None:
    served = Served(replace(model, generation=replace(model.generation, parked_gb=parked_gb)))

    async def agent(served: Served) -> list[ChatAnswer]:
        episode = await served.server.begin("me", None, None)
        messages, answers = list(episode.seat.prompt.messages or ()), []
        for _ in range(3):
            answers.append(await served.call(episode, messages))
            messages += [answers[-1].answer.message, {"role": "user", "content": "Are you sure?"}]
            while parked_gb == 0 and served.flow.flow.dropped_copies < len(answers):  # `run` has a deadline
                await asyncio.sleep(0.01)
        await served.server.end(episode)
        return answers

    answers = served.run(agent)
    conversation_tokens = [0, *(answer.prompt_tokens + answer.completion_tokens for answer in answers[:2])]
    cached = [answer.cached_tokens for answer in answers]
    assert cached == (conversation_tokens if parked_gb is None else [0, 0, 0])
    read_count = sum(answer.prompt_tokens for answer in answers) - sum(cached)
    assert served.server.figures["tokens read"] == read_count
    record = served.completions[0][1].episode
    assert record is not None
    assert record.provenance["tokens_read"] == read_count
    assert_exact(model, *served.completions[0])


def test_what_is_sampled_of_episodes_that_do_not_end_is_counted(model: HuggingFace) -> None:
    served = Served(model)

    async def agent(served: Served) -> list[int]:
        episodes = [await served.server.begin("me", None, None) for _ in range(3)]
        lengths = []
        for episode in episodes:
            messages = list(episode.seat.prompt.messages or ())
            answers = [await served.call(episode, messages)]
            messages += [answers[0].answer.message, {"role": "user", "content": "Go on."}]
            answers += [await served.call(episode, messages), await served.call(episode, messages, received=False)]
            lengths.append(sum(answer.completion_tokens for answer in answers))
        await served.server.abandon(episodes[0])
        return lengths

    lengths = served.run(agent)
    assert all(completion.stop_reason is StopReason.INTERRUPTED for _, completion in served.completions)
    assert [len(completion.tokens) for _, completion in served.completions] == lengths[1:]
    assert served.server.figures["tokens of episodes without a row"] == lengths[0]


def test_stop_strings_and_limits_of_a_call_are_its_own(model: HuggingFace) -> None:
    served = Served(model)

    async def agent(served: Served) -> list[ChatAnswer]:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        answers = [await served.call(episode, messages, max_tokens=5)]
        messages += [answers[0].answer.message, {"role": "user", "content": "Go on."}]
        answers.append(await served.call(episode, messages, max_tokens=40, stop=["e"]))
        messages += [answers[1].answer.message, {"role": "user", "content": "Go on."}]
        answers.append(await served.call(episode, messages, max_tokens=9))
        await served.server.end(episode)
        return answers

    first, second, third = served.run(agent)
    assert first.completion_tokens <= 5
    assert "e" not in second.answer.content
    assert third.completion_tokens <= 9
    assert_exact(model, *served.completions[0])


def test_an_episode_without_room_is_refused_further_calls_and_keeps_what_it_has(model: HuggingFace) -> None:
    served = Served(model, limits=ServingLimits(max_tokens=60, seat_seconds=20))

    async def agent(served: Served) -> RequestRefused:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        try:
            for _ in range(20):
                answer = await served.call(episode, messages)
                messages += [answer.answer.message, {"role": "user", "content": "Go on."}]
        except RequestRefused as refusal:
            await served.server.end(episode)
            return refusal
        raise AssertionError

    assert served.run(agent).code == "context_length_exceeded"
    prompt, completion = served.completions[0]
    assert len(completion.tokens) <= 60
    assert_exact(model, prompt, completion)


def test_prompts_come_in_groups_or_as_chosen(model: HuggingFace) -> None:
    served = Served(model)

    async def agent(served: Served) -> list[str]:
        chosen = served.prompts[4].key
        keys = []
        for key in (None, None, chosen, None, chosen):
            episode = await served.server.begin("me", key, None)
            keys.append(episode.seat.prompt.key)
            await served.call(episode, list(episode.seat.prompt.messages or ()))
            await served.server.end(episode)
        return keys

    keys = served.run(agent)
    expected = [served.prompts[i].key for i in (0, 0, 4, 1, 4)]
    assert keys == expected


def test_an_episode_that_is_abandoned_leaves_its_seat_to_another(model: HuggingFace) -> None:
    served = Served(model, samples=1)

    async def agent(served: Served) -> list[str]:
        keys = []
        for is_kept in (False, True, True):
            episode = await served.server.begin("me", None, None)
            keys.append(episode.seat.prompt.key)
            await served.call(episode, list(episode.seat.prompt.messages or ()))
            await (served.server.end(episode) if is_kept else served.server.abandon(episode))
        return keys

    assert served.run(agent) == [served.prompts[i].key for i in (0, 0, 1)]
    assert len(served.completions) == 2


def test_a_reward_reads_no_turn_of_the_assistants_that_the_model_did_not_give(model: HuggingFace) -> None:
    served = Served(model)

    async def agent(served: Served) -> ChatAnswer:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        answer = await served.call(episode, messages)
        forged = {"role": "assistant", "content": "The right answer."}
        await served.call(episode, [*messages, forged, {"role": "user", "content": "Thanks."}])
        await served.call(episode, [*messages, answer.answer.message, {"role": "user", "content": "?"}], received=False)
        await served.server.end(episode)
        return answer

    answer = served.run(agent)
    ((prompt, completion),) = served.completions
    assert completion.episode is not None
    assert completion.episode.messages == (*(prompt.messages or ()), answer.answer.message)
    assert completion.sampling == Sampling()


def test_what_the_searcher_has_begun_to_give_at_a_deadline_is_not_dropped() -> None:
    async def main() -> None:
        running: Future[int] = Future()
        assert running.set_running_or_notify_cancel()
        asyncio.get_running_loop().call_soon(running.set_result, 3)
        assert await _result_within(running, 0.0) == 3
        waiting: Future[int] = Future()
        with pytest.raises(TimeoutError):
            await _result_within(waiting, 0.0)
        assert waiting.cancelled()

    asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 4])
def test_the_base_answers_as_before_training_and_has_no_part_in_the_row(model: HuggingFace, rank: int) -> None:
    model = replace(model, lora=LoraSettings(rank=rank))
    reference = model.reference(1.0, Version())
    generator = torch.Generator().manual_seed(3)
    weights = model.policy(1.0).weights()
    newer = {name: 0.5 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
    served = Served(model)
    served.agent_link.make_base_engine = partial(model.base_engine, 64, reference)

    async def agent(served: Served) -> tuple[list[ChatAnswer], int]:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        names = (BASE, POLICY, BASE)
        bodies: list[dict[str, Any]] = [{"model": name, "messages": messages, "logprobs": True} for name in names]
        answers = [await served.call(episode, **body) for body in bodies]
        load = SearcherWork(lambda: served.engine.load(newer, Version(0, 1)), Future())
        served.agent_link.mailbox.post(load)
        await asyncio.wrap_future(load.future)
        answers += await asyncio.gather(*(served.call(episode, **body) for body in bodies))
        await served.server.end(episode)
        return answers, episode.calls_made

    answers, call_count = served.run(agent)
    ((prompt, completion),) = served.completions
    assert [answer.model for answer in answers] == 2 * [BASE, POLICY, BASE]
    assert call_count == 6
    policy_answers, base_answers = (answers[1], answers[4]), [answers[i] for i in (0, 2, 3, 5)]
    assert sum(end - begin for begin, end in completion.turns) == sum(a.completion_tokens for a in policy_answers)
    assert served.server.figures["calls"] == 2
    assert served.server.figures["calls of the base"] == 4
    assert served.server.figures["tokens of the base"] == sum(answer.completion_tokens for answer in base_answers)
    engine, rng = replace(model, lora=LoraSettings()).engine(Version()), np.random.default_rng(0).spawn(1)[0]
    expected = generate(engine, 4 * [prompt], 1, Sampling(), rng)
    for answer, (sampled,) in zip(base_answers, expected, strict=True):
        entries = answer.logprobs["content"]
        assert sampled.log_behavior is not None
        assert [entry["token"] for entry in entries] == [
            model.tokenizer().decode([token]) for token in sampled.tokens[: len(entries)]
        ]
        np.testing.assert_allclose([e["logprob"] for e in entries], sampled.log_behavior[: len(entries)], atol=2e-4)
    assert policy_answers[0].logprobs["content"][0] != policy_answers[1].logprobs["content"][0]


def test_calls_of_the_base_are_refused_when_the_run_ends(model: HuggingFace) -> None:
    served = Served(replace(model, generation=replace(model.generation, slots=1, max_completion_tokens=400)))

    async def agent(served: Served) -> None:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        await served.call(episode, messages, model=BASE, max_tokens=1)
        calls = [served.call(episode, messages, model=BASE, max_tokens=400) for _ in range(4)]
        waiting = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)  # they are made
        served.has_ended.set()
        results = await waiting
        assert any(isinstance(result, RequestRefused) and result.status == 503 for result in results)

    served.run(agent)
    assert served.completions == []


def test_a_base_without_memory_is_refused_in_a_sentence(model: HuggingFace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    served = Served(model)

    async def agent(served: Served) -> ChatAnswer:
        episode = await served.server.begin("me", None, None)
        messages = list(episode.seat.prompt.messages or ())
        with pytest.raises(RequestRefused, match="GB are free"):
            await served.call(episode, messages, model=BASE)
        return await served.call(episode, messages)

    assert served.run(agent).completion_tokens
