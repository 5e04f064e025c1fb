"""Headless Chromium of the system, driven over its own pipe (DevTools protocol): no package is needed for it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEADLINE = 60.0  # seconds, of anything that the browser is asked for
_PRESSED = {"/": 191, "r": 82, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}


def program() -> str | None:
    """The browser's program; None where there is none (Debian: `apt-get install chromium`)."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page. It notes every request, console message and exception of the page."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        own = program()
        assert own is not None, "there is no Chromium on this machine"
        (reads, self._write), (self._read, writes) = os.pipe(), os.pipe()
        flags = [
            *("--headless=new", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}"),
            *(["--no-sandbox"] if os.getuid() == 0 else []),  # Chromium refuses to run as root with one
        ]
        # it reads commands from descriptor 3 and answers on descriptor 4
        script = f'exec "$@" 3<&{reads} 4>&{writes}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", own, *flags, "about:blank"],
            pass_fds=(reads, writes), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._buffer, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []  # console messages above "info", exceptions, violations of the policy
        target = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.size(width, height)

    def open(self, address: str) -> float:
        """Load a page; returns the seconds until it has been loaded and drawn."""
        self._call("Page.navigate", url="about:blank")  # with another hash alone nothing would be loaded
        self.until("location.href === 'about:blank' && document.readyState === 'complete'")
        self.requests, self.complaints = [], []
        began = time.monotonic()
        self._call("Page.navigate", url=address)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - began

    def run(self, script: str) -> Any:
        """The value of an expression on the page; that of a promise is waited for."""
        said = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait, frame by frame, for a condition of the page."""
        look = f"""new Promise((done, failed) => {{
            const limit = performance.now() + {1000 * DEADLINE};
            const look = () => ({condition}) ? done(true) : performance.now() > limit ? failed() : setTimeout(look, 10);
            look();
        }})"""
        assert self.run(look), f"the page never came to {condition}"

    def size(self, width: int, height: int) -> None:
        """Give the page this size."""
        scale = {"deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, **scale)

    def click(self, x: float, y: float) -> None:
        """Press and release the mouse at a point."""
        self.drag((x, y), (x, y))

    def drag(self, start: tuple[float, float], end: tuple[float, float], clicks: int = 1) -> None:
        """Press the mouse at one point and release it at another."""
        for kind, (x, y) in (
            ("mouseMoved", start),
            ("mousePressed", start),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            button = {"button": "none"} if kind == "mouseMoved" and start == end else {"button": "left"}
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=clicks, **button)

    def middle(self, selector: str) -> tuple[float, float]:
        """The middle of the first element of a selector, scrolled into sight."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def press(self, key: str) -> None:
        """Press one key."""
        code = {"windowsVirtualKeyCode": _PRESSED[key]}
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def type_text(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def picture(self, path: Path, full: bool = False) -> None:
        """Save what is in sight, or the whole page, as a PNG."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        said = {"id": self._number, "method": method, "params": params}
        if self._session:
            said["sessionId"] = self._session
        os.write(self._write, json.dumps(said).encode() + b"\0")
        limit = time.monotonic() + DEADLINE
        while True:
            answer = self._next(limit, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _next(self, limit: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, limit - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, f"the browser did not answer {method} within {DEADLINE:g} s"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.complaints.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(f"{params['type']}: {params['args']}")

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)  # it ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
