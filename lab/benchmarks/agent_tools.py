"""An agent outside a run trains its model: SmolLM2 learns to call a tool through `tba serve`, and in the process.

    tba model smollm2 --out smollm2
    python lab/benchmarks/agent_tools.py --model smollm2 --seeds 0 1 2 --sides agent environment

Side `environment` is the recipe `tools` as it is, with one searcher. Side `agent` is the same recipe with `--searchers
0` and a server: `--agents` threads of this program take problems, send chat completions with the tools' schemas, make
the calls that they are answered with, send what the tools give, and end their episodes. They make the calls as the
environment does, errors included, since an episode whose tools say otherwise is rejected. The run acts the turns again
and gives the reward itself.

A row has held-out accuracy before and after (sampled, 200 problems), seconds, episodes, rejected episodes, the share of
episodes of one segment, and the tokens that the server read. Rows go to `--rows` as runs end.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from tba.environments.calculator import Multiplication
from tba.environments.tools import Call, bind_arguments, find_tools, format_result
from tba.record.evaluations import read_evaluations
from tba.record.summary import Summary

ROWS = Path(__file__).resolve().parents[1] / "results" / "agent_tools.csv"
COLUMNS = ("side", "seed", "before", "after", "seconds", "episodes", "rejected", "one_segment", "tokens_read")
SECONDS = 600.0  # that a request may take


class Agent:
    """Plays episodes until the run ends."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self.counts: Counter[str] = Counter()
        self.tools = find_tools(Multiplication())

    def play(self) -> None:
        """Play one episode after another."""
        while True:
            try:
                episode = self.post("/episodes", {}, self.token)
            except OSError:
                return
            try:
                self.act(episode)
                result = self.post(f"/episodes/{episode['id']}/end", {}, self.token)
            except OSError:
                continue
            self.counts["episodes"] += 1
            self.counts["rejected"] += result["reward"] is None

    def act(self, episode: Any) -> None:
        """Call the model, and the tools that it calls, until it answers."""
        messages = list(episode["prompt"])
        for _ in range(3):
            body = {"model": "policy", "messages": messages, "tools": episode["tools"]}
            message = self.post("/v1/chat/completions", body, episode["api_key"])["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return
            messages += [self.call(call) for call in message["tool_calls"]]

    def call(self, call: Any) -> dict[str, str]:
        """Returns the message with what a tool gives, or with the error that the environment gives."""
        function = call["function"]
        try:
            arguments = bind_arguments(self.tools, Call(function["name"], json.loads(function["arguments"])))
            content = format_result(self.tools[function["name"]](**arguments))
        except ValueError as error:
            content = f"error: {error}"
        except Exception as error:  # noqa: BLE001 - as the environment says it
            content = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    def post(self, path: str, body: Any, key: str) -> Any:
        """Returns the JSON that a request is answered with."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return json.load(response)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", choices=("agent", "environment"), default=["agent", "environment"])
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("settings", nargs="*", help="behind --: further words of `tba train tools`")
    options = parser.parse_args()
    for seed in options.seeds:
        for side in options.sides:
            with tempfile.TemporaryDirectory() as folder:
                row = measure(side, seed, options, Path(folder))
            is_new = not options.rows.exists()
            with options.rows.open("a", newline="") as file:
                writer = csv.writer(file)
                writer.writerows([COLUMNS] if is_new else [])
                writer.writerow(row)
            print(dict(zip(COLUMNS, row, strict=True)), flush=True)
    return 0


def measure(side: str, seed: int, options: argparse.Namespace, folder: Path) -> tuple[Any, ...]:
    """Returns the row of one run."""
    program = [sys.executable, "-m", "tba"]
    words = ["train", "tools", "--model.path", options.model, "--seed", str(seed), "--runs", str(folder)]
    words += ["--run-name", "run", *options.settings]
    start, run = time.monotonic(), folder / "run"
    if side == "environment":
        subprocess.run([*program, *words], check=True, stdout=subprocess.DEVNULL)
        counts = Counter(episodes=0)
    else:
        with subprocess.Popen([*program, *words, "--searchers", "0"], stdout=subprocess.DEVNULL) as training:
            counts = serve(program, run, training, options.agents)
    evaluations = [e for e in read_evaluations(run) if e.metric == "pass@1/sampled"]
    summary = Summary.read(run)
    served = {} if summary is None else summary.served
    one_segment = served.get("episodes of one segment", 0) / max(1, served.get("episodes", 0))
    before, after, seconds = evaluations[0].value, evaluations[-1].value, round(time.monotonic() - start)
    figures = (counts["episodes"], counts["rejected"], round(one_segment, 4), served.get("tokens read", 0))
    return (side, seed, before, after, seconds, *figures)


def serve(program: list[str], run: Path, training: Any, agents: int) -> Counter[str]:
    """Serve a run to agents until it ends; returns their counts."""
    facts = run / "serve.json"
    server = None
    while server is None or server.poll() is not None:  # the run may not have begun
        if training.poll() is not None:
            raise SystemExit(f"the run ended with exit code {training.returncode}")
        time.sleep(2)
        if not (run / "recipe.json").exists():
            continue
        words = [*program, "serve", "--run", str(run), "--port", "0"]
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        while server.poll() is None and not facts.exists():
            time.sleep(0.5)
    access = json.loads(facts.read_text())
    agent = Agent(access["url"], next(iter(access["tokens"].values())))
    threads = [threading.Thread(target=agent.play, daemon=True) for _ in range(agents)]
    for thread in threads:
        thread.start()
    training.wait()
    server.wait(SECONDS)
    return agent.counts


if __name__ == "__main__":
    sys.exit(main())
