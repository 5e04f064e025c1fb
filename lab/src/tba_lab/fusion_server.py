"""A server that answers as SandboxFusion's `/run_code` does, by its published schema, for tests and benchmarks.

Programs run in the sandbox of `tba.rewards.sandbox`, never bare.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tba.rewards.sandbox import ProgramFailed, Sandbox
from tba.rewards.sandbox_kernel import Bounds, Level

_STATUS = {True: "Success", False: "Failed"}


@contextmanager
def fusion_server(level: Level = "landlock") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serves, and returns the URL and the list of the requests, which grows."""
    sandbox, requests = Sandbox(level), list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"path": self.path, **request})
            body = json.dumps(_run(sandbox, request)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        sandbox.close()


def _run(sandbox: Sandbox, request: dict[str, Any]) -> dict[str, Any]:
    if request["language"] != "python":
        return {"status": "SandboxError", "message": "only python is there", "files": {}}
    start = time.monotonic()
    deadline = start + request["run_timeout"]
    bounds = Bounds(request["run_timeout"], request["memory_limit_MB"] << 20)
    job = {"kind": "script", "code": request["code"], "stdin": request.get("stdin") or ""}
    try:
        program = sandbox.start(job, bounds, deadline, has_output=True)
    except ProgramFailed:
        return {"status": "SandboxError", "message": "it did not start", "files": {}}
    result: dict[str, Any] = {"stdout": "", "stderr": "", "return_code": None}
    try:
        result["stdout"] = program.output(deadline).decode(errors="replace")
        result["return_code"] = program.end(wait=max(1e-3, deadline - time.monotonic())).status
        result["status"] = "Finished"
    except ProgramFailed as error:
        program.end()
        result["status"] = "TimeLimitExceeded" if error.reason == "timeout" else "Error"
    result["execution_time"] = time.monotonic() - start
    is_success = result["status"] == "Finished" and result["return_code"] == 0
    return {"status": _STATUS[is_success], "message": "", "compile_result": None, "run_result": result, "files": {}}
