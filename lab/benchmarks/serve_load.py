"""What `tba serve` costs and keeps busy: chats per CPU second, the memory of parked episodes, slots in use.

    python lab/benchmarks/serve_load.py [chats] [parked] [slots] [--connections 8] [--chats 400] [--seconds 30]

chats     a server over an engine that answers at once, in a process of its own: its CPU seconds for each chat, in
          episodes of four chats, without tools and with calls of tools
parked    episodes that all wait for their agents at once: the bytes that the engine keeps for them, beside `parked_gb`,
          the rows that it has dropped and reads again, and the tokens that requests bring beside those they repeat
slots     eight agents whose tools take 0 to 5 s: how many slots are sampling, and what a call takes beside a call of an
          agent that is alone
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from tba.models.huggingface import HuggingFace
from tba.protocols import Partner, Turn
from tba.serving.app import AccessRules, application
from tba.serving.connections import http_server
from tba.serving.server import ServingLimits
from tba.types import Completion, Prompt, StopReason, Version

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from serving.chat_llama import chat_llama
from serving.test_served_engine import TOOL, Served

TOKEN = "the-token-of-the-load"
PATIENCE = 120.0  # seconds for anything
TOOL_SECONDS = 5.0
AGENTS = 8


@dataclass
class StubEngine:
    """An engine that answers at once: a call of a tool first, where there are tools, then two letters."""

    tokenizer: Any
    has_tools: bool
    version: Version = field(default_factory=Version)

    def flow(self, count: int, sampling: Any, rng: Any, partner: Partner) -> StubFlow:
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 21}}\n</tool_call>'
        texts = (call if self.has_tools else "ok", "ok")
        return StubFlow(
            partner, [self.tokenizer.encode(f"{t}<|im_end|>", add_special_tokens=False) for t in texts], texts
        )


@dataclass
class StubFlow:
    """The flow of a `StubEngine`."""

    partner: Any
    answers: Sequence[list[int]]
    texts: Sequence[str]
    prompts_submitted: int = 0
    prompts_needed: int = 0
    turns_made: dict[int, int] = field(default_factory=dict)  # by request
    to_answer: list[int] = field(default_factory=list)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        for _ in prompts:
            self.to_answer.append(self.prompts_submitted)
            self.turns_made[self.prompts_submitted] = 0
            self.prompts_submitted += 1

    def cancel(self, request: int) -> None:
        raise NotImplementedError

    def next(self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True) -> list[Any]:
        while not self.partner.must_return() and not (interrupted is not None and interrupted()):
            requests, self.to_answer = self.to_answer, []
            if requests:
                self.partner.hear([self._turn(request) for request in requests])
            for request, reply in self.partner.replies(wait=not requests).items():
                if reply is None:
                    empty = Completion(np.zeros(0, np.int32), "", StopReason.EOS, (Version(), Version()))
                    self.partner.ended(request, empty)
                else:
                    self.to_answer.append(request)
        return []

    def _turn(self, request: int) -> Turn:
        place = min(self.turns_made[request], 1)
        self.turns_made[request] += 1
        tokens = self.answers[place]
        return Turn(request, self.texts[place], StopReason.EOS, 1000, tokens, np.zeros(len(tokens), np.float32))


@dataclass
class StubModel:
    """A model whose engine is a stub, or another one that is watched."""

    model: HuggingFace
    make: Callable[[Any], Any]
    flows: list[Any] = field(default_factory=list)

    def tokenizer(self) -> Any:
        return self.model.tokenizer()

    def engine(self, version: Version) -> Any:
        return WatchedEngine(self.make(version), self.flows)


@dataclass
class WatchedEngine:
    """An engine whose flows are remembered."""

    inner: Any
    flows: list[Any]

    @property
    def version(self) -> Version:
        return Version()

    def flow(self, *arguments: Any) -> Any:
        self.flows.append(self.inner.flow(*arguments))
        return self.flows[-1]


@contextmanager
def served(model: StubModel) -> Iterator[tuple[Served, int]]:
    """Yields a server over the model's engine, and its port."""
    server = Served(model, samples=1, limits=ServingLimits(max_tokens=100_000, seat_seconds=PATIENCE))  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    http = http_server(application(server.server, AccessRules({"load": TOKEN}, frozenset({"127.0.0.1"}))))
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    server.thread.start()
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.has_ended.set()
        server.thread.join(PATIENCE)
        http.should_exit = True
        thread.join(PATIENCE)


@dataclass
class Agent:
    """An agent with a connection of its own."""

    port: int
    seconds: list[float] = field(default_factory=list)  # of each call
    prompt_tokens: int = 0  # of all calls

    def __post_init__(self) -> None:
        self.connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def ask(self, path: str, key: str, body: Any) -> Any:
        self.connection.request("POST", path, json.dumps(body), {"authorization": f"Bearer {key}"})
        response = self.connection.getresponse()
        content = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{path}: {response.status} {content[:300]!r}")
        return json.loads(content)

    def begin(self) -> tuple[Any, list[Any]]:
        episode = self.ask("/episodes", TOKEN, {})
        return episode, list(episode["prompt"])

    def call(self, episode: Any, messages: list[Any], **fields: Any) -> None:
        """Makes a call, and appends its answer and what follows it to the messages."""
        began = time.perf_counter()
        answer = self.ask("/v1/chat/completions", episode["api_key"], {"messages": messages, **fields})
        self.seconds.append(time.perf_counter() - began)
        self.prompt_tokens += answer["usage"]["prompt_tokens"]
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in calls]
        messages += [message, *(results or [{"role": "user", "content": "Are you sure of that?"}])]

    def play(self, calls: int, **fields: Any) -> None:
        episode, messages = self.begin()
        for _ in range(calls):
            self.call(episode, messages, **fields)
        self.end(episode)

    def end(self, episode: Any) -> None:
        self.ask(f"/episodes/{episode['id']}/end", TOKEN, {})


def measure_chats(folder: Path, connections: int, chats: int) -> None:
    """Prints the CPU seconds of a server for each chat."""
    model = chat_llama(folder)
    for has_tools in (False, True):
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=serve_stub, args=(model, has_tools, there))
        process.start()
        port = here.recv()
        fields = {"tools": [TOOL]} if has_tools else {}
        agents = [Agent(port) for _ in range(connections)]
        for part in ("to warm up", "measured"):
            here.send(part)
            cpu_before, began = here.recv(), time.perf_counter()
            with ThreadPoolExecutor(connections) as threads:
                list(threads.map(partial(play_episodes, chats // 4 // connections, fields), agents))
            here.send(part)
            cpu, wall = here.recv() - cpu_before, time.perf_counter() - began
        count = chats // 4 // connections * connections * 4
        print(
            f"{'with tools' if has_tools else 'no tools':10} {count} chats in {count // 4} episodes over {connections} "
            f"connections: {1000 * cpu / count:.2f} ms of CPU a chat, its share of an episode included: "
            f"{count / cpu:.0f} chats per CPU second; {wall:.1f} s",
            flush=True,
        )
        here.send(None)
        process.join(PATIENCE)


def play_episodes(count: int, fields: Any, agent: Agent) -> None:
    for _ in range(count):
        agent.play(4, **fields)


def serve_stub(model: HuggingFace, has_tools: bool, parent: Any) -> None:
    """Serve until the parent says to end; sends CPU seconds when asked."""
    tokenizer = model.tokenizer()
    with served(StubModel(model, lambda _: StubEngine(tokenizer, has_tools))) as (_, port):
        parent.send(port)
        while parent.recv() is not None:
            parent.send(time.process_time())


def measure_parked(folder: Path) -> None:
    """Prints what the engine keeps for 32 episodes that wait at once, for several budgets."""
    model, episodes, calls = chat_llama(folder), 32, 4
    for budget in (None, 1e-3, 3e-4, 0.0):
        generation = replace(model.generation, parked_gb=budget)
        watched = StubModel(model, replace(model, generation=generation).engine)
        with served(watched) as (server, port):
            agents, peak = [Agent(port) for _ in range(episodes)], 0
            begun_episodes = [agent.begin() for agent in agents]
            for _ in range(calls):
                with ThreadPoolExecutor(8) as threads:
                    pairs = zip(agents, begun_episodes, strict=True)
                    list(threads.map(lambda pair: pair[0].call(*pair[1], max_tokens=16), pairs))
                peak = max(peak, watched.flows[0].parked_bytes)
            flow = watched.flows[0]
            slot_bytes = flow.cache.bytes_of(flow.cache.length) * flow.settings.slot_count
            for agent, (episode, _) in zip(agents, begun_episodes, strict=True):
                agent.end(episode)
            print(
                f"parked_gb {budget}: at most {peak:,} bytes for {episodes} episodes "
                f"(budget {slot_bytes if budget is None else int(budget * 1e9):,}), {flow.dropped_copies} dropped; "
                f"{episodes * calls} calls bring {server.server.counts['tokens read']:,} new tokens of "
                f"{sum(agent.prompt_tokens for agent in agents):,}",
                flush=True,
            )


def measure_slots(folder: Path, seconds: float) -> None:
    """Prints how many slots sample while agents' tools take their time."""
    model = chat_llama(folder, slots=AGENTS)
    watched = StubModel(model, model.engine)
    with served(watched) as (_, port):
        alone = Agent(port)
        for _ in range(5):
            alone.play(4, max_tokens=64)
        agents, has_ended, busy = [Agent(port) for _ in range(AGENTS)], threading.Event(), []
        ends = time.monotonic() + seconds

        def act(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < ends:
                episode, messages = agents[number].begin()
                for _ in range(4):
                    agents[number].call(episode, messages, max_tokens=64)
                    has_ended.wait(rng.uniform(0.0, TOOL_SECONDS))
                agents[number].end(episode)

        with ThreadPoolExecutor(AGENTS) as threads:
            done = [threads.submit(act, number) for number in range(AGENTS)]
            while time.monotonic() < ends:
                busy.append(len(watched.flows[0].partner._waiting))
                has_ended.wait(0.02)
            for future in done:
                future.result(PATIENCE)
    call_seconds = [second for agent in agents for second in agent.seconds]
    mean, mean_alone = statistics.mean(call_seconds), statistics.mean(alone.seconds[1:])
    ideal = AGENTS * mean_alone / (mean_alone + TOOL_SECONDS / 2)
    print(
        f"{AGENTS} agents, tools of 0 to {TOOL_SECONDS:g} s: {statistics.mean(busy):.2f} of {AGENTS} slots sample on "
        f"average, {statistics.mean(b > 0 for b in busy):.0%} of the time at least one; {ideal:.2f} if no call took "
        f"longer than alone; a call takes {mean:.2f} s, alone {mean_alone:.2f} s; {len(call_seconds)} calls",
        flush=True,
    )


def main() -> int:
    """Makes the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", default=["chats", "parked", "slots"])
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--chats", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if "chats" in options.parts:
            measure_chats(Path(name), options.connections, options.chats)
        if "parked" in options.parts:
            measure_parked(Path(name))
        if "slots" in options.parts:
            measure_slots(Path(name), options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
