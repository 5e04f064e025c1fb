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

from tba.rewards.children import own_output
from tba.rewards.confined import limit_memory
from tba.types import Json

_HARNESS = "tba_policy"  # the name under which verifiers finds the harness
_TOKEN = "TBA_LOOPBACK_API_KEY"  # noqa: S105 - a variable's name, which verifiers keeps from its programs
_FULL = "context_length_exceeded"  # how an endpoint says that a conversation has no room left


class Policy(vf.Harness[vf.HarnessConfig]):
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
            said = await response.text()
            ended = response.ok or _FULL in said
        return vf.ProgramResult(exit_code=0 if ended else 1, stdout="", stderr="" if ended else said)


def messages_of(harness: vf.Harness[Any], data: vf.TaskData) -> list[dict[str, Any]]:
    """Returns the messages with which a harness begins."""
    system, prompt = harness.resolve_prompt(data)
    asked = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
    said = [{"role": "system", "content": system}] if system else []
    return said + [message_to_wire(message) for message in asked]


class Failed(Exception):
    """Raised for an episode that cannot go on."""


@dataclass
class Play:
    """One episode that is being played: what was said so far, and the request that waits for a turn."""

    conversation: list[dict[str, str]] = field(default_factory=list)
    asked: asyncio.Queue[Waiting | None] = field(default_factory=asyncio.Queue)  # None: the episode is over
    waiting: Waiting | None = None
    closed: bool = False  # there is no room for another turn
    traces: list[vf.Trace] = field(default_factory=list)
    wrong: str = ""  # why it has failed, found here
    task: asyncio.Task[vf.Episode] | None = None

    async def answered(self, trace: str, messages: list[Any]) -> tuple[str, str] | None:
        """Returns the turn that answers a request, and why it ended; None where there is no room."""
        if self.closed:
            return None
        waiting = Waiting(trace, messages, asyncio.get_running_loop().create_future())
        self.asked.put_nowait(waiting)
        return await waiting.turn

    async def next(self) -> str | None:
        """Returns the message that the next turn answers; None at the end. Raises `Failed`."""
        self.waiting = await self.asked.get()
        if self.waiting is None:
            self._result()  # raises for one that has failed
            return None
        try:
            self.conversation = self._continued(self.waiting)
        except Failed as error:
            self.wrong = str(error)
            raise
        return self.conversation[-1]["content"]

    def say(self, text: str, why: str = "stop") -> None:
        """Answer the request that waits."""
        if self.waiting is None or self.wrong:
            raise Failed(self.wrong or "it is over")
        self.conversation.append({"role": "assistant", "content": text})
        self.waiting.turn.set_result((text, why))

    async def reward(self) -> float:
        """Returns the reward, once the episode has ended; where a request still waits there is no room for it."""
        if self.wrong:
            raise Failed(self.wrong)
        self.closed = True
        if self.waiting is not None and not self.waiting.turn.done():
            self.waiting.turn.set_result(None)
        assert self.task is not None
        await asyncio.wait([self.task])
        return self._result().reward

    def _result(self) -> vf.Trace:
        assert self.task is not None
        episode = self.task.result()
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if errors:
            raise Failed(f"{errors[-1].type}: {errors[-1].message}")
        if len(episode.traces) != 1:
            raise Failed(f"{len(episode.traces)} agents have played, and the policy can be one only")
        return episode.traces[0]

    def _continued(self, waiting: Waiting) -> list[dict[str, str]]:
        """Returns the conversation of a request. Raises `Failed` unless it is the one so far and a user's message."""
        if waiting.trace != self.traces[0].id:
            raise Failed("a second agent asks for a turn, and the policy can be one only")
        said = [{"role": m.get("role"), "content": m.get("content") or ""} for m in waiting.messages]
        if not all(isinstance(m["content"], str) for m in said) or any(m.get("tool_calls") for m in waiting.messages):
            raise Failed("a message is something else than a text")
        before, new = said[: len(self.conversation)], said[len(self.conversation) :]
        if before != self.conversation:
            raise Failed("the environment has changed what was said before, and an episode only grows")
        if self.conversation and [m["role"] for m in new] != ["user"]:
            raise Failed(f"after a turn come the messages {[m['role'] for m in new]}, and only one of the user can")
        if not said or said[-1]["role"] != "user":
            raise Failed("the conversation does not end with a message of the user")
        return said


@dataclass
class Waiting:
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
        seats = [
            name
            for name, info in vf.env_config_type(identifier).model_fields.items()
            if isinstance(info.default, vf.AgentConfig)
        ]
        seat = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": settings["turns"]}
        config = vf.resolve_env_config({"taskset": settings["taskset"], **{name: dict(seat) for name in seats}})
        self.env = vf.load_environment(config)
        self.tasks: list[vf.Task] = []
        self.more = iter(self.env.taskset)
        self.plays: dict[str, Play] = {}
        self.context: vf.ModelContext | None = None
        self.token = secrets.token_urlsafe(32)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve the endpoint, and what the environment needs."""
        os.environ[_TOKEN] = self.token
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._completions)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            client = vf.EvalClientConfig(base_url=address, api_key_var=_TOKEN)
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
        except Failed as error:
            return {"failed": str(error)}
        except Exception as error:  # noqa: BLE001 - of the taskset: whatever it is, it is its episode's
            return {"failed": _told(error)}

    async def _task(self, index: int) -> Json:
        """Returns what task `index` asks its agent first; null after the last one."""
        if (task := self._at(index)) is None:
            return None
        content = task.data.model_dump(mode="json", exclude={"idx", "id", "name"})
        if task.data.prompt is None:  # the environment opens the conversation
            name = f"task {index}"
            try:
                messages = (await self._begin(name, index))["messages"]
            finally:
                await self._end(name)
        else:
            messages = messages_of(Policy(vf.HarnessConfig(id=_HARNESS)), task.data)
        return {"index": index, "messages": messages, "content": json.dumps(content, sort_keys=True)}

    async def _begin(self, name: str, index: int) -> dict[str, Any]:
        task = self._at(index)
        if task is None or self.context is None:
            raise Failed(f"there is no task {index}")
        play = self.plays[name] = Play()
        play.task = asyncio.create_task(self.env.run_episode(task, self.context, on_trace=play.traces.append))
        play.task.add_done_callback(lambda _: play.asked.put_nowait(None))
        if await play.next() is None:
            raise Failed("the episode is over before the policy was asked for a turn")
        return {"messages": play.conversation}

    async def _say(self, name: str, text: str) -> dict[str, str | None]:
        play = self._play(name)
        play.say(text)
        return {"text": await play.next()}

    async def _cut(self, name: str, text: str) -> None:
        play = self._play(name)
        play.closed = True
        play.say(text, "length")

    async def _judge(self, name: str) -> dict[str, float]:
        return {"reward": await self._play(name).reward()}

    async def _end(self, name: str) -> None:
        play = self.plays.pop(name, None)
        if play is not None and play.task is not None and not play.task.done():
            play.task.cancel()
            await asyncio.wait([play.task])

    def _play(self, name: str) -> Play:
        if name not in self.plays:
            raise Failed("the process that played it was replaced")
        return self.plays[name]

    def _at(self, index: int) -> vf.Task | None:
        self.tasks += islice(self.more, max(0, index + 1 - len(self.tasks)))
        return self.tasks[index] if index < len(self.tasks) else None

    async def _completions(self, request: web.Request) -> web.Response:
        """Answer a request to the endpoint with a turn of the policy."""
        shown = request.headers.get("Authorization", "").encode()
        if not secrets.compare_digest(shown, f"Bearer {self.token}".encode()):
            return web.json_response({"error": {"message": "the token is missing"}}, status=401)
        trace = request.headers.get("X-Session-ID", "")
        play = next((p for p in self.plays.values() if trace in (t.id for t in p.traces)), None)
        turn = None if play is None else await play.answered(trace, (await request.json())["messages"])
        if turn is None:
            message = {"message": "the conversation has no room for another turn", "code": _FULL}
            return web.json_response({"error": message}, status=400)
        choice = {"index": 0, "message": {"role": "assistant", "content": turn[0]}, "finish_reason": turn[1]}
        return web.json_response(
            {"id": secrets.token_hex(8), "object": "chat.completion", "created": 0, "model": "policy",
             "choices": [choice]}
        )  # fmt: skip


def plug_in() -> None:
    """Make the harness known by a module's name, the way verifiers finds those that are installed."""
    module = ModuleType(_HARNESS)
    vars(module).update(__all__=["Policy"], Policy=Policy)
    sys.modules[_HARNESS] = module


async def serve(questions: IO[str], answers: IO[str], settings: Json) -> None:
    """Answers questions until they end, one by one, while episodes go on."""
    async with AsyncExitStack() as opened:
        try:
            world = World(settings)
            await opened.enter_async_context(world.open())
            answer: Callable[[list[Any]], Awaitable[dict[str, Json]]] = world.answer
        except Exception as error:  # noqa: BLE001 - of the taskset, told when asked
            answer = functools.partial(_refused, _told(error))
        print("ready", file=answers, flush=True)
        while line := await asyncio.to_thread(questions.readline):
            number, question = json.loads(line)
            print(json.dumps([number, await answer(question)]), file=answers, flush=True)


async def _refused(why: str, question: list[Any]) -> dict[str, Json]:
    return {"refused": why}


def _told(error: Exception) -> str:
    """Returns an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> None:
    """Run as the child."""
    answers = own_output()
    warnings.simplefilter("ignore")
    limit_memory()
    for name in ("NO_PROXY", "no_proxy"):  # loopback is reached directly
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    plug_in()
    asyncio.run(serve(sys.stdin, answers, json.loads(sys.argv[1])))
    os._exit(0)  # whatever an environment has left running


if __name__ == "__main__":
    main()
