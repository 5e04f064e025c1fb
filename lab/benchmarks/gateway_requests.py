"""Sends what nobody should to the servers of a cluster run, which are Ray's: for `faults.py`.

    python lab/benchmarks/gateway_requests.py RUN HOST:PORT      sends rows that the journal has to its gateway again

The first functions speak to a port as somebody who has not the cluster's token; the program is somebody who has it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

METHODS = {  # one of each of Ray's servers
    "gcs_server": "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "raylet": "/ray.rpc.NodeManagerService/GetNodeStats",
    "exchange": "/ray.rpc.CoreWorkerService/PushTask",
}
SECONDS = 20.0  # that a server may take
FRAME = 1 << 14  # bytes of an HTTP/2 frame, at most
ROOM = (1 << 16) - 1  # bytes that may be sent before the server gives more
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
REPLAYED = 50  # rows


def listeners(driver: int) -> dict[str, tuple[int, int]]:
    """Returns process and port of one of each of METHODS' servers, of a driver's descendants."""
    import psutil

    servers = {}
    for process in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            server = next((name for name in METHODS if name in process.name().lower()), None)
            if server is None:
                continue
            for connection in process.net_connections("inet"):  # of which one knows the method
                if connection.status == psutil.CONN_LISTEN:
                    port = connection.laddr.port
                    if status_of(port, METHODS[server], {}) != "UNIMPLEMENTED":
                        servers[server] = process.pid, port
    return servers


def status_of(port: int, method: str, metadata: Mapping[str, str]) -> str:
    """Returns the name of the status that a server gives to an empty request."""
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=SECONDS, metadata=tuple(metadata.items()))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


@dataclass
class Announced:
    """A request without a token whose body is announced with so many bytes, of which some are sent."""

    port: int
    method: str
    size: int
    room: dict[int, int] = field(default_factory=lambda: {0: ROOM, 1: ROOM})  # of the connection, of the request
    ended: bool = False

    def send(self, most: int) -> int:
        """Send until the server ends the request, or has taken `most` bytes; returns how many it has taken."""
        sent_bytes, body = 0, b"\0" + struct.pack(">I", self.size)
        with socket.create_connection(("127.0.0.1", self.port), SECONDS) as connection, suppress(OSError):
            fields = {":method": "POST", ":scheme": "http", ":path": self.method, ":authority": "127.0.0.1"}
            fields |= {"content-type": "application/grpc", "te": "trailers"}
            head = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
            opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0) + _frame(HEADERS, 4, 1, head)
            connection.sendall(opening)
            answers = _frames(connection)
            while sent_bytes < most and not self.ended:
                if (size := min(FRAME, *self.room.values())) > 0:
                    connection.sendall(_frame(DATA, 0, 1, (body + bytes(size))[:size]))
                    sent_bytes, body = sent_bytes + size, body[size:]
                    self.room = {stream: room - size for stream, room in self.room.items()}
                else:
                    self._take_in(connection, *next(answers, (GOAWAY, 0, 0, b"")))
        return sent_bytes

    def _take_in(self, connection: socket.socket, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == WINDOW:
            self.room[stream] = self.room.get(stream, 0) + int.from_bytes(body, "big")
        elif kind == SETTINGS and not flags & 1:
            initial = next((value for name, value in struct.iter_unpack(">HI", body) if name == 4), ROOM)
            self.room[1] += initial - ROOM
            connection.sendall(_frame(SETTINGS, 1, 0))
        elif kind == PING and not flags & 1:
            connection.sendall(_frame(PING, 1, 0, body))
        self.ended = kind in (RESET, GOAWAY) or (kind == HEADERS and bool(flags & 1))


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def _frames(connection: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    with connection.makefile("rb") as stream:
        while len(head := stream.read(9)) == 9:
            body = stream.read(int.from_bytes(head[:3], "big"))
            yield head[3], head[4], int.from_bytes(head[5:], "big"), body


def replay(run: Path, address: str) -> None:
    """Put the journal's newest rows once more, as the searcher that has put them and as one that nobody knows."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray would not look at the loopback interface
    import ray

    from tba.replay.codec import to_wire
    from tba.replay.follower import JournalFollower
    from tba.runtime.cluster.client import NAMESPACE, exchange_name

    with JournalFollower(run / "journal.sqlite") as journal:
        rows = to_wire(journal.drain()[-REPLAYED:])
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    exchange = ray.get_actor(exchange_name(run), namespace=NAMESPACE)
    for owner in ("searcher-0", "searcher-0", "searcher-999"):
        ray.get(exchange.journal.remote(owner, "put", rows, counters={"generated_tokens": 1}), timeout=SECONDS)
    ray.get(exchange.journal.remote("searcher-999", "close"), timeout=SECONDS)


if __name__ == "__main__":
    replay(Path(sys.argv[1]), sys.argv[2])
