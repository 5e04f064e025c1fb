"""The HTTP interface of a server of episodes: routes, keys, limits of requests, and errors as OpenAI's API writes them.

    POST   /episodes {problem?: key, tag?}            a new episode: id, api_key, base_url, prompt, tools, fields
    POST   /v1/chat/completions                       a call, under the episode's key, or below /e/ID
    POST   /v1/responses   /v1/messages               the same in the form of other APIs
    POST   /v1/messages/count_tokens                  how many tokens its messages are
    POST   /episodes/ID/end {artifact?, claimed_reward?}   its reward
    DELETE /episodes/ID                               it is not to count
    POST   /rollouts [{prompt|key, messages, uid?, reward?}]   episodes that were played elsewhere
    GET    /prompts?n=   /v1/models   /healthz        training prompts; names of models; whether it serves

Invariant: but for /healthz nothing is answered without a token or an episode's id, which is secret. A request with an
`Origin`, or for a host of another name, is refused, so that no page in a browser can call. Bodies are bounded in bytes
and in time. Nothing of what a request says is logged, nor of what is raised in answering it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tba.json_input import parse_json
from tba.serving.chat import BASE, CHAT, POLICY, ApiForm, ChatAnswer, ChatRequest, RequestRefused
from tba.serving.episode import AgentCall
from tba.serving.messages import MESSAGES, parse_messages_request
from tba.serving.responses import RESPONSES
from tba.serving.server import EpisodeServer, PastEpisode, ServedEpisode
from tba.types import Json

log = logging.getLogger("tba.serving")

_KEEP_ALIVE_SECONDS = 10.0  # between two comments in a stream that waits for its answer
_MAX_PROMPTS = 1000  # that are listed at once


@dataclass(frozen=True)
class AccessRules:
    """Says who may call a server, and how."""

    tokens: Mapping[str, str]  # by the name of their owner
    hosts: frozenset[str]  # names under which the server is reached
    scheme: str = "http"  # under which it is reached
    max_body_bytes: int = 1 << 20
    body_seconds: float = 30.0  # that a body may take to arrive


def application(server: EpisodeServer, access: AccessRules) -> Starlette:
    """Returns the application that serves a run's episodes."""
    routes = _Routes(server, access)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(server.sweep())
        yield
        task.cancel()

    async def answer_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error_response(RequestRefused(error.status_code, f"{error.detail}: see the routes in docs/agents.md"))

    def route(path: str, handler: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        return Route(path, routes.guarded(handler), methods=[method])

    return Starlette(
        routes=[
            route("/healthz", routes.health, "GET"),
            route("/v1/models", routes.models, "GET"),
            route("/e/{id}/v1/models", routes.models, "GET"),
            route("/prompts", routes.prompts, "GET"),
            route("/episodes", routes.begin, "POST"),
            route("/rollouts", routes.take_rollouts, "POST"),
            route("/episodes/{id}/end", routes.end, "POST"),
            route("/episodes/{id}", routes.abandon, "DELETE"),
            *(
                route(f"{prefix}/v1/{path}", handler, "POST")
                for prefix in ("", "/e/{id}")
                for path, handler in (
                    ("chat/completions", partial(routes.complete, CHAT)),
                    ("responses", partial(routes.complete, RESPONSES)),
                    ("messages", partial(routes.complete, MESSAGES)),
                    ("messages/count_tokens", routes.count_tokens),
                )
            ),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: answer_http_error},
    )


class _Routes:
    """The handlers of an application."""

    def __init__(self, server: EpisodeServer, access: AccessRules) -> None:
        self._server, self._access = server, access

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Returns a handler that refuses requests from browsers and answers errors as JSON."""

        async def handle(request: Request) -> Response:
            try:
                self._check_origin(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:  # noqa: BLE001 - what the server would log quotes the request
                return _error_response(_refusal_of(error))

        return handle

    def _check_origin(self, request: Request) -> None:
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if name.strip("[]").lower() not in self._access.hosts:
            raise RequestRefused(403, "the Host header names another server: call this one by its own address", "host")
        if "origin" in request.headers:
            raise RequestRefused(403, "the request comes from a page in a browser, which may not call here", "origin")

    # Keys

    def _key(self, request: Request) -> str:
        """Returns the key that a request carries; empty where it carries none."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")

    def _owner(self, request: Request) -> str:
        """Returns the name of the token that a request carries. Raises `RequestRefused`."""
        key = self._key(request).encode()
        names = [name for name, token in self._access.tokens.items() if hmac.compare_digest(token.encode(), key)]
        if not names:
            raise RequestRefused(401, "the token is missing or wrong: give it as `Authorization: Bearer`", "no_token")
        return names[0]

    def _episode(self, request: Request) -> ServedEpisode:
        """Returns the episode to which a call belongs: by its path, else by its key. Raises `RequestRefused` where they
        name two episodes; other keys beside a path are what clients send that want one.
        """
        key = self._key(request)
        episode = self._server.episode(request.path_params.get("id") or key)
        if key != episode.id and self._server.has_episode(key):
            raise RequestRefused(403, "the key is of another episode than the path", "foreign_episode")
        return episode

    def _managed_episode(self, request: Request) -> ServedEpisode | PastEpisode:
        """Returns the episode that a request names in its path, for its owner or under its own key."""
        id_ = request.path_params["id"]
        owner = None if hmac.compare_digest(self._key(request).encode(), id_.encode()) else self._owner(request)
        episode = self._server.past_episode(id_) or self._server.episode(id_)
        if owner not in (None, episode.owner):
            raise RequestRefused(403, "the episode is of another token", "foreign_episode")
        return episode

    # Handlers

    async def health(self, request: Request) -> Response:
        """Says that the server answers, and the version of the weights that it samples from."""
        return JSONResponse({"status": "ok", "weights": self._server.weights()})

    async def models(self, request: Request) -> Response:
        """Lists the model that is trained, and what it was before."""
        if "id" in request.path_params:
            self._episode(request)
        else:
            with suppress(RequestRefused):
                self._owner(request)
                return JSONResponse(_model_list())
            self._episode(request)
        return JSONResponse(_model_list())

    async def prompts(self, request: Request) -> Response:
        """Lists training prompts: their keys, what the model is told, and their tools."""
        self._owner(request)
        count = request.query_params.get("n", "20")
        if not (count.isdecimal() and len(count) <= len(str(_MAX_PROMPTS)) and 1 <= int(count) <= _MAX_PROMPTS):
            raise RequestRefused(400, f"n is {count!r:.20}, give a number from 1 to {_MAX_PROMPTS}")
        prompts = list(self._server.prompts.values())[: int(count)]
        return JSONResponse({"prompts": [self._server.describe(prompt) for prompt in prompts]})

    async def begin(self, request: Request) -> Response:
        """Begins an episode."""
        owner = self._owner(request)
        fields = await self._read_json(request, problem=str | None, tag=Any)
        episode = await self._server.begin(owner, fields.get("problem"), fields.get("tag"))
        if await request.is_disconnected():  # nobody knows its key
            await self._server.abandon(episode)
        base_url = f"{self._access.scheme}://{request.headers['host']}/e/{episode.id}/v1"
        facts = {"id": episode.id, "api_key": episode.id, "base_url": base_url}
        return JSONResponse({**facts, "model": POLICY, **self._server.describe(episode.seat.prompt)}, 201)

    async def end(self, request: Request) -> Response:
        """Ends an episode, and returns its reward."""
        episode = self._managed_episode(request)
        fields = await self._read_json(request, artifact=Any, claimed_reward=float | None)
        return JSONResponse(await self._server.end(episode, fields.get("artifact"), fields.get("claimed_reward")))

    async def take_rollouts(self, request: Request) -> Response:
        """Takes episodes that were played elsewhere."""
        owner = self._owner(request)
        body = await self._read_body(request)
        return JSONResponse(await self._server.take_rollouts(owner, _parse_body(body, Any)))

    async def abandon(self, request: Request) -> Response:
        """Ends an episode that is not to count."""
        await self._server.abandon(self._managed_episode(request))
        return Response(status_code=204)

    async def count_tokens(self, request: Request) -> Response:
        """Says how many tokens the messages of Anthropic's API are, without an answer."""
        episode = self._episode(request)
        chat_request = parse_messages_request(_parse_body(await self._read_body(request), Any))
        return JSONResponse({"input_tokens": self._server.count_tokens(episode, chat_request)})

    async def complete(self, form: ApiForm, request: Request) -> Response:
        """Answers a call in the form of one API."""
        episode = self._episode(request)
        body = await self._read_body(request)
        chat_request = form.parse(_parse_body(body, Any))
        is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        task = self._server.begin_call(episode, chat_request, body, is_retry)
        if chat_request.is_streamed:
            return StreamingResponse(_stream(task, form, chat_request), media_type="text/event-stream")
        call, answer = await asyncio.shield(task)

        async def note_delivery() -> None:
            call.is_delivered = True

        is_there = not await request.is_disconnected()
        body = form.body(answer, chat_request)
        return JSONResponse(body, background=BackgroundTask(note_delivery) if is_there else None)

    # Bodies

    async def _read_body(self, request: Request) -> bytes:
        """Returns the body. Raises `RequestRefused` for one that is too large or too slow."""
        limit = self._access.max_body_bytes
        refusal = RequestRefused(413, f"the body has more than {limit:,} bytes: send less", "body_too_large")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise refusal
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._access.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise refusal
                    parts.append(part)
        except TimeoutError:
            raise RequestRefused(408, f"the body did not arrive within {self._access.body_seconds:g} s") from None
        return b"".join(parts)

    async def _read_json(self, request: Request, **fields: Any) -> Any:
        body = await self._read_body(request)
        return _parse_body(body or b"{}", None, **fields)


def _parse_body(body: bytes, kind: Any, **fields: Any) -> Any:
    """Returns the JSON in a body. Raises `RequestRefused`, also for numbers and texts that others cannot read: those
    that are not finite, and half of a surrogate pair.
    """
    try:
        value = parse_json(body.decode(), kind, **fields)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        reason = "not text in UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise RequestRefused(400, f"the body cannot be read ({reason:.200}): send a JSON object") from error
    return value


def _refusal_of(error: Exception) -> RequestRefused:
    """Returns the error as one that can be answered; logs where another than a refusal was raised, and not what it
    says, which may quote a request.
    """
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, RecursionError):
        return RequestRefused(400, "the request has JSON in a text that is nested too deep: send flatter arguments")
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:]]
    log.error("a request failed: %s in %s", type(error).__name__, ", ".join(places))
    return RequestRefused(500, "the server failed to answer; its log says where")


def _error_response(error: RequestRefused) -> JSONResponse:
    return JSONResponse(error.body, error.status, {"retry-after": "5"} if error.status in (429, 503) else None)


async def _stream(
    task: asyncio.Task[tuple[AgentCall, ChatAnswer]], form: ApiForm, request: ChatRequest
) -> AsyncIterator[str]:
    """Yields the events of an answer, and comments until it is there."""
    while not task.done():
        await asyncio.wait([task], timeout=_KEEP_ALIVE_SECONDS)
        if not task.done():
            yield ": the answer is being sampled\n\n"
    try:
        call, answer = task.result()
    except Exception as error:  # noqa: BLE001 - the response has begun
        yield form.error_event(_refusal_of(error))
        return
    for event in form.events(answer, request):
        yield event
    call.is_delivered = True


def _model_list() -> Json:
    facts = {"object": "model", "created": int(time.time()), "owned_by": "tba"}
    return {"object": "list", "data": [{"id": name, **facts} for name in (POLICY, BASE)]}
