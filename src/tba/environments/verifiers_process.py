"""The process that plays episodes of a `verifiers` taskset: its own environment, rollout and rewards, unchanged.

`verifiers` asks a model through an endpoint of the OpenAI kind. Here that is a server on loopback, at a random port
behind a random token, which hands each request to the searcher and waits for the turn that its engine samples. The
program that would talk to the endpoint (a harness, elsewhere installed from the network) is a few lines in this
process.

    verifiers' environment -> harness -> verifiers' interception server -> this endpoint -> searcher

Invariant: an episode is one conversation that only grows; one that rewrites what was said, forks, or is held by a
second agent fails in one sentence. A question is answered within the time limit, whatever an episode waits for.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import IO, Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects.chat import message_to_wire

from tba.rewards.children import claim_stdout
from tba.rewards.confined import limit_memory
from tba.types import Json

_HARNESS = "tba_policy"  # the name under which verifiers finds the harness
_TOKEN_VARIABLE = "TBA_LOOPBACK_API_KEY"  # noqa: S105 - a variable's name, which verifiers keeps from its programs
_NO_ROOM = "context_length_exceeded"  # how an endpoint says that a conversation has no room left


class PolicyHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the policy for one turn. The environment speaks between turns, or ends the episode."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """See `verifiers.v1.Harness.launch`. A conversation without room left ends, and is graded as it stands."""
        async with aiohttp.request(
            "POST",
            f"{endpoint}/chat/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": ctx.model, "messages": messages_of(self, data)},
            timeout=aiohttp.ClientTimeout(total=None),  # questions have limits
        ) as response:
            body = await response.text()
            has_ended = response.ok or _NO_ROOM in body
        return vf.ProgramResult(exit_code=0 if has_ended else 1, stdout="", stderr="" if has_ended else body)


def messages_of(harness: vf.Harness[Any], data: vf.TaskData) -> list[dict[str, Any]]:
    """Returns the messages with which a harness begins."""
    system, prompt = harness.resolve_prompt(data)
    prompt_messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
    system_messages = [{"role": "system", "content": system}] if system else []
    return system_messages + [message_to_wire(message) for message in prompt_messages]


class PlayFailed(Exception):
    """Raised for an episode that cannot go on."""


@dataclass
class Play:
    """One episode that is being played: what was said so far, and the request that waits for a turn."""

    conversation: list[dict[str, str]] = field(default_factory=list)
    requests: asyncio.Queue[TurnRequest | None] = field(default_factory=asyncio.Queue)  # None: the episode is over
    request: TurnRequest | None = None
    is_closed: bool = False  # there is no room for another turn
    traces: list[vf.Trace] = field(default_factory=list)
    failure: str = ""  # why it has failed, where that was noticed here
    task: asyncio.Task[vf.Episode] | None = None

    async def request_turn(self, trace: str, messages: list[Any]) -> tuple[str, str] | None:
        """Returns the turn that answers a request, and why it ended; None where there is no room."""
        if self.is_closed:
            return None
        request = TurnRequest(trace, messages, asyncio.get_running_loop().create_future())
        self.requests.put_nowait(request)
        return await request.turn

    async def next_message(self) -> str | None:
        """Returns the message that the next turn answers; None at the end. Raises `PlayFailed`."""
        self.request = await self.requests.get()
        if self.request is None:
            self._result()  # raises for one that has failed
            return None
        try:
            self.conversation = self._continue_conversation(self.request)
        except PlayFailed as error:
            self.failure = str(error)
            raise
        return self.conversation[-1]["content"]

    def say(self, text: str, finish_reason: str = "stop") -> None:
        """Answer the request that waits."""
        if self.request is None or self.failure:
            raise PlayFailed(self.failure or "it is over")
        self.conversation.append({"role": "assistant", "content": text})
        self.request.turn.set_result((text, finish_reason))

    async def reward(self) -> float:
        """Returns the reward, once the episode has ended; where a request still waits there is no room for it."""
        if self.failure:
            raise PlayFailed(self.failure)
        self.is_closed = True
        if self.request is not None and not self.request.turn.done():
            self.request.turn.set_result(None)
        assert self.task is not None
        await asyncio.wait([self.task])
        return self._result().reward

    def _result(self) -> vf.Trace:
        assert self.task is not None
        episode = self.task.result()
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if errors:
            raise PlayFailed(f"{errors[-1].type}: {errors[-1].message}")
        if len(episode.traces) != 1:
            raise PlayFailed(f"{len(episode.traces)} agents have played, and the policy can be one only")
        return episode.traces[0]

    def _continue_conversation(self, request: TurnRequest) -> list[dict[str, str]]:
        """Returns a request's conversation. Raises `PlayFailed` unless it is the one so far and a user's message."""
        if request.trace != self.traces[0].id:
            raise PlayFailed("a second agent asks for a turn, and the policy can be one only")
        messages = [{"role": m.get("role"), "content": m.get("content") or ""} for m in request.messages]
        has_calls = any(m.get("tool_calls") for m in request.messages)
        if has_calls or not all(isinstance(m["content"], str) for m in messages):
            raise PlayFailed("a message is something else than a text")
        roles = [m["role"] for m in messages[len(self.conversation) :]]
        if messages[: len(self.conversation)] != self.conversation:
            raise PlayFailed("the environment has changed what was said before, and an episode only grows")
        if self.conversation and roles != ["user"]:
            raise PlayFailed(f"after a turn come the messages {roles}, and only one of the user can")
        if not messages or messages[-1]["role"] != "user":
            raise PlayFailed("the conversation does not end with a message of the user")
        return messages


@dataclass
class TurnRequest:
    """A request to the policy."""

    trace: str
    messages: list[Any]
    turn: asyncio.Future[tuple[str, str] | None]


class World:
    """A taskset, its environment, and the episodes that are being played."""

    def __init__(self, settings: Json) -> None:
        """Raises whatever verifiers raises for settings that do not fit."""
        self.seconds = float(settings["seconds"])
        identifier = settings["taskset"]["id"]
        fields = vf.env_config_type(identifier).model_fields.items()
        agents = [name for name, info in fields if isinstance(info.default, vf.AgentConfig)]
        agent = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": settings["turns"]}
        config = vf.resolve_env_config({"taskset": settings["taskset"], **{name: dict(agent) for name in agents}})
        self.env = vf.load_environment(config)
        self.tasks: list[vf.Task] = []
        self.remaining_tasks = iter(self.env.taskset)
        self.plays: dict[str, Play] = {}
        self.context: vf.ModelContext | None = None
        self.token = secrets.token_urlsafe(32)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve the endpoint, and what the environment needs."""
        os.environ[_TOKEN_VARIABLE] = self.token
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._completions)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            client = vf.EvalClientConfig(base_url=address, api_key_var=_TOKEN_VARIABLE)
            self.context = vf.ModelContext(model="policy", client=client)
            async with self.env.serving():
                yield
        finally:
            await runner.cleanup()

    async def answer(self, question: list[Any]) -> dict[str, Json]:
        """Returns the answer to a question of the searcher."""
        verb, *arguments = question
        try:
            async with asyncio.timeout(self.seconds):
                return {"answer": await getattr(self, f"_{verb}")(*arguments)}
        except TimeoutError:
            return {"failed": f"the environment took more than {self.seconds:g} s"}
        except PlayFailed as error:
            return {"failed": str(error)}
        except Exception as error:  # noqa: BLE001 - of the taskset: whatever it is, it is its episode's
            return {"failed": _error_line(error)}

    async def _task(self, index: int) -> Json:
        """Returns what task `index` asks its agent first; null after the last one."""
        if (task := self._task_at(index)) is None:
            return None
        content = task.data.model_dump(mode="json", exclude={"idx", "id", "name"})
        if task.data.prompt is None:  # the environment opens the conversation
            name = f"task {index}"
            try:
                messages = (await self._begin(name, index))["messages"]
            finally:
                await self._end(name)
        else:
            messages = messages_of(PolicyHarness(vf.HarnessConfig(id=_HARNESS)), task.data)
        return {"index": index, "messages": messages, "content": json.dumps(content, sort_keys=True)}

    async def _begin(self, name: str, index: int) -> dict[str, Any]:
        task = self._task_at(index)
        if task is None or self.context is None:
            raise PlayFailed(f"there is no task {index}")
        play = self.plays[name] = Play()
        play.task = asyncio.create_task(self.env.run_episode(task, self.context, on_trace=play.traces.append))
        play.task.add_done_callback(lambda _: play.requests.put_nowait(None))
        if await play.next_message() is None:
            raise PlayFailed("the episode is over before the policy was asked for a turn")
        return {"messages": play.conversation}

    async def _say(self, name: str, text: str) -> dict[str, str | None]:
        play = self._find_play(name)
        play.say(text)
        return {"text": await play.next_message()}

    async def _cut(self, name: str, text: str) -> None:
        play = self._find_play(name)
        play.is_closed = True
        play.say(text, "length")

    async def _judge(self, name: str) -> dict[str, float]:
        return {"reward": await self._find_play(name).reward()}

    async def _end(self, name: str) -> None:
        play = self.plays.pop(name, None)
        if play is not None and play.task is not None and not play.task.done():
            play.task.cancel()
            await asyncio.wait([play.task])

    def _find_play(self, name: str) -> Play:
        if name not in self.plays:
            raise PlayFailed("the process that played it was replaced")
        return self.plays[name]

    def _task_at(self, index: int) -> vf.Task | None:
        self.tasks += islice(self.remaining_tasks, max(0, index + 1 - len(self.tasks)))
        return self.tasks[index] if index < len(self.tasks) else None

    async def _completions(self, request: web.Request) -> web.Response:
        """Answer a request to the endpoint with a turn of the policy."""
        header = request.headers.get("Authorization", "").encode()
        if not secrets.compare_digest(header, f"Bearer {self.token}".encode()):
            return web.json_response({"error": {"message": "the token is missing"}}, status=401)
        trace = request.headers.get("X-Session-ID", "")
        play = next((p for p in self.plays.values() if trace in (t.id for t in p.traces)), None)
        turn = None if play is None else await play.request_turn(trace, (await request.json())["messages"])
        if turn is None:
            message = {"message": "the conversation has no room for another turn", "code": _NO_ROOM}
            return web.json_response({"error": message}, status=400)
        choice = {"index": 0, "message": {"role": "assistant", "content": turn[0]}, "finish_reason": turn[1]}
        return web.json_response(
            {"id": secrets.token_hex(8), "object": "chat.completion", "created": 0, "model": "policy",
             "choices": [choice]}
        )  # fmt: skip


def register_harness() -> None:
    """Register the harness as a module, the way verifiers finds those that are installed."""
    module = ModuleType(_HARNESS)
    vars(module).update(__all__=["PolicyHarness"], PolicyHarness=PolicyHarness)
    sys.modules[_HARNESS] = module


async def serve(questions: IO[str], answers: IO[str], settings: Json) -> None:
    """Answers questions until they end, one by one, while episodes go on."""
    async with AsyncExitStack() as stack:
        try:
            world = World(settings)
            await stack.enter_async_context(world.open())
            answer: Callable[[list[Any]], Awaitable[dict[str, Json]]] = world.answer
        except Exception as error:  # noqa: BLE001 - of the taskset, told when asked
            answer = functools.partial(_refuse, _error_line(error))
        print("ready", file=answers, flush=True)
        while line := await asyncio.to_thread(questions.readline):
            number, question = json.loads(line)
            print(json.dumps([number, await answer(question)]), file=answers, flush=True)


async def _refuse(reason: str, question: list[Any]) -> dict[str, Json]:
    return {"refused": reason}


def _error_line(error: Exception) -> str:
    """Returns an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> None:
    """Run as the child."""
    answers = claim_stdout()
    warnings.simplefilter("ignore")
    limit_memory()
    for name in ("NO_PROXY", "no_proxy"):  # loopback is reached directly
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    register_harness()
    asyncio.run(serve(sys.stdin, answers, json.loads(sys.argv[1])))
    os._exit(0)  # whatever an environment has left running


if __name__ == "__main__":
    main()
