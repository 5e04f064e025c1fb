"""A stand-in for a judge: an OpenAI-compatible endpoint on this machine that grades a name by a rule.

    python examples/judge_server.py [PORT]

With it `my_judge.py` runs without a key, and what it learns is known: short names that end in a or o get 10.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8808


def grade(question: str) -> int:
    name = re.search(r"name '([a-z]*)'", question)
    return (5 * (len(name[1]) <= 6) + 5 * name[1].endswith(("a", "o"))) if name else 0


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = str(grade(request["messages"][-1]["content"]))
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Says nothing of each call."""


def server(port: int) -> ThreadingHTTPServer:
    return ThreadingHTTPServer(("127.0.0.1", port), Judge)


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else PORT
    try:
        judge = server(port)
    except OSError as error:
        sys.exit(f"port {port} cannot be used ({error.strerror}): give another, such as {port + 1}")
    print(f"a stand-in for a judge is at http://127.0.0.1:{port}/v1 until Ctrl-C")
    judge.serve_forever()
