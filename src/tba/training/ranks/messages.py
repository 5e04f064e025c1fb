"""The trainer's ranks: processes that train one policy together, and the messages between them.

Invariant: rank 0 sends commands and the others execute them in order, so all of them enter every collective in one
order. A command is a name, arguments as JSON, and tensors, in one safetensors block: nothing is unpickled. Every wait
has a deadline; a rank that waits for too long, or for a rank that is gone, says so and ends.

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

# seconds that a rank may wait inside a step: all compute the same layer, so a rank that is later by so much hangs
STEP_SECONDS = 120.0
LOADING_SECONDS = 3600.0  # seconds that ranks wait for each other to load the model, from a slow disk or the Hub


@dataclass(frozen=True)
@as_declared
class RankSettings:
    """Over how many processes the trainer is spread."""

    ranks: int | None = None  # processes that train, each with its share of parameters, moments and batch (FSDP2), not
    # inline; None: one, or as many as it takes to fit on the GPUs of this machine or cluster

    @property
    def count(self) -> int:
        """Returns the number of ranks, as far as it is decided."""
        return 1 if self.ranks is None else self.ranks

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise UserError(f"--trainer.ranks is {self.ranks}, it must be at least 1")


def name_of_rank(rank: int) -> str:
    """Returns the name of a rank of the trainer as a part of the run."""
    return f"trainer-{rank}" if rank else "trainer"


@dataclass(frozen=True)
class Rendezvous:
    """Says how the ranks of one life of the trainer find each other."""

    store: Any  # a torch.distributed Store that all of them share
    address: str | None = None  # this machine's, at which the others reach it; None: all are on this one


@dataclass(frozen=True)
class RankCommand:
    """A command of rank 0 to the other ranks."""

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def encode(self) -> bytes:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        return safetensors.torch.save(tensors, {"name": self.name, "arguments": json.dumps(dict(self.arguments))})

    @classmethod
    def decode(cls, block: bytes) -> RankCommand:
        header = json.loads(block[8 : 8 + int.from_bytes(block[:8], "little")])["__metadata__"]
        return cls(header["name"], json.loads(header["arguments"]), safetensors.torch.load(block))


class Ranks:
    """This process's place among `count` ranks. All of them construct it at the same time.

    Each waits at most `deadline` seconds for another to start or to take weights, `loading` for it to load the model,
    `word_deadline` for a message from rank 0, and `step` inside a step.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        rendezvous: Rendezvous,
        device: torch.device,
        deadline: float,
        word_deadline: float,
        step: float = STEP_SECONDS,
        loading: float = LOADING_SECONDS,
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh  # heavy to import, and most trainers have one rank

        self.rank, self.count, self.device = rank, count, device
        self.deadline, self.word_deadline, self.step, self.loading = deadline, word_deadline, step, loading
        _restrict_interfaces(rendezvous.address)
        if device.type == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout, command_timeout = timedelta(seconds=deadline), timedelta(seconds=word_deadline)
        with self._translate_errors("for the other ranks to start", deadline):
            dist.init_process_group(backend, store=rendezvous.store, rank=rank, world_size=count, timeout=timeout)
            self._step_group: Any = dist.new_group(backend=backend, timeout=timedelta(seconds=step))
            self.mesh = DeviceMesh.from_group(self._step_group, device.type)
            self._message_group: Any = dist.new_group(backend="gloo", timeout=command_timeout)
            self.weights_group: Any = dist.new_group(backend="gloo", timeout=timeout)
            self.checkpoint_group: Any = dist.new_group(backend="gloo", timeout=command_timeout)

    def sharding(self, compute: torch.dtype) -> Sharding:
        return Sharding(self.mesh, compute, self.wait_until_loaded)

    def broadcast(self, name: str, tensors: Mapping[str, Tensor] | None = None, **arguments: Json) -> None:
        """Send a command from rank 0 to all others."""
        if self.count == 1:
            return
        block = RankCommand(name, arguments, tensors or {}).encode()
        with self._translate_errors(f"to say {name!r}", self.word_deadline):
            dist.broadcast(torch.tensor([len(block)]), 0, group=self._message_group)
            dist.broadcast(torch.frombuffer(bytearray(block), dtype=torch.uint8), 0, group=self._message_group)

    def receive_command(self) -> RankCommand:
        """Wait for the next command of rank 0."""
        size = torch.zeros(1, dtype=torch.int64)
        with self._translate_errors("for what rank 0 says next", self.word_deadline):
            dist.broadcast(size, 0, group=self._message_group)
            block = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(block, 0, group=self._message_group)
        return RankCommand.decode(block.numpy().tobytes())

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send float32 tensors to a rank that knows their shapes."""
        with self._translate_errors(f"to send to rank {to}", self.step):
            dist.send(torch.cat([t.detach().to("cpu", torch.float32).flatten() for t in tensors]), to, self._step_group)

    def receive(self, shapes: Sequence[Sequence[int]], sender: int) -> list[Tensor]:
        """Receive tensors that `send` sent, on this rank's device."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=torch.float32)
        with self._translate_errors(f"for rank {sender}", self.step):
            dist.recv(flat, sender, self._step_group)
        parts = zip(flat.to(self.device).split(sizes), shapes, strict=True)
        return [part.view(tuple(shape)) for part, shape in parts]

    def gather_failures(self, succeeded: bool, purpose: str, group: Any) -> list[int]:
        """Returns the ranks that did not succeed. Every rank calls it, to say whether it did."""
        return [rank for rank, success in enumerate(self.gather_counts(int(succeeded), purpose, group)) if not success]

    def gather_counts(self, count: int, purpose: str, group: Any) -> list[int]:
        """Returns the counts of all ranks. Every rank calls it with its own."""
        count_tensors = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with self._translate_errors(purpose, self._timeout_of(group)):
            dist.all_gather(count_tensors, torch.tensor([count]), group=group)
        return [int(tensor) for tensor in count_tensors]

    def gather_flat(self, local_tensor: Tensor, counts: Sequence[int], purpose: str, group: Any) -> Tensor | None:
        """Returns the flat tensors of all ranks, concatenated, on rank 0; None on the others. Every rank calls it with
        its tensor on the host and the number of elements of each rank's.
        """
        with self._translate_errors(purpose, self._timeout_of(group)):
            if self.rank:
                if len(local_tensor):
                    dist.send(local_tensor.view(torch.uint8), 0, group=group)
                return None
            parts = [local_tensor, *(local_tensor.new_empty(count) for count in counts[1:])]
            for rank, part in enumerate(parts):
                if rank and len(part):
                    dist.recv(part.view(torch.uint8), rank, group=group)
            return torch.cat(parts)

    def share_text(self, text: str, purpose: str, group: Any) -> str:
        """Returns rank 0's text on every rank; an empty one becomes a blank. Every rank calls it."""
        block = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        size = torch.tensor([len(block)])
        with self._translate_errors(purpose, self._timeout_of(group)):
            dist.broadcast(size, 0, group=group)
            block = block if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(block, 0, group=group)
        return block.numpy().tobytes().decode()

    def share_folder(self, folder: Path | None, purpose: str, group: Any) -> Path | None:
        """Returns a folder of rank 0, or None if another rank does not see it, being on another machine. Every rank
        calls it, all but rank 0 with None.
        """
        probe_file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            probe_file = folder.resolve() / f".seen-{uuid.uuid4().hex[:12]}"
            probe_file.touch()
        try:
            shared_file = Path(self.share_text(str(probe_file), purpose, group))
            blind_ranks = self.gather_failures(shared_file.exists(), purpose, group)
        finally:
            if probe_file is not None:
                probe_file.unlink()
        return None if blind_ranks else shared_file.parent

    def _timeout_of(self, group: Any) -> float:
        return self.deadline if group is self.weights_group else self.word_deadline

    def wait_until_loaded(self) -> None:
        """Wait until all ranks have come here: with their model loaded, after which nobody is late inside a step.

        Raises `DeadlineExceeded`, which on rank 0 names those that have not.
        """
        try:
            dist.monitored_barrier(self._message_group, timedelta(seconds=self.loading), wait_all_ranks=True)
        except RuntimeError as error:
            late_ranks = _LATE_RANKS.search(str(error))
            rank_names = f"rank {late_ranks[1].strip()}" if late_ranks else "rank 0" if self.rank else "the other ranks"
            deadline = self.word_deadline if self.rank else self.loading  # the group's, while rank 0 is not there
            raise self._translate(error, f"for {rank_names} to load the model", deadline) from error

    @contextmanager
    def name_collectives(self, name: str) -> Iterator[None]:
        """Turn the failure of a collective in the block (that of a layer's shards, say) into an error that names it."""
        try:
            yield
        except RuntimeError as error:
            if (collective := _find_collective(error)) is None:
                raise
            raise self._translate(error, f"in {collective}, while executing {name!r},", self.step) from error

    def close(self) -> None:
        """Leave all process groups, whatever the other ranks do."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._message_group = self.weights_group = self.checkpoint_group = (
            None  # their connections close with the groups: whoever listens sees it
        )

    @contextmanager
    def _translate_errors(self, purpose: str, deadline: float) -> Iterator[None]:
        """Turn torch's errors, when a wait expires or a rank is gone, into `DeadlineExceeded` or `PartFailed`."""
        try:
            yield
        except RuntimeError as error:  # dist.DistError is one, and gloo raises plain ones
            raise self._translate(error, purpose, deadline) from error

    def _translate(self, error: RuntimeError, purpose: str, deadline: float) -> DeadlineExceeded | PartFailed:
        first_line = str(error).strip().split("\n")[0]
        if "imed out" in first_line or "imeout" in first_line or _LATE_RANKS.search(first_line):
            return DeadlineExceeded(f"trainer rank {self.rank} waited {deadline:g} s {purpose} ({first_line})")
        return PartFailed(f"trainer rank {self.rank} waited {purpose}, which is gone ({first_line})")


_LATE_RANKS = re.compile(r"Ranks? ([0-9, ]+) failed to pass monitoredBarrier")


def _find_collective(error: BaseException) -> str | None:
    """Returns the name of torch's collective that raised an error, None if no collective did."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = [f.f_code.co_name for f in frames if f.f_code.co_filename == distributed_c10d.__file__]
    return names[0] if names else None


def _restrict_interfaces(address: str | None) -> None:
    """Make Gloo and NCCL listen on the interface of `address` only, unless the environment names another interface.

    None: on the loopback interface. Raises `UserError` where no interface has the address.
    """
    names = [name for _, name in socket.if_nameindex()]
    interfaces = [n for n in names if (n.startswith("lo") if address is None else _read_address(n) == address)]
    if address is not None and not interfaces and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise UserError(
            f"no network interface of this machine has the address {address}, by which Ray knows it: name the one that "
            "the trainer's ranks are to use in GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
        )
    for name in interfaces[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly that one, not those with this prefix


def _read_address(interface: str) -> str | None:
    """Returns the interface's first IPv4 address, on Linux; None where it has none."""
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        try:
            return socket.inet_ntoa(fcntl.ioctl(connection.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
        except OSError:
            return None
