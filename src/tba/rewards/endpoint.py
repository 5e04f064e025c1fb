"""A model behind an OpenAI-compatible HTTP endpoint, `chat/completions` or `completions`: one that judges answers, is
attacked, or teaches. Standard library only.

Invariant: every wait has a deadline. At most `concurrency` calls are under way at once, and fewer while the server
refuses or slows down (`gate`). A call that the server refuses temporarily (429, 5xx), that times out, whose connection
breaks or whose reply is no JSON object (empty, cut off, a page of a proxy) is repeated a bounded number of times; any
other refusal is an error at once. Neither what is asked nor what is replied ever appears in an error or a log, but for
an error's code, as printable text.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from tba.errors import TbaError, UserError
from tba.fields import as_declared
from tba.grading import pausing_deadline
from tba.json_input import check_json, parse_json
from tba.rewards.gate import Gate
from tba.types import Json, quote

_TEMPORARY_CODES = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_OVERLOAD_CODES = (408, 429, 503, 504, 529)  # fewer calls at once help against these
_LONGEST_PAUSE = 60.0  # seconds
_LARGEST_REPLY = 1 << 24  # bytes of a reply: an endpoint is not trusted to end
_CACHED_REPLIES = 1 << 16  # replies
_PATIENCE = 600.0  # seconds that a call waits for its turn, or for an equal one that is under way
_MOST_TOKENS = 1 << 32  # that the usage of one call is believed to have


@dataclass(frozen=True)
@as_declared
class Endpoint:
    """A model behind an OpenAI-compatible HTTP endpoint, such as a judge. Each searcher has its own rate limit and
    remembers replies of its own.

    `start()` returns a function from a message to the reply; call it from a reward function, and give the reward a
    `concurrency` to have several calls under way at once. Those that the server takes adapt: they grow by one while it
    keeps up, and halve when it refuses (429, 503) or times out. Raises `UserError` when a field makes no sense.
    """

    url: str = ""  # base URL including the version, such as http://127.0.0.1:8000/v1
    model: str = ""  # the model's name there
    api: Literal["chat", "completions"] = "chat"  # the API that is called
    system: str = ""  # system message before what is asked (chat only)
    token_variable: str = "OPENAI_API_KEY"  # noqa: S105 - the environment variable with the token; unset: none is sent
    temperature: float = 0.0  # 0: greedy, and a message is sent only once
    top_p: float = 1.0  # of its sampling
    max_tokens: int = 64  # longest answer
    timeout: float = 60.0  # seconds for one call
    retries: int = 5  # repetitions of a call that was refused temporarily, timed out or broke off
    pause: float = 1.0  # seconds before the first repetition, doubled each time; Retry-After is respected
    calls_per_second: float | None = None  # rate limit of one searcher; None: no limit
    concurrency: int = 64  # most calls of one searcher at once; fewer while the server refuses or slows down

    label: ClassVar[str] = "endpoint"  # what errors call it
    option: ClassVar[str] = "its {}"  # how they name a setting

    def __post_init__(self) -> None:
        check_sampling(self.label, self.temperature, self.top_p, self.max_tokens)
        if _has_secret(self.url):  # which is neither repeated nor stored with the run
            raise UserError(
                f"the {self.label}'s url has an @ or a ?, where a password or a key would stand: give the url "
                f"without, and a token in the environment variable {self.token_variable}"
            )
        if self.url and not _is_address(self.url):
            raise UserError(f"the {self.label}'s url is {self.url!r}: give one such as http://127.0.0.1:8000/v1")
        if self.retries < 0:
            raise UserError(f"the {self.label}'s retries is {self.retries}: give 0 or more")
        if self.concurrency < 1:
            raise UserError(f"the {self.label}'s concurrency is {self.concurrency}: give 1 or more calls at once")
        for name in ("timeout", "calls_per_second"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"the {self.label}'s {name} is {value}, it must be above 0")
        if self.pause < 0:
            raise UserError(f"the {self.label}'s pause is {self.pause}: give seconds, 0 or more")

    def start(self) -> EndpointClient:
        """Returns a client of the endpoint, without a call. Raises `UserError` without a url or a model."""
        return EndpointClient(self)

    def name_of(self, setting: str) -> str:
        """Returns what errors call a setting, such as `calls_per_second`."""
        return self.option.format(setting.replace("_", "-"))


def check_sampling(label: str, temperature: float, top_p: float, max_tokens: int) -> None:
    """Raises `UserError` for impossible sampling settings."""
    if temperature < 0 or not 0 < top_p <= 1 or max_tokens < 1:
        raise UserError(
            f"the {label} has temperature {temperature}, top_p {top_p} and max_tokens {max_tokens}: give a "
            "temperature of 0 or more, a top_p above 0 and up to 1, and at least 1 token"
        )


class Refused(TbaError):
    """Raised when an endpoint did not answer, after all repetitions."""


class CallRate:
    """Limits the calls per second, each of which waits for its turn."""

    def __init__(self, per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 0.0 if per_second is None else 1.0 / per_second
        self._clock, self._next_time, self._lock = clock, 0.0, threading.Lock()

    def turn(self) -> float:
        """Returns the seconds to wait before the next call; turns are given in the order of requests."""
        with self._lock:
            now = self._clock()
            call_time = max(now, self._next_time)
            self._next_time = call_time + self._interval
            return call_time - now


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as a refusal, so that the token and the message go to no other address."""

    def redirect_request(self, *_: object) -> None:
        return None


def _token(variable: str) -> str:
    """Returns the token of the environment, empty if it is not set. Raises `UserError` if it cannot be in a header."""
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"the environment variable {variable} has characters that a token cannot have: set it again")
    return token


@dataclass(frozen=True)
class Usage:
    """Counts what calls cost, in tokens as the server states them."""

    calls: int = 0  # that were answered
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted_calls: int = 0  # calls of whose tokens the server says nothing

    @property
    def tokens(self) -> int:
        """Returns the tokens of prompts and replies together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, usage: Usage) -> Usage:
        return Usage(
            self.calls + usage.calls,
            self.prompt_tokens + usage.prompt_tokens,
            self.completion_tokens + usage.completion_tokens,
            self.uncounted_calls + usage.uncounted_calls,
        )


@dataclass(frozen=True)
class Reply:
    """A reply to a message."""

    text: str
    is_cut: bool = False  # it ended at `max_tokens`
    usage: Usage = Usage()  # of the call that gave it; nothing where the reply was remembered


class EndpointClient:
    """Asks an endpoint, from any number of threads."""

    def __init__(self, settings: Endpoint, path: str = "") -> None:
        """path: what is called below the url; empty: what the API of the settings says."""
        self.settings = settings
        needs = {
            "url": f"{settings.name_of('url')}, such as http://127.0.0.1:8000/v1",
            "model": f"{settings.name_of('model')}, the model's name there",
        }
        if missing_settings := [text for name, text in needs.items() if not getattr(settings, name)]:
            raise UserError(f"the {settings.label} needs {', and '.join(missing_settings)}")
        path = path or ("chat/completions" if settings.api == "chat" else "completions")
        self._url = f"{settings.url.rstrip('/')}/{path}"
        self._rate = CallRate(settings.calls_per_second)
        is_local = urlsplit(self._url).hostname in ("127.0.0.1", "localhost", "::1")
        handlers = [urllib.request.ProxyHandler({})] if is_local else []
        self._opener = urllib.request.build_opener(_NoRedirects(), *handlers)
        self._token = _token(settings.token_variable)
        self._gate = Gate(str(self), settings.concurrency)
        self._reply_cache: OrderedDict[bytes, Future[Reply]] = OrderedDict()  # by message, the last used last
        self._usage = Usage()
        self._lock = threading.Lock()  # of what is remembered and counted

    def __str__(self) -> str:
        return f"the {self.settings.label} at {self._url}"

    @property
    def calls_at_once(self) -> int:
        """Returns how many calls may be under way now."""
        return self._gate.limit.calls

    @property
    def usage(self) -> Usage:
        """Returns what all messages cost so far, those included whose reply was of no use."""
        with self._lock:
            return self._usage

    def __call__(self, message: str) -> str:
        """Returns the reply; at temperature 0 a message is sent once, and its reply remembered.

        Raises `UserError` for a refusal, and `Refused` when no call succeeds.
        """
        return self.reply(message).text

    def reply(self, message: str) -> Reply:
        """Returns the reply with what it cost, as `__call__` does: who gets a reply that was remembered, or waits for
        a call under way, pays nothing.
        """
        if self.settings.temperature > 0:
            return self._sample(message, 1)[0]
        key, is_new = _digest(message), False
        with self._lock:
            if (future := self._reply_cache.get(key)) is None:
                future, is_new = self._reply_cache.setdefault(key, Future()), True
            self._reply_cache.move_to_end(key)
            if len(self._reply_cache) > _CACHED_REPLIES:
                self._reply_cache.popitem(last=False)
        return self._fetch(message, future) if is_new else self._await_reply(future)

    def _fetch(self, message: str, future: Future[Reply]) -> Reply:
        """Returns the reply, and sets it for all who wait for it; a failure is not remembered."""
        try:
            reply = self._sample(message, 1)[0]
        except BaseException as error:
            self.forget(message)
            future.set_exception(error if isinstance(error, Exception) else Refused(f"the call of {self} was ended"))
            raise
        future.set_result(replace(reply, usage=Usage()))
        return reply

    def _await_reply(self, future: Future[Reply]) -> Reply:
        try:
            with pausing_deadline():
                return future.result(_PATIENCE)
        except TimeoutError:
            raise Refused(f"{self} did not answer an equal message in {_PATIENCE:g} s; see that it is up") from None

    def forget(self, message: str) -> None:
        """Forgets the reply to a message, so that the message is sent again, as is right after a reply of no use."""
        with self._lock:
            self._reply_cache.pop(_digest(message), None)

    def replies(self, message: str, count: int) -> list[str]:
        """Returns `count` replies; a server that gives fewer is asked for the rest."""
        return [reply.text for reply in self._sample(message, count)]

    def _sample(self, message: str, count: int) -> list[Reply]:
        is_greedy = self.settings.temperature == 0  # all alike, and servers refuse to sample several greedily
        replies: list[Reply] = []
        for _ in range(count):
            if is_greedy:
                replies += self._call(message, 1)[:1] * count
            else:
                replies += self._call(message, count - len(replies))
            if len(replies) >= count:
                return replies[:count]
        raise Refused(f"{self} gave {len(replies)} of {count} answers")

    def _call(self, message: str, count: int) -> list[Reply]:
        return self._replies_in(self.ask(self._question(message, count)))

    def ask(self, question: Mapping[str, Any]) -> dict[str, Json]:
        """Returns the reply to a question, both JSON objects. Raises `UserError` for a refusal, `Refused` when no call
        succeeds.
        """
        rate_name, retries_name = self.settings.name_of("calls_per_second"), self.settings.name_of("retries")
        body = json.dumps(question).encode()
        for attempt in range(self.settings.retries + 1):
            with self._gate.turn(_PATIENCE) as call:
                with pausing_deadline():
                    time.sleep(self._rate.turn())
                start, remedy = time.monotonic(), f"see that it is up, lower {rate_name}, or raise {retries_name}"
                try:
                    reply_body = self._post(body)
                    call.seconds = time.monotonic() - start
                    document: dict[str, Json] = parse_json(reply_body)
                    return document
                except ValueError:
                    failure, pause = f"a reply of {len(reply_body)} bytes that is no JSON object", None
                    remedy = f"check {self.settings.name_of('url')}, and what stands between it and here"
                except urllib.error.HTTPError as error:
                    with error:
                        failure, pause = _reason(error), _retry_after(error)
                    if error.code not in _TEMPORARY_CODES:
                        raise UserError(self._refusal(error.code, failure)) from None
                    call.is_refused = error.code in _OVERLOAD_CODES
                    call.pause = min(_LONGEST_PAUSE, pause or 0.0)
                except (OSError, http.client.HTTPException) as error:  # refused, broken off, timed out
                    reason = getattr(error, "reason", error)
                    failure, pause = _spell_out(f"{type(error).__name__}: {reason}"), None
                    call.is_refused = isinstance(reason, TimeoutError)
            if attempt < self.settings.retries:
                with pausing_deadline():
                    time.sleep(min(_LONGEST_PAUSE, self.settings.pause * 2**attempt if pause is None else pause))
        raise Refused(f"{self} did not answer in {self.settings.retries + 1} calls, the last: {failure}; {remedy}")

    def _question(self, message: str, count: int) -> dict[str, Any]:
        settings = self.settings
        sampling = {
            "model": settings.model,
            "n": count,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
        }
        if settings.api == "completions":
            return {**sampling, "prompt": message}
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        return {**sampling, "messages": [*system, {"role": "user", "content": message}]}

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self._url, body, headers)  # noqa: S310 - http or https, checked by the settings
        deadline = time.monotonic() + self.settings.timeout
        with self._opener.open(request, timeout=self.settings.timeout) as reply:
            parts, size = [], 0
            while part := reply.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > _LARGEST_REPLY or time.monotonic() > deadline:
                    raise TimeoutError(f"no end of the reply in {self.settings.timeout:g} s and {size} bytes")
        return b"".join(parts)

    def _replies_in(self, document: Mapping[str, Json]) -> list[Reply]:
        """Returns the replies of one call; the first of them has the cost of the call."""
        is_chat = self.settings.api == "chat"
        try:
            check_json(document, {"choices": list[dict[str, Any]]}, "it")
            choices = document["choices"]
            texts = [choice["message"]["content"] if is_chat else choice["text"] for choice in choices]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self} does not reply as an OpenAI-compatible endpoint does: check {self.settings.name_of('url')} "
                f"and {self.settings.name_of('model')}"
            ) from None
        if not all(text is None or isinstance(text, str) for text in texts):
            raise UserError(f"{self} replied with something that is no text: check its model")
        usage = usage_in(document.get("usage"))
        with self._lock:
            self._usage += usage
        cut_flags = [choice.get("finish_reason") == "length" for choice in choices]
        replies = [Reply(text or "", is_cut) for text, is_cut in zip(texts, cut_flags, strict=True)]
        return [replace(replies[0], usage=usage), *replies[1:]] if replies else []

    def _refusal(self, code: int, reason: str) -> str:
        settings, url = self.settings, self.settings.name_of("url")
        remedy = {
            **dict.fromkeys((401, 403), f"put the token into the environment variable {settings.token_variable}"),
            **dict.fromkeys((301, 302, 303, 307, 308), f"it redirects: give {url} its final address"),
            404: f"check {url} and {settings.name_of('model')}",
        }.get(code, f"check the settings of the {settings.label}")
        return f"{self} refuses the call ({code}{reason and f', {reason}'}): {remedy}"


def _digest(message: str) -> bytes:
    return hashlib.blake2b(message.encode(errors="surrogatepass"), digest_size=16).digest()


def usage_in(usage: object) -> Usage:
    """Returns what one call cost as the server states it, which may be nothing or nonsense."""
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else []
    tokens = [count for count in counts if type(count) is int and 0 <= count < _MOST_TOKENS]
    return Usage(1, tokens[0], tokens[1]) if len(tokens) == 2 else Usage(1, uncounted_calls=1)


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    """Returns the seconds that the server asks to wait; None when it does not say."""
    try:
        seconds = float(error.headers.get("Retry-After", ""))
    except ValueError:
        return None
    return max(0.0, seconds)


def _reason(error: urllib.error.HTTPError) -> str:
    """Returns the server's code or type of the error, but not its message, which may quote what was asked."""
    try:
        error_fields = parse_json(error.read(1 << 16), error=dict[str, Any])["error"]
        return _spell_out(str(error_fields.get("code") or error_fields.get("type") or ""))
    except (OSError, ValueError, http.client.HTTPException):
        return ""


def _spell_out(text: str) -> str:
    """Returns a text of a server on one line, with control characters spelt out."""
    return quote(text, 100)[1:-1]


def _has_secret(url: str) -> bool:
    """Returns whether a url has, or may be meant to have, a password, or a key in a query."""
    return "?" in url or ("@" in url and (not _is_address(url) or "@" in urlsplit(url).netloc))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # raises for what is no name, as `port` does for what is no port
        is_plain = url.isascii() and len(url.split()) == 1
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and is_plain
    except ValueError:
        return False
