"""An OpenAI-compatible server on loopback, which replies by a script."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]  # status, headers, body
Script = Callable[[int, dict[str, Any]], Reply]  # (which call, from 0; what was asked) -> reply


class Server:
    """Replies by a script; remembers what it was asked and with which headers."""

    def __init__(self) -> None:
        self.script: Script = lambda n, asked: said(["?"])
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.paths: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = len(server.asked)
                server.asked.append(body)
                server.tokens.append(self.headers["Authorization"])
                server.paths.append(self.path)
                status, headers, reply = server.script(number, body)
                if not status:  # breaks off
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(reply))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                pass

        self.http = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait to be accepted: none is to be slow for that

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that no longer waits
            super().handle_error(request, client_address)


def said(texts: list[str | None], chat: bool = True, usage: tuple[int, int] | None = None, end: str = "stop") -> Reply:
    ends = {"finish_reason": end}
    choices = [{"message": {"content": t}, **ends} if chat else {"text": t, **ends} for t in texts]
    stated = {} if usage is None else {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    return 200, {}, json.dumps({"choices": choices, **stated}).encode()


@contextmanager
def serving() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield running
    running.http.shutdown()
    running.http.server_close()
    thread.join(5)
