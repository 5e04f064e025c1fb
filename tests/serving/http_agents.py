"""Agents that speak HTTP to `tba serve`, for as long as they live: `python http_agents.py RUN NAME FILE`.

They write into FILE, as a line of JSON each, the uid and the reward of every episode that they are told is on the disk.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

SECONDS = 240.0  # that a busy machine may take for what takes a few


def ask(url: str, method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    """The status and the body of what a server answers."""
    data = json.dumps(body or {}).encode() if method == "POST" else None
    request = Request(url + path, data, {"authorization": f"Bearer {key}"}, method=method)
    try:
        with urlopen(request, timeout=SECONDS) as response:
            return response.status, json.loads(response.read() or b"null")
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def play(url: str, token: str, **fields: Any) -> tuple[int, Any]:
    """What an agent gets for an episode of two calls: the status and the result of its end."""
    status, episode = ask(url, "POST", "/episodes", token, fields)
    if status != 201:
        return status, episode
    messages = list(episode["prompt"])
    for _ in range(2):
        body = {"messages": messages, "max_tokens": 5}
        status, answer = ask(url, "POST", "/v1/chat/completions", episode["api_key"], body)
        if status != 200:
            return status, answer
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Are you sure?"}]
    return ask(url, "POST", f"/episodes/{episode['id']}/end", token, {"claimed_reward": 77.5})


def play_on(run: Path, name: str, record: Path) -> None:
    """Play until the process is killed, with the token of this name, at whatever server the run has."""
    pause = threading.Event()
    while not pause.wait(0.05):  # ends: it is killed
        with suppress(OSError, HTTPException, ValueError):  # the server is not there, or ends
            facts = json.loads((run / "serve.json").read_text())
            status, result = play(facts["url"], facts["tokens"][name], tag=name)
            if status == 200 and result["on_disk"]:
                with record.open("a") as file:
                    file.write(json.dumps([result["uid"], result["reward"]]) + "\n")


def acknowledged(record: Path) -> dict[str, float]:
    """The rewards of what was written, by uid."""
    return dict(map(json.loads, record.read_bytes().splitlines())) if record.exists() else {}


if __name__ == "__main__":
    play_on(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
