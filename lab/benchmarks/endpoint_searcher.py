"""Another model's answers beside a run's own: the quickstart with a scripted endpoint that knows the sums, or does not.

    python lab/benchmarks/endpoint_searcher.py --seeds 0 1 --sides alone right wrong

Side `alone` is the quickstart as it is, with one searcher. Sides `right` and `wrong` have a second one, `tba search
--endpoint`, which asks a server of this program: it answers a sum right in 90 % or in 10 % of its answers, and else
with one wrong digit. A call takes it `--delay` seconds. All share the machine's cores, this program's server included.

A row is an evaluation: accuracy (greedy, held-out problems) with the updates and seconds of its weights, and the share
of the run's answers that came from the endpoint. Rows go to `--rows` as runs end.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tba.record.evaluations import read_evaluations
from tba.replay.follower import JournalFollower

ROWS = Path(__file__).resolve().parents[1] / "results" / "endpoint_searcher.csv"
COLUMNS = ("side", "seed", "updates", "seconds", "accuracy", "problems", "answers", "endpoint_share")
RIGHT_SHARE = {"right": 0.9, "wrong": 0.1}
SECONDS = 600.0  # that a command may take to begin or to end


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def answering(right_share: float, delay: float) -> ThreadingHTTPServer:
    """Returns a server that completes sums, the least significant digit first."""
    rng = random.Random(0)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(delay)
            a, b = question["prompt"].removesuffix("=").split("+")
            digits = str(int(a) + int(b))[::-1]
            if rng.random() >= right_share:
                place = rng.randrange(len(digits))
                digit = (int(digits[place]) + rng.randint(1, 9)) % 10
                digits = f"{digits[:place]}{digit}{digits[place + 1 :]}"
            usage = {"prompt_tokens": len(question["prompt"]), "completion_tokens": len(digits)}
            body = json.dumps({"choices": [{"text": digits, "finish_reason": "stop"}], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sides", nargs="+", choices=("alone", *RIGHT_SHARE), default=["alone", *RIGHT_SHARE])
    parser.add_argument("--delay", type=float, default=0.02)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("settings", nargs="*", help="behind --: further words of `tba train quickstart`")
    options = parser.parse_args()
    for seed in options.seeds:
        for side in options.sides:
            with tempfile.TemporaryDirectory() as folder:
                rows = measure(side, seed, options, Path(folder))
            is_new = not options.rows.exists()
            with options.rows.open("a", newline="") as file:
                csv.writer(file).writerows([COLUMNS, *rows] if is_new else rows)
            print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
    return 0


def measure(side: str, seed: int, options: argparse.Namespace, folder: Path) -> list[tuple[Any, ...]]:
    """Returns the rows of one run."""
    program, run = [sys.executable, "-m", "tba"], folder / "run"
    words = ["train", "quickstart", "--seed", str(seed), "--runs", str(folder), "--run-name", "run", *options.settings]
    with subprocess.Popen([*program, *words], stdout=subprocess.DEVNULL) as training:
        if side != "alone":
            print(search(program, run, training, side, options.delay), flush=True)
        if training.wait():
            raise SystemExit(f"the run ended with exit code {training.returncode}")
    with JournalFollower(run / "journal.sqlite") as journal:
        are_foreign = [trajectory.imported for trajectory in journal.drain()]
    share = round(sum(are_foreign) / len(are_foreign), 4)
    evaluations = [e for e in read_evaluations(run) if e.metric == "pass@1/greedy"]
    return [
        (side, seed, e.version.step, round(e.wall_seconds, 1), round(e.value, 4), e.n, len(are_foreign), share)
        for e in evaluations
    ]


def search(program: list[str], run: Path, training: subprocess.Popen[bytes], side: str, delay: float) -> str:
    """Join the run with an endpoint until it ends; returns what the searcher printed of its end."""
    with closing(_Closing(answering(RIGHT_SHARE[side], delay))) as server:
        words = [*program, "search", "--run", str(run), "--endpoint", server.url, "--model", side]
        deadline = time.monotonic() + SECONDS
        while training.poll() is None:  # the run may not have begun
            if (run / "recipe.json").exists():
                result = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
                if result.returncode == 0:
                    return " ".join(result.stdout.split()).partition("spent: ")[2]
            if time.monotonic() > deadline:
                training.kill()
                raise SystemExit(f"no searcher could join within {SECONDS:g} s")
            time.sleep(0.5)
    raise SystemExit(f"the run ended with exit code {training.returncode}, before an endpoint could join")


class _Closing:
    """A server that is closed once."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{server.server_address[1]}/v1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


if __name__ == "__main__":
    sys.exit(main())
