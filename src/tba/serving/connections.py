"""Connections to the HTTP server: how many there may be, and how long each may take to say what it wants.

Invariant: whoever connects, with a token or without, holds a bounded number of the process's files, of which the
searcher needs some, and keeps nobody else out: a connection that asks for nothing, or has not finished its TLS
handshake, makes room for a new one.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tba.serving.chat import RequestRefused

if TYPE_CHECKING:
    from starlette.applications import Starlette

_REFUSAL = RequestRefused(503, "too many requests are being answered: try again", "too_many_connections")


class _EarlyData(asyncio.Protocol):
    """Keeps what arrives behind a handshake until the connection reads it."""

    def __init__(self) -> None:
        self.data, self.is_lost = b"", False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


class BoundedConnection(H11Protocol):
    """A connection with a deadline for the head of each request, one of at most `most`."""

    most = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    head_seconds = 60.0  # from the connection's begin, or the last response, to the end of a request's headers
    tls: ssl.SSLContext | None = None  # by which it is secured
    _handshake: asyncio.Task[None] | None = None
    _deadline: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; where there are too many, the one that has been idle for longest ends, or this one."""
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._await_head()
        if len(self.connections) > self.most:
            idle = [c for c in self.connections if c is not self and isinstance(c, BoundedConnection) and c.is_idle]
            if idle:
                self._end(min(idle, key=lambda connection: connection._idle_since))
            elif self.tls is None:
                self._refuse(503, _REFUSAL)
            else:
                self._end(self)
        if self.tls is not None and not transport.is_closing():
            self._handshake = self.loop.create_task(self._secure(transport, self.tls))

    async def _secure(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        """Have the connection speak TLS from here on, or end it. The loop's own TLS would hand the connection over only
        behind its handshake, until when nobody would count it.
        """
        early_data, secure_transport = _EarlyData(), None
        with suppress(OSError):  # who is no client, or has left
            secure_transport = await self.loop.start_tls(
                transport, early_data, tls, server_side=True, ssl_handshake_timeout=self.head_seconds
            )
        if secure_transport is None or early_data.is_lost:
            self.connection_lost(None)
            return
        secure_transport.set_protocol(self)
        super().connection_made(secure_transport)
        if early_data.data:
            self.data_received(early_data.data)

    @property
    def is_idle(self) -> bool:
        """Returns whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        if not self.is_idle:
            self._forget_deadline()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may be there."""
        self._idle_since = self.loop.time()
        super().on_response_complete()
        if self.is_idle:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(400, RequestRefused(400, msg, "invalid_http"))

    def _await_head(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.head_seconds, self._end, self)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @staticmethod
    def _end(connection: BoundedConnection) -> None:
        connection.connections.discard(connection)
        connection.transport.abort()  # `close` would wait for a reader

    def _refuse(self, status: int, refusal: RequestRefused) -> None:
        """Send an error before there is a request to answer, and close the connection."""
        body = json.dumps(refusal.body).encode()
        head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE, h11.ERROR):  # else it would go into a response
            self.transport.write(f"{head}connection: close\r\nretry-after: 5\r\n\r\n".encode() + body)
        self.transport.close()


def http_server(
    app: Starlette, certificate: Path | None = None, connection: type[BoundedConnection] = BoundedConnection
) -> uvicorn.Server:
    """Returns a server of an application, which logs nothing of requests. certificate: a file with the TLS certificate
    and its key.
    """
    if certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate, password="")  # so that nobody is asked for one
        connection = type("SecureConnection", (connection,), {"tls": tls})
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=connection,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(connection.head_seconds),
            timeout_graceful_shutdown=5,
        )
    )
