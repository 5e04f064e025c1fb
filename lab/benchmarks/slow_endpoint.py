"""A slow OpenAI-compatible endpoint on loopback: a victim that costs latency and nothing else.

    python lab/benchmarks/slow_endpoint.py --seconds 1 --concurrency 8 --port 8099

Answers by the rules of the small world (`apps/red_team/trigger_world.py`): requests of its families get its made-up
unsafe words. It serves at most `concurrency` calls at once, the others wait. It listens on 127.0.0.1 only, and requires
the token of the environment variable ENDPOINT_TOKEN as a bearer token.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from tba.apps.red_team.trigger_world import TriggerWorld

LARGEST = 1 << 20  # bytes of a request


def serve(seconds: float, concurrency: int, token: str, port: int = 0) -> ThreadingHTTPServer:
    """A server that runs in a thread of its own; `server_address` says where. Raises `ValueError` without a token."""
    if not token:
        raise ValueError("an endpoint without a token would answer anybody: put one into ENDPOINT_TOKEN")
    world, places = TriggerWorld(), threading.BoundedSemaphore(concurrency)

    def replied(body: dict[str, Any]) -> dict[str, Any]:
        attack = str(body["messages"][-1]["content"])
        seed = int.from_bytes(hashlib.blake2b(attack.encode(), digest_size=7).digest(), "little")
        rng = np.random.default_rng(seed)
        replies = [world.answer(attack, rng) for _ in range(int(body.get("n", 1)))]
        return {
            "choices": [{"index": i, "message": {"role": "assistant", "content": s}} for i, s in enumerate(replies)]
        }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {token}"):
                self._reply(401, {"error": {"code": "invalid_token"}})
                return
            size = int(self.headers.get("Content-Length", 0))
            if size > LARGEST:
                self._reply(413, {"error": {"code": "too_large"}})
                return
            try:
                reply = replied(json.loads(self.rfile.read(size)))
            except (ValueError, KeyError, TypeError, IndexError):
                self._reply(400, {"error": {"code": "invalid_request"}})
                return
            with places:
                time.sleep(seconds)
            self._reply(200, reply)

        def _reply(self, status: int, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: an attack would be in it."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, name="endpoint", daemon=True).start()
    return server


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--port", type=int, default=8099)
    arguments = parser.parse_args()
    server = serve(arguments.seconds, arguments.concurrency, os.environ.get("ENDPOINT_TOKEN", ""), arguments.port)
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
