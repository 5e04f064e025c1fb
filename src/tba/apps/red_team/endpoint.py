"""A victim behind an OpenAI-compatible HTTP endpoint: `chat/completions` or `completions`. Standard library only.

Invariant: every wait has a deadline. A call that the server refuses temporarily (429, 5xx), that times out or whose
connection breaks is repeated a bounded number of times; any other refusal is an error at once. Neither an attack nor an
answer ever appears in an error or a log.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from tba.apps.red_team.victim import check_sampling
from tba.errors import TbaError, UserError
from tba.foreign import parsed
from tba.rewards.threads import in_threads

_FOR_THE_MOMENT = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_LONGEST_PAUSE = 60.0  # seconds
_LARGEST = 1 << 24  # bytes of a reply: an endpoint is not trusted to end


@dataclass(frozen=True)
class EndpointVictim:
    """A model behind an OpenAI-compatible HTTP endpoint. Each searcher has its own connections and rate limit."""

    url: str = ""  # base URL including the version, such as http://127.0.0.1:8000/v1
    model: str = ""  # the model's name there
    api: Literal["chat", "completions"] = "chat"  # the API that is called
    system: str = ""  # system message before the attack (chat only)
    token_variable: str = "OPENAI_API_KEY"  # noqa: S105 - the environment variable with the token; unset: none is sent
    temperature: float = 0.7
    top_p: float = 0.95
    max_tokens: int = 64  # longest answer
    timeout: float = 60.0  # seconds for one call
    retries: int = 5  # repetitions of a call that was refused temporarily, timed out or broke off
    pause: float = 1.0  # seconds before the first repetition, doubled each time; Retry-After is respected
    calls_per_second: float | None = None  # rate limit of one searcher; None: no limit
    concurrency: int = 8  # simultaneous calls of one searcher
    deadline: float = 600.0  # seconds for all calls of one round

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p, self.max_tokens)
        if self.url and not _is_address(self.url):
            raise UserError(f"the victim's url is {self.url!r}: give one such as http://127.0.0.1:8000/v1")
        if self.concurrency < 1 or self.retries < 0:
            raise UserError(
                f"the victim's concurrency is {self.concurrency} and its retries {self.retries}: give 1 or more calls "
                "at once, and 0 or more retries"
            )
        for name in ("timeout", "deadline", "calls_per_second"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"the victim's {name} is {value}, it must be above 0")
        if self.pause < 0:
            raise UserError(f"the victim's pause is {self.pause}: give seconds, 0 or more")

    def start(self) -> Endpoint:
        """Makes no call yet. Raises `UserError` without a url or a model."""
        if not self.url or not self.model:
            raise UserError(
                "a victim behind an endpoint needs --task.victim.url, such as http://127.0.0.1:8000/v1, and "
                "--task.victim.model, its name there"
            )
        return Endpoint(self)


class Refused(TbaError):
    """The endpoint did not answer, after all repetitions."""


class Rate:
    """Limits the calls per second: each waits for its turn."""

    def __init__(self, per_second: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._gap = 0.0 if per_second is None else 1.0 / per_second
        self._now, self._next, self._lock = now, 0.0, threading.Lock()

    def turn(self) -> float:
        """Returns the seconds to wait before the next call; turns are given in the order of requests."""
        with self._lock:
            now = self._now()
            at = max(now, self._next)
            self._next = at + self._gap
            return at - now


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as a refusal, so that the token and the attack go to no other address."""

    def redirect_request(self, *_: object) -> None:
        return None


def _token(variable: str) -> str:
    """Returns the token of the environment, empty if it is not set. Raises `UserError` if it cannot be in a header."""
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"the environment variable {variable} has characters that a token cannot have: set it again")
    return token


class Endpoint:
    """An `Answering` (see `victim`)."""

    def __init__(self, settings: EndpointVictim) -> None:
        self.settings = settings
        path = "chat/completions" if settings.api == "chat" else "completions"
        self._url = f"{settings.url.rstrip('/')}/{path}"
        self._rate = Rate(settings.calls_per_second)
        own = urlsplit(self._url).hostname in ("127.0.0.1", "localhost", "::1")
        self._opener = urllib.request.build_opener(_NoRedirects(), *([urllib.request.ProxyHandler({})] if own else []))
        self._token = _token(settings.token_variable)

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str]]:
        """Makes one call for each attack, several at once. Raises `UserError`, `Refused` or `DeadlineExceeded`."""
        s = self.settings
        calls = [functools.partial(self._all_of, attack, count) for attack in attacks]
        if not calls:
            return []
        what = f"the victim at {self._url}"
        return in_threads(calls, s.concurrency, s.deadline, lambda _: what, "--task.victim.deadline", here=False)

    def _all_of(self, attack: str, count: int) -> list[str]:
        """Returns `count` answers; a server that gives fewer is asked for the rest."""
        if self.settings.temperature == 0:  # all alike, and servers refuse to sample several greedily
            return self._ask(attack, 1)[:1] * count
        found: list[str] = []
        for _ in range(count):
            found += self._ask(attack, count - len(found))
            if len(found) >= count:
                return found[:count]
        raise Refused(f"the victim at {self._url} gave {len(found)} of {count} answers")

    def _ask(self, attack: str, count: int) -> list[str]:
        body = json.dumps(self._question(attack, count)).encode()
        for attempt in range(self.settings.retries + 1):
            time.sleep(self._rate.turn())
            try:
                return self._texts(self._post(body))
            except urllib.error.HTTPError as error:
                with error:
                    said, pause = _reason(error), _retry_after(error)
                if error.code not in _FOR_THE_MOMENT:
                    raise UserError(self._refusal(error.code, said)) from None
            except (OSError, http.client.HTTPException) as error:  # refused, broken off, timed out
                said, pause = f"{type(error).__name__}: {getattr(error, 'reason', error)}", None
            if attempt < self.settings.retries:
                time.sleep(min(_LONGEST_PAUSE, self.settings.pause * 2**attempt if pause is None else pause))
        raise Refused(
            f"the victim at {self._url} did not answer in {self.settings.retries + 1} calls, the last: {said}; "
            "see that it is up, lower --task.victim.calls-per-second, or raise --task.victim.retries"
        )

    def _question(self, attack: str, count: int) -> dict[str, Any]:
        s = self.settings
        sampling = {
            "model": s.model,
            "n": count,
            "max_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
        }
        if s.api == "completions":
            return {**sampling, "prompt": attack}
        system = [{"role": "system", "content": s.system}] if s.system else []
        return {**sampling, "messages": [*system, {"role": "user", "content": attack}]}

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self._url, body, headers)  # noqa: S310 - http or https, checked by the settings
        expires = time.monotonic() + self.settings.timeout
        with self._opener.open(request, timeout=self.settings.timeout) as reply:
            parts, size = [], 0
            while part := reply.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > _LARGEST or time.monotonic() > expires:
                    raise TimeoutError(f"no end of the reply in {self.settings.timeout:g} s and {size} bytes")
        return b"".join(parts)

    def _texts(self, reply: bytes) -> list[str]:
        try:
            choices = parsed(reply, choices=list[dict[str, Any]])["choices"]
            said = [c["message"]["content"] if self.settings.api == "chat" else c["text"] for c in choices]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"the victim at {self._url} does not reply as an OpenAI-compatible endpoint does: check the url and "
                "--task.victim.model"
            ) from None
        if not all(text is None or isinstance(text, str) for text in said):
            raise UserError(f"the victim at {self._url} replied with something that is no text: check its model")
        return [text or "" for text in said]

    def _refusal(self, code: int, said: str) -> str:
        what = {
            401: f"put the token into the environment variable {self.settings.token_variable}",
            403: f"put the token into the environment variable {self.settings.token_variable}",
            **dict.fromkeys((301, 302, 303, 307, 308), "it redirects: give --task.victim.url its final address"),
            404: "check --task.victim.url and --task.victim.model",
        }.get(code, "check the settings of the victim")
        return f"the victim at {self._url} refuses the call ({code}{said and f', {said}'}): {what}"


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    """Returns the seconds that the server asks to wait; None when it does not say."""
    try:
        seconds = float(error.headers.get("Retry-After", ""))
    except ValueError:
        return None
    return max(0.0, seconds)


def _reason(error: urllib.error.HTTPError) -> str:
    """Returns the server's code or type of the error, but not its message, which may quote the attack."""
    try:
        said = parsed(error.read(1 << 16), error=dict[str, Any])["error"]
        return str(said.get("code") or said.get("type") or "")[:60]
    except (OSError, ValueError, http.client.HTTPException):
        return ""


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
