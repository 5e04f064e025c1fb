"""Episodes of one client's agent at a server of episodes, for agent_clients.py: runs in the clients' own environment,
and imports nothing of ours.

    python lab/benchmarks/agent_clients_side.py openai http://127.0.0.1:8077 TOKEN --episodes 8 [--record FILE]

Each client is used as its own documentation shows it; an episode's key and address are all that is given to it. It has
two tools, is asked two questions in one conversation, and prints a line of JSON for each episode. --record writes the
bodies of all requests, a line each.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

RESULTS: list[int] = []  # of tools
MOST_TURNS = 4  # of the model's, for each question
MOST_TOKENS = 64  # of an answer
FOLLOW_UP = "Now add 7 to that number."


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    RESULTS.append(int(a) * int(b))
    return RESULTS[-1]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    RESULTS.append(int(a) + int(b))
    return RESULTS[-1]


TOOLS = {"multiply": multiply, "add": add}


def called(name: str, arguments: str | dict[str, Any]) -> str:
    """Returns what a tool says, as an author's own loop would have it."""
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(TOOLS[name](**values))
    except Exception as error:  # noqa: BLE001 - whatever the model called it with
        return f"error: {type(error).__name__}"


def schema(name: str) -> dict[str, Any]:
    number = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    description = (TOOLS[name].__doc__ or "").partition("\n")[0]
    return {"name": name, "description": description, "parameters": parameters}


class Episode:
    """An episode: its prompt, its key and its address. Before the question the prompt has a system message, or an
    example of a conversation with a call.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.id, self.key, self.base_url = facts["id"], facts["api_key"], facts["base_url"]
        *before, question = facts["prompt"]
        self.question, self.system = (
            question["content"],
            before[0]["content"] if before[0]["role"] == "system" else None,
        )
        # clients have to know which call a tool has answered
        self.before = [m | ({"tool_call_id": "example"} if m["role"] == "tool" else {}) for m in before]
        self.example = [message for message in self.before if message["role"] != "system"]


def call_in(message: Any) -> Any:
    """Returns the call of an example's message; None where it makes none."""
    text = message["content"]
    return json.loads(text[len("<tool_call>") : -len("</tool_call>")]) if text.startswith("<tool_call>") else None


async def openai_loop(episode: Episode, write: Callable[[Any], Any]) -> None:
    """write: what the loop appends for the model's message."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.key)
    tools: Any = [{"type": "function", "function": schema(name)} for name in TOOLS]
    messages: list[Any] = list(episode.before)
    for question in (episode.question, FOLLOW_UP):
        messages.append({"role": "user", "content": question})
        for _ in range(MOST_TURNS):
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools, max_tokens=MOST_TOKENS
            )
            message = completion.choices[0].message
            messages.append(write(message))
            for call in message.tool_calls or ():
                result = called(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break


async def play_openai(episode: Episode) -> None:
    await openai_loop(episode, lambda message: message)


async def play_openai_dump(episode: Episode) -> None:
    await openai_loop(episode, lambda message: message.model_dump())


async def play_openai_stream(episode: Episode) -> None:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.key)
    tools: Any = [{"type": "function", "function": schema(name)} for name in TOOLS]
    messages: list[Any] = list(episode.before)
    for question in (episode.question, FOLLOW_UP):
        messages.append({"role": "user", "content": question})
        for _ in range(MOST_TURNS):
            async with client.chat.completions.stream(
                model="policy",
                messages=messages,
                tools=tools,
                max_tokens=MOST_TOKENS,
                stream_options={"include_usage": True},
            ) as stream:
                try:
                    completion = await stream.get_final_completion()
                except Exception as error:  # it raises where an answer was cut off
                    if type(error).__name__ != "LengthFinishReasonError":
                        raise
                    completion = stream.current_completion_snapshot
            message = completion.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                result = called(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break


def agents_item(message: Any) -> Any:
    if call := call_in(message):
        arguments = json.dumps(call["arguments"])
        return {"type": "function_call", "call_id": "example", "name": call["name"], "arguments": arguments}
    if message["role"] == "tool":
        return {"type": "function_call_output", "call_id": "example", "output": message["content"]}
    return message


async def agents_loop(episode: Episode, uses_chat: bool, is_streamed: bool) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.key)
    kind: Any = OpenAIChatCompletionsModel if uses_chat else OpenAIResponsesModel
    agent = Agent(
        name="calculator",
        instructions=episode.system,
        tools=[function_tool(tool) for tool in TOOLS.values()],
        model=kind("policy", client),
        model_settings=ModelSettings(max_tokens=MOST_TOKENS),
    )
    history: Any = [agents_item(message) for message in episode.example]
    for question in (episode.question, FOLLOW_UP):
        items = [*history, {"role": "user", "content": question}]
        if is_streamed:
            result: Any = Runner.run_streamed(agent, items, max_turns=MOST_TURNS)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, items, max_turns=MOST_TURNS)
        history = result.to_input_list()


async def play_agents(episode: Episode) -> None:
    await agents_loop(episode, True, False)


async def play_agents_stream(episode: Episode) -> None:
    await agents_loop(episode, True, True)


async def play_agents_responses(episode: Episode) -> None:
    await agents_loop(episode, False, False)


async def play_agents_responses_stream(episode: Episode) -> None:
    await agents_loop(episode, False, True)


def pydantic_message(message: Any) -> Any:
    from pydantic_ai import messages

    if call := call_in(message):
        return messages.ModelResponse([messages.ToolCallPart(call["name"], call["arguments"], "example")])
    if message["role"] == "assistant":
        return messages.ModelResponse([messages.TextPart(message["content"])])
    if message["role"] == "tool":
        return messages.ModelRequest([messages.ToolReturnPart("multiply", message["content"], "example")])
    return messages.ModelRequest([messages.UserPromptPart(message["content"])])


async def play_pydantic_ai(episode: Episode) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    provider = OpenAIProvider(base_url=episode.base_url, api_key=episode.key)
    agent: Any = Agent(
        OpenAIChatModel("policy", provider=provider),
        system_prompt=episode.system or (),
        tools=list(TOOLS.values()),
        model_settings={"max_tokens": MOST_TOKENS},
        retries=3,
    )
    history: Any = [pydantic_message(message) for message in episode.example] or None
    for question in (episode.question, FOLLOW_UP):
        limits = UsageLimits(request_limit=MOST_TURNS)
        result = await agent.run(question, message_history=history, usage_limits=limits)
        history = result.all_messages()


def langchain_message(message: Any) -> Any:
    if call := call_in(message):
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        calls = [{"id": "example", "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    return message


async def play_langgraph(episode: Episode) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.prebuilt import create_react_agent

    model: Any = ChatOpenAI(
        model="policy", base_url=episode.base_url, api_key=episode.key, max_completion_tokens=MOST_TOKENS
    )
    agent: Any = create_react_agent(  # moved to the package langchain, which has more than this needs
        model, [tool(function) for function in TOOLS.values()], prompt=episode.system, checkpointer=InMemorySaver()
    )
    config = {"configurable": {"thread_id": episode.id}, "recursion_limit": 2 * MOST_TURNS + 1}
    messages: Any = [langchain_message(message) for message in episode.example]
    for question in (episode.question, FOLLOW_UP):
        await agent.ainvoke({"messages": [*messages, {"role": "user", "content": question}]}, config)
        messages = []


def smolagents_run(episode: Episode, writes_code: bool) -> None:
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("policy", api_base=episode.base_url, api_key=episode.key, max_tokens=MOST_TOKENS)
    tools = [tool(function) for function in TOOLS.values()]
    kind: Any = CodeAgent if writes_code else ToolCallingAgent
    agent = kind(tools=tools, model=model, instructions=episode.system, max_steps=MOST_TURNS, verbosity_level=0)
    for i, question in enumerate((episode.question, FOLLOW_UP)):
        agent.run(question, reset=i == 0)


async def play_smolagents(episode: Episode) -> None:
    await asyncio.to_thread(smolagents_run, episode, False)


async def play_smolagents_code(episode: Episode) -> None:
    await asyncio.to_thread(smolagents_run, episode, True)


async def play_anthropic(episode: Episode) -> None:
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=episode.base_url.removesuffix("/v1"), api_key=episode.key)
    tools: Any = []
    for name in TOOLS:
        fields = schema(name)
        fields["input_schema"] = fields.pop("parameters")
        tools.append(fields)
    messages: list[Any] = []
    for question in (episode.question, FOLLOW_UP):
        messages.append({"role": "user", "content": question})
        for _ in range(MOST_TURNS):
            answer = await client.messages.create(
                model="policy", system=episode.system, messages=messages, tools=tools, max_tokens=MOST_TOKENS
            )
            messages.append({"role": "assistant", "content": answer.content})
            calls: Any = [block for block in answer.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": called(call.name, call.input)}
                for call in calls
            ]
            if not results:
                break
            messages.append({"role": "user", "content": results})


async def play_anthropic_stream(episode: Episode) -> None:
    """As `anthropic`, by its tool runner, whose messages are streamed."""
    from anthropic import AsyncAnthropic, beta_async_tool

    client = AsyncAnthropic(base_url=episode.base_url.removesuffix("/v1"), api_key=episode.key)

    def tool_of(function: Callable[..., int]) -> Any:
        async def run(a: int, b: int) -> str:
            return str(function(a, b))

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return beta_async_tool(run)

    messages: list[Any] = []
    for question in (episode.question, FOLLOW_UP):
        messages.append({"role": "user", "content": question})
        runner: Any = client.beta.messages.tool_runner(
            model="policy",
            system=episode.system,
            messages=list(messages),
            tools=[tool_of(function) for function in TOOLS.values()],
            max_tokens=MOST_TOKENS,
            max_iterations=MOST_TURNS,
            stream=True,
        )
        async for stream in runner:
            message = await stream.get_final_message()
            messages.append({"role": "assistant", "content": message.content})
            response = await runner.generate_tool_call_response()
            if response is not None:
                messages.append(response)


CLIENTS: dict[str, Callable[[Episode], Awaitable[None]]] = {
    name.removeprefix("play_").replace("_", "-"): play for name, play in globals().items() if name.startswith("play_")
}


def record_requests(path: Path) -> None:
    """Write the body of each request that a client sends."""
    import httpx2

    lines = path.open("a", encoding="utf-8")

    def note(request: Any) -> None:
        body = json.loads(request.content) if request.content else None
        lines.write(json.dumps({"path": request.url.path, "body": body}) + "\n")
        lines.flush()

    for kind in (httpx2.Client, httpx2.AsyncClient):
        send = kind.send

        if inspect.iscoroutinefunction(send):

            async def send_async(self: Any, request: Any, *args: Any, _send: Any = send, **kwargs: Any) -> Any:
                note(request)
                return await _send(self, request, *args, **kwargs)

            kind.send = send_async  # type: ignore[method-assign]
        else:

            def send_sync(self: Any, request: Any, *args: Any, _send: Any = send, **kwargs: Any) -> Any:
                note(request)
                return _send(self, request, *args, **kwargs)

            kind.send = send_sync  # type: ignore[method-assign]


def post(url: str, token: str, body: Any = None) -> Any:
    """Returns what the server says."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=900) as response:
        return json.load(response)


async def play_episode(client: str, url: str, token: str) -> dict[str, Any]:
    """Returns how an episode went."""
    facts = await asyncio.to_thread(post, f"{url}/episodes", token, {"tag": client})
    error = ""
    try:
        await asyncio.wait_for(CLIENTS[client](Episode(facts)), 900)
    except Exception as failure:  # noqa: BLE001 - an agent that gives up has an episode too
        error = f"{type(failure).__name__}: {failure}"[:300]
    result = await asyncio.to_thread(post, f"{url}/episodes/{facts['id']}/end", token)
    return {"error": error, "uid": result.get("uid"), "result": result, "tool_results": len(RESULTS)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("url")
    parser.add_argument("token")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--record", type=Path, help="where to write the bodies of requests")
    options = parser.parse_args()
    out, sys.stdout = sys.stdout, sys.stderr  # where smolagents writes, whatever its verbosity
    os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}
    if options.record:
        record_requests(options.record)
    episodes = (play_episode(options.client, options.url, options.token) for _ in range(options.episodes))
    for result in await asyncio.gather(*episodes):
        print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
