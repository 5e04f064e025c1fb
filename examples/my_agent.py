"""An agent of yours trains the model that it calls: episodes, calls of the model, tools. It needs nothing of `tba`.

    tba train examples/my_tool.py --searchers 0 --run-name agents   # in one terminal
    tba serve --run runs/agents                                     # in a second one, once the run has begun
    python examples/my_agent.py runs/agents                         # in a third one

Any client of OpenAI's API does in place of `post`. The agent ends with the run. docs/agents.md explains each part.
"""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PRICES = {"bread": 31, "milk": 12, "cheese": 79, "rice": 25, "beans": 18, "onions": 14, "apples": 36, "pears": 42}
PRICES |= {"tea": 57, "coffee": 83, "salt": 11, "sugar": 23, "honey": 68, "flour": 19, "butter": 64, "eggs": 47}
AGENTS = 32  # at the same time


def post(url: str, key: str, body: object) -> Any:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def run_tool(call: Any) -> Any:  # what it says has to be what the run's own environment says
    try:
        result = str(PRICES[json.loads(call["function"]["arguments"])["item"]])
    except KeyError as error:
        result = f"error: KeyError: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


def play(server: Any) -> float | None:
    token = server["tokens"]["agent"]
    episode = post(f"{server['url']}/episodes", token, {})  # 1. a problem of the run
    messages = list(episode["prompt"])
    for _ in range(3):  # 2. the agent, with as many calls as it likes
        body = {"model": "policy", "messages": messages, "tools": episode["tools"]}
        answer = post(f"{episode['base_url']}/chat/completions", episode["api_key"], body)["choices"][0]["message"]
        messages.append(answer)
        if not answer.get("tool_calls"):
            break
        messages += [run_tool(call) for call in answer["tool_calls"]]
    return post(f"{server['url']}/episodes/{episode['id']}/end", token, {})["reward"]  # 3. what it was worth


def main(run: str) -> None:
    server = json.loads(Path(run, "serve.json").read_text())
    rewards: list[float] = []

    def play_on(_: int) -> None:
        while True:
            try:
                reward = play(server)
            except OSError:  # the run has ended
                return
            rewards.append(reward or 0.0)
            if len(rewards) % 100 == 0:
                print(f"{len(rewards)} episodes, mean reward of the last 100: {sum(rewards[-100:]) / 100:.2f}")

    with ThreadPoolExecutor(AGENTS) as threads:
        list(threads.map(play_on, range(AGENTS)))


if __name__ == "__main__":
    main(sys.argv[1])
