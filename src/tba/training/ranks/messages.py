"""The trainer's ranks: processes that train one policy together, and the messages between them.

Invariant: rank 0 sends commands and the others execute them in order, so all of them enter every collective in one
order. A message is a word, facts as JSON, and tensors, in one safetensors block: nothing is unpickled. Every wait has a
deadline; a rank that waits for too long, or for one that is gone, says so and ends.

There are five process groups, each with the deadline of its waits: the default one, in which ranks wait for each other
to start; for a step (shards, their gradients, what a pass gives), where ranks are never far apart; for the messages, as
rank 0 says nothing while it waits for a batch; for the weights to be published, which are gathered while the next step
is computed; and for a checkpoint, whose rows are written meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tba.errors import DeadlineExceeded, PartFailed, UserError
from tba.fields import as_declared
from tba.sharding import Sharding
from tba.types import Json

STEP = 120.0  # seconds that a rank may wait inside a step: all of them compute the same layer, so a rank that is later
# by that much hangs
LOADING = 3600.0  # seconds that ranks wait for each other to load the model, from a slow disk or the Hub


@dataclass(frozen=True)
@as_declared
class RankSettings:
    """Over how many processes the trainer is spread."""

    ranks: int | None = None  # processes that train, each with its share of parameters, moments and batch (FSDP2), not
    # inline; None: one, or as many as it takes to fit on this machine's GPUs

    @property
    def count(self) -> int:
        """Returns how many there are, as far as it is decided."""
        return 1 if self.ranks is None else self.ranks

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise UserError(f"--trainer.ranks is {self.ranks}, it must be at least 1")


def name_of_rank(rank: int) -> str:
    """Returns the name of the part that is this rank of the trainer."""
    return f"trainer-{rank}" if rank else "trainer"


@dataclass(frozen=True)
class Meeting:
    """Holds how the ranks of one life of the trainer find each other."""

    store: Any  # a torch.distributed Store that all of them share
    address: str | None = None  # this machine's, at which the others reach it; None: all are on this one


@dataclass(frozen=True)
class Message:
    """A message from rank 0."""

    word: str
    facts: Mapping[str, Json] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def encoded(self) -> bytes:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        return safetensors.torch.save(tensors, {"word": self.word, "facts": json.dumps(dict(self.facts))})

    @classmethod
    def decoded(cls, block: bytes) -> Message:
        header = json.loads(block[8 : 8 + int.from_bytes(block[:8], "little")])["__metadata__"]
        return cls(header["word"], json.loads(header["facts"]), safetensors.torch.load(block))


class Ranks:
    """This process's place among `count` ranks. All of them make theirs at the same time.

    Each waits at most `deadline` seconds for another to start or to take weights, `loading` for it to load the model,
    `word_deadline` for a message from rank 0, and `step` inside a step.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        meeting: Meeting,
        device: torch.device,
        deadline: float,
        word_deadline: float,
        step: float = STEP,
        loading: float = LOADING,
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh  # heavy to import, and most trainers have one rank

        self.rank, self.count, self.device = rank, count, device
        self.deadline, self.word_deadline, self.step, self.loading = deadline, word_deadline, step, loading
        _listen_on(meeting.address)
        if device.type == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit, patience = timedelta(seconds=deadline), timedelta(seconds=word_deadline)
        with self._waits("for the other ranks to start", deadline):
            dist.init_process_group(backend, store=meeting.store, rank=rank, world_size=count, timeout=limit)
            self._step: Any = dist.new_group(backend=backend, timeout=timedelta(seconds=step))
            self.mesh = DeviceMesh.from_group(self._step, device.type)
            self._messages: Any = dist.new_group(backend="gloo", timeout=patience)
            self.weights: Any = dist.new_group(backend="gloo", timeout=limit)
            self.saving: Any = dist.new_group(backend="gloo", timeout=patience)

    def sharding(self, compute: torch.dtype) -> Sharding:
        return Sharding(self.mesh, compute, self.meet)

    def say(self, word: str, tensors: Mapping[str, Tensor] | None = None, **facts: Json) -> None:
        """Send a message from rank 0 to all others."""
        if self.count == 1:
            return
        block = Message(word, facts, tensors or {}).encoded()
        with self._waits(f"to say {word!r}", self.word_deadline):
            dist.broadcast(torch.tensor([len(block)]), 0, group=self._messages)
            dist.broadcast(torch.frombuffer(bytearray(block), dtype=torch.uint8), 0, group=self._messages)

    def hear(self) -> Message:
        """Wait for the next message from rank 0."""
        size = torch.zeros(1, dtype=torch.int64)
        with self._waits("for what rank 0 says next", self.word_deadline):
            dist.broadcast(size, 0, group=self._messages)
            block = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(block, 0, group=self._messages)
        return Message.decoded(block.numpy().tobytes())

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send float32 tensors to a rank that knows their shapes."""
        with self._waits(f"to send to rank {to}", self.step):
            dist.send(torch.cat([t.detach().to("cpu", torch.float32).flatten() for t in tensors]), to, self._step)

    def receive(self, shapes: Sequence[Sequence[int]], sender: int) -> list[Tensor]:
        """Receive what `send` sent, on this rank's device."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.empty(sum(sizes))
        with self._waits(f"for rank {sender}", self.step):
            dist.recv(flat, sender, self._step)
        parts = zip(flat.to(self.device).split(sizes), shapes, strict=True)
        return [part.view(tuple(shape)) for part, shape in parts]

    def agree(self, well: bool, what: str, group: Any) -> list[int]:
        """Returns the ranks that did not do well. Every rank calls it, to say how it did."""
        return [rank for rank, one in enumerate(self.counts(int(well), what, group)) if not one]

    def counts(self, count: int, what: str, group: Any) -> list[int]:
        """Returns what each rank counted. Every rank calls it."""
        told = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with self._waits(what, self._patience(group)):
            dist.all_gather(told, torch.tensor([count]), group=group)
        return [int(one) for one in told]

    def brought(self, own: Tensor, counts: Sequence[int], what: str, group: Any) -> Tensor | None:
        """Returns the flat tensors of all ranks, one after the other, on rank 0, None on the others. Every rank calls
        it, with its own on the host, and how many elements each has.
        """
        with self._waits(what, self._patience(group)):
            if self.rank:
                if len(own):
                    dist.send(own.view(torch.uint8), 0, group=group)
                return None
            parts = [own, *(own.new_empty(count) for count in counts[1:])]
            for rank, part in enumerate(parts):
                if rank and len(part):
                    dist.recv(part.view(torch.uint8), rank, group=group)
            return torch.cat(parts)

    def tell(self, text: str, what: str, group: Any) -> str:
        """Returns what rank 0 says beside its messages; nothing comes as a blank. Every rank calls it."""
        block = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        size = torch.tensor([len(block)])
        with self._waits(what, self._patience(group)):
            dist.broadcast(size, 0, group=group)
            block = block if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(block, 0, group=group)
        return block.numpy().tobytes().decode()

    def shared(self, folder: Path | None, what: str, group: Any) -> Path | None:
        """Returns a folder of rank 0, None where another rank does not see it: it is on another machine. Every rank
        calls it, those without it with None.
        """
        seen = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            seen = folder.resolve() / f".seen-{uuid.uuid4().hex[:12]}"
            seen.touch()
        try:
            told = Path(self.tell(str(seen), what, group))
            blind = self.agree(told.exists(), what, group)
        finally:
            if seen is not None:
                seen.unlink()
        return None if blind else told.parent

    def _patience(self, group: Any) -> float:
        return self.deadline if group is self.weights else self.word_deadline

    def meet(self) -> None:
        """Wait until all ranks have come here: with their model loaded, after which nobody is late inside a step.

        Raises `DeadlineExceeded`, which on rank 0 names those that have not.
        """
        try:
            dist.monitored_barrier(self._messages, timedelta(seconds=self.loading), wait_all_ranks=True)
        except RuntimeError as error:
            late = _LATE.search(str(error))
            who = f"rank {late[1].strip()}" if late else "rank 0" if self.rank else "the other ranks"
            deadline = self.word_deadline if self.rank else self.loading  # the group's, while rank 0 is not there
            raise self._named(error, f"for {who} to load the model", deadline) from error

    @contextmanager
    def inside(self, word: str) -> Iterator[None]:
        """Inside, a collective that fails (that of a layer's shards, say) ends in an error that names it."""
        try:
            yield
        except RuntimeError as error:
            if (collective := _collective_of(error)) is None:
                raise
            raise self._named(error, f"in {collective}, while executing {word!r},", self.step) from error

    def close(self) -> None:
        """Leave, whatever the others do."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._messages = self.weights = self.saving = (
            None  # their connections close with the groups: whoever listens sees it
        )

    @contextmanager
    def _waits(self, what: str, deadline: float) -> Iterator[None]:
        """Raises our own errors for what torch raises when a wait expires or the other rank is gone."""
        try:
            yield
        except RuntimeError as error:  # dist.DistError is one, and gloo raises plain ones
            raise self._named(error, what, deadline) from error

    def _named(self, error: RuntimeError, what: str, deadline: float) -> DeadlineExceeded | PartFailed:
        first = str(error).strip().split("\n")[0]
        if "imed out" in first or "imeout" in first or _LATE.search(first):
            return DeadlineExceeded(f"trainer rank {self.rank} waited {deadline:g} s {what} ({first})")
        return PartFailed(f"trainer rank {self.rank} waited {what}, which is gone ({first})")


_LATE = re.compile(r"Ranks? ([0-9, ]+) failed to pass monitoredBarrier")


def _collective_of(error: BaseException) -> str | None:
    """Returns the name of torch's collective from which an error came; None: it came from none."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = [f.f_code.co_name for f in frames if f.f_code.co_filename == distributed_c10d.__file__]
    return names[0] if names else None


def _listen_on(address: str | None) -> None:
    """Make Gloo and NCCL listen on the interface of that address only, unless the environment names another one.

    None: on the loopback interface. Raises `UserError` where no interface has the address.
    """
    names = [name for _, name in socket.if_nameindex()]
    chosen = [n for n in names if (n.startswith("lo") if address is None else _address_of(n) == address)]
    if address is not None and not chosen and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise UserError(
            f"no network interface of this machine has the address {address}, by which Ray knows it: name the one that "
            "the trainer's ranks are to use in GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
        )
    for name in chosen[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly that one, not those with this prefix


def _address_of(interface: str) -> str | None:
    """Returns the interface's first IPv4 address, on Linux; None where it has none."""
    import fcntl

    asked = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), 0x8915, asked)[20:24])  # SIOCGIFADDR
        except OSError:
            return None
