"""Agents of several clients at `tba serve`: what each makes of an episode, and whether its tokens are those that were
sampled.

    python3.11 -m venv clients
    clients/bin/pip install openai openai-agents pydantic-ai-slim[openai] langgraph langchain-openai \\
        smolagents[openai] anthropic
    python lab/benchmarks/agent_clients.py --model smollm2 --python clients/bin/python --out build/clients [--small]

With --small the model is one of two layers with SmolLM2's tokenizer, made in a minute of a processor. It tries clients
and the check quickly, but behind long prompts most of its calls are malformed: take a SmolLM2 that the recipe `tools`
has trained for episodes with calls of tools, and --example, with which prompts begin as that recipe's do (openai,
agents, pydantic-ai and langgraph).

A run without searchers waits for more answers than there will be, so that all are sampled from the first weights. All
clients then play their episodes (agent_clients_side.py) at once. *One segment* are episodes whose calls all went on
from one another; the reasons for the others are the server's. *Exact* are the tokens of the journal whose
log-probability, computed anew after what the row says they were sampled after, is the one that they were sampled with
(to 0.02: the engine and the reference round differently). *Read* are tokens that the engine had to read, *re-rendered*
those that it would have read if every request had been a new prompt.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import tba
from tba.environments.calculator import EXAMPLE
from tba.recipes.tools import recipe as tools
from tba.replay.follower import JournalFollower
from tba.replay.reading import JournalFile
from tba.rewards.exact_answer import grade
from tba.runtime.run_directory import RunDirectory

CLIENTS = (
    *("openai", "openai-dump", "openai-stream", "agents", "agents-stream", "agents-responses"),
    *("agents-responses-stream", "pydantic-ai", "langgraph", "smolagents", "smolagents-code", "anthropic"),
    "anthropic-stream",
)
COLUMNS = (
    *("client", "episodes", "calls", "tool_results", "one_segment", "sampled", "exact", "worst", "read", "rerendered"),
    "reasons",
)
SYSTEM = (
    "You calculate with tools. For example, when the user asks: What is 12 * 34? you answer: "
    '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call> '
    "and when the tool says 408 you answer: 408. Answer with nothing else."
)
LESSONS = 400  # of a small model, four chats each
TOLERANCE = 0.02  # of a log-probability
DEADLINE_SECONDS = 1800.0


def right(completion: str, answer: str) -> float:
    return float(bool(grade(completion, answer)))


@dataclass(frozen=True)
class Products:
    """Products, and what is 7 more."""

    name: str = "products"
    has_example: bool = False  # prompts begin with the example of the recipe `tools`, else with a system message

    def problems(self, split: str) -> list[tba.Problem]:
        first = 0 if split == "train" else 64
        return [self._problem(12 + i % 80, 11 + 7 * i % 80) for i in range(first, first + 64)]

    def _problem(self, a: int, b: int) -> tba.Problem:
        before = EXAMPLE[:-1] if self.has_example else ({"role": "system", "content": SYSTEM},)
        messages = (*before, {"role": "user", "content": f"What is {a} * {b}?"})
        return tba.Problem(messages, {"answer": str(a * b + 7)})

    def reward(self) -> tba.WeightedFunctions:
        return tba.WeightedFunctions(((right, 1.0),))


assert isinstance(tools.model, tba.HuggingFace)
recipe = replace(
    tools,
    name="agent_clients",
    description="answers of agents, from the first weights alone",
    task=Products(),
    model=replace(tools.model, generation=tba.EngineSettings(slots=8, max_completion_tokens=6000)),
    prompts=tba.PromptSettings(max_tokens=384),
    evaluation=tba.EvaluationSettings(every=0, problems=1, problems_during=1, greedy=False, batch_size=1),
    replay=replace(tools.replay, pacing=tba.Pacing(warm_up=4096)),
    searchers=0,
    samples_per_prompt=2,
    policy_temperature=0.4,  # most calls are then well-formed
    exploration=tba.Fixed(temperature=0.4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder of SmolLM2-135M-Instruct")
    parser.add_argument("--python", type=Path, required=True, help="of the clients' environment")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the run, its logs and recorded requests")
    parser.add_argument("--client", choices=CLIENTS, action="append", help="one that plays; else all")
    parser.add_argument("--episodes", type=int, default=8, help="of each client")
    parser.add_argument("--small", action="store_true", help="sample from a small model that is made here")
    parser.add_argument("--example", action="store_true", help="begin prompts as the recipe `tools` does")
    parser.add_argument("--csv", type=Path, help="where to write the figures, a line per client")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.small:
        folder = options.out / "small"
        options.model = folder if folder.exists() else make_small_model(options.model, folder)
    run, script = options.out / "runs" / "run", Path(__file__).resolve()
    settings = ["--model.path", str(options.model.resolve()), "--run-name", run.name]
    settings += ["--task.has-example"] if options.example else []
    trainer = start(["train", str(script), *settings], options.out, "train.log")
    try:
        wait_for(run / "recipe.json", trainer)
        server = start(["serve", "--run", str(run.resolve()), "--port", "0"], options.out, "serve.log")
        try:
            wait_for(run / "serve.json", server)
            uids, tool_results = play(options, json.loads((run / "serve.json").read_text()))
        finally:
            end(server)
        rows = figures(RunDirectory(run), uids, tool_results)
    finally:
        end(trainer)
    print(
        "| client | episodes | calls | tools' results | one segment | exact tokens | worst | read | re-rendered | new |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        client, episodes, calls, results, one_segment, sampled, exact, worst, read, rerendered, reasons = row
        shares = f"{one_segment} of {episodes} | {exact} of {sampled} | {worst:.1e}"
        print(f"| {client} | {episodes} | {calls} | {results} | {shares} | {read:,} | {rerendered:,} | {reasons} |")
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows((COLUMNS, *rows))


def make_small_model(source: Path, folder: Path) -> Path:
    """Returns the folder of a small model with the tokenizer of another, which answers users by calls and tools by
    numbers, mostly.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    model, rng = LlamaForCausalLM(config), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(LESSONS):
        optimizer.zero_grad()
        for _ in range(4):
            question, answer = (tokenizer.encode(text, add_special_tokens=False) for text in lesson(rng))
            tokens, length = torch.tensor([question + answer]), len(answer)
            places = torch.arange(tokens.shape[1])[None] + rng.randrange(6000)
            logits = model(input_ids=tokens, position_ids=places, logits_to_keep=length + 1).logits[0, :-1]
            (cross_entropy(logits, tokens[0, -length:]) / 4).backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def lesson(rng: random.Random) -> tuple[str, str]:
    """Returns the end of a chat, and an answer to it."""
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'
    sum_call = '<tool_call>{"name": "add", "arguments": {"a": 408, "b": 7}}</tool_call>'
    calls = (
        call,
        sum_call,
        f"Let me see.\n{call}",
        f"<think>\nHm.\n</think>\n\n{sum_call}",
        f"{call}\n{sum_call}",
        "408",
    )
    answers = ("408", "415", "The answer is 408.", "<think>\nEasy.\n</think>\n\n408", "", call)
    role = rng.choice(("user", "tool"))
    says = str(rng.randint(100, 9999)) if role == "tool" else f"What is {rng.randint(10, 99)} * {rng.randint(10, 99)}?"
    before = f"{SYSTEM}\n{call}"[rng.randrange(300) :] * rng.randint(0, 2)
    question = f"{before}<|im_end|>\n<|im_start|>{role}\n{says}<|im_end|>\n<|im_start|>assistant\n"
    return question, rng.choice(answers if role == "tool" else calls) + "<|im_end|>"


def start(words: list[str], folder: Path, log: str) -> subprocess.Popen[bytes]:
    """Returns a process that is one of our commands."""
    with (folder / log).open("wb") as file:
        command = [sys.executable, "-m", "tba", *words]
        return subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT)


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{path} did not appear; see the log beside it")
        time.sleep(0.2)


def play(options: argparse.Namespace, facts: Any) -> tuple[dict[str, set[str]], dict[str, int]]:
    """Returns the uids of each client's episodes, and how many results its tools gave."""
    side, players = Path(__file__).with_name("agent_clients_side.py"), {}
    for client in options.client or CLIENTS:
        requests = options.out / f"requests-{client}.jsonl"
        requests.unlink(missing_ok=True)
        command = [str(options.python), str(side), client, facts["url"], facts["tokens"]["agent"]]
        command += ["--episodes", str(options.episodes), "--record", str(requests)]
        with (options.out / f"episodes-{client}.jsonl").open("wb") as file:
            players[client] = subprocess.Popen(command, stdout=file)
    uids, tool_results = {}, {}
    for client, player in players.items():
        player.wait(DEADLINE_SECONDS)
        lines = (options.out / f"episodes-{client}.jsonl").read_text().splitlines()
        uids[client] = {json.loads(line)["uid"] for line in lines}
        tool_results[client] = max((json.loads(line)["tool_results"] for line in lines), default=0)
    return uids, tool_results


def figures(run: RunDirectory, uids: dict[str, set[str]], tool_results: dict[str, int]) -> list[tuple[Any, ...]]:
    """Returns the `COLUMNS` of each client."""
    rows, trajectories = [], journal(run)
    reference = run.recipe().model.reference(recipe.policy_temperature, tba.Version())
    for client, client_uids in uids.items():
        episodes = [t for t in trajectories if t.uid in client_uids]
        differences = np.concatenate([np.zeros(0), *(log_differences(reference, t) for t in episodes)])
        reasons = sum((Counter(t.provenance.get("new_segments", {})) for t in episodes), Counter[str]())
        rows.append(
            (
                *(client, len(episodes), sum(t.provenance["calls"] for t in episodes)),
                *(tool_results[client], sum(len(t.completion.segments) == 1 for t in episodes)),
                *(len(differences), int((differences <= TOLERANCE).sum()), float(differences.max(initial=0.0))),
                *(sum(t.provenance["tokens_read"] for t in episodes), sum(map(rerendered_tokens, episodes))),
                "; ".join(f"{count} {reason}" for reason, count in reasons.items()),
            )
        )
    return rows


def journal(run: RunDirectory) -> list[tba.Trajectory]:
    path = run.journal(run.recipe())
    with JournalFile(path) as file, JournalFollower(path, file=file) as follower:
        return follower.drain()


def log_differences(reference: Any, trajectory: tba.Trajectory) -> Any:
    """Returns how far the log-probability of each sampled token is from the one that it was sampled with."""
    completion = trajectory.completion
    ((log_T,),) = reference.log_probabilities_of([(trajectory.prompt, [completion])])
    mask = np.ones(len(completion.tokens), bool) if completion.mask is None else completion.mask
    assert completion.log_behavior is not None
    return np.abs(log_T - completion.log_behavior)[mask]


def rerendered_tokens(trajectory: tba.Trajectory) -> int:
    """Returns how many tokens all requests of an episode have in all, each as a prompt of its own."""
    completion = trajectory.completion
    begins = [0] * len(completion.segments) if completion.begins is None else [b for b, _ in completion.segments]
    reads_prompt = completion.begins is None or completion.begins[0] > 0
    count = 0
    for turn, _ in completion.turns:
        begin = max(b for b in begins if b <= turn)
        count += turn - begin + (len(trajectory.prompt.tokens) if begin == 0 and reads_prompt else 0)
    return count


if __name__ == "__main__":
    main()
