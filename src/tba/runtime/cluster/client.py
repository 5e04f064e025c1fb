"""A worker's calls in a Ray cluster: it fetches values by reference, calls the gateway of its run, joins a cluster.

Invariant: every wait for Ray has a deadline and names what it waits for; what the gateway raised is raised here
unchanged.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray._private import ray_constants
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import available_resources_per_node

from tba.errors import DeadlineExceeded, HandedOutLost, PartFailed, UserError
from tba.record.memory import usable_cores
from tba.runtime.cluster.placement import NODE_ADDRESS, RAY_ADDRESS, Node
from tba.runtime.cluster.reaper import folder_for_ray
from tba.weights.chunks import FlatBytes


def get(reference: Any, deadline: float, purpose: str) -> Any:
    """Returns the value of a Ray reference. Raises `DeadlineExceeded` when that takes longer than `deadline`."""
    try:
        return ray.get(reference, timeout=deadline)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceeded(f"waited {deadline:g} s for {purpose}") from error


def exchange_name(run: Path) -> str:
    """Returns the actor name under which the gateway (`exchange`) of a run is found in its cluster."""
    return f"exchange of {run.name}"


def contact_with(run: str, worker: str, deadline: float) -> ActorContact:
    """Returns the gateway of the run of that name. Raises `UserError` when it is not in the cluster."""
    try:
        return ActorContact(ray.get_actor(exchange_name(Path(run)), namespace=NAMESPACE), worker, deadline)
    except ValueError as error:
        raise UserError(f"no run {Path(run).name} is in progress here: start it with --runtime cluster") from error


@dataclass(frozen=True)
class ActorContact:
    """A worker's calls to the gateway."""

    exchange: Any
    worker: str
    deadline: float  # seconds

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call this method of the gateway and return its result. Raises what it raised."""
        reference = getattr(self.exchange, method).remote(*arguments, **keywords)
        try:
            return get(reference, self.deadline, f"the gateway on the trainer's machine ({method})")
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            raise PartFailed(
                f"{self.worker} has lost its connection to the gateway: the run, or its machine, is down"
            ) from error

    def fetch(self, references: Sequence[Any]) -> list[FlatBytes]:
        """Returns the pieces themselves, one after the other.

        Raises `HandedOutLost` when they died with the gateway.
        """
        purpose = "a piece of the weights from Ray's object store"
        try:
            return [get(reference, self.deadline, purpose) for reference in references]
        except ray.exceptions.ObjectLostError as error:  # also where its owner died
            raise HandedOutLost(f"{purpose} is lost with the gateway that held it") from error

    def send(self, piece: FlatBytes) -> Any:
        """Put a piece into the store of this node, and return its reference."""
        return ray.put(piece)


NAMESPACE = "tba"
_CONNECT_SECONDS = 10.0  # to reach a cluster
_LOOPBACK = "127.0.0.1"  # the one address at which Ray's servers do not listen on every interface


@contextmanager
def connect_to_ray(
    address: str | None, object_store_gb: float | None = None, working_dir: Path | None = None
) -> Iterator[list[Node]]:
    """Connect this process to the cluster at `address` (None: a cluster of its own), and yield the cluster's nodes.

    A cluster of its own ends with this process, however that ends. working_dir: a folder whose copy is the workers'
    working directory, and first where they import from. Raises `UserError` when it cannot connect, and for a
    `working_dir` that is no folder.
    """
    if working_dir is not None and not working_dir.is_dir():
        raise UserError(f"--cluster.working-dir is {working_dir}, which is no folder: give one that the workers need")
    environment = {} if working_dir is None else {"runtime_env": {"working_dir": str(working_dir.resolve())}}
    with ExitStack() as closers:
        folder = None if address is not None else str(closers.enter_context(folder_for_ray()))
        yield from _connect_to_ray(address, object_store_gb, folder, environment)


def _connect_to_ray(
    address: str | None, object_store_gb: float | None, folder: str | None, environment: dict[str, Any]
) -> Iterator[list[Node]]:
    options = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE, **environment}
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    is_main_thread = threading.current_thread() is threading.main_thread()
    former_handler = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # otherwise Ray would write a token into the home folder
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            os.environ.setdefault("RAY_worker_niceness", "0")  # like the workers of any other run; Ray's default is 15
            with _loopback_allowed():
                ray.init(
                    address="local",
                    num_cpus=usable_cores(),
                    object_store_memory=None if object_store_gb is None else int(object_store_gb * 1e9),
                    include_dashboard=False,
                    _node_ip_address=_LOOPBACK,
                    _temp_dir=folder,
                    **options,
                )
        else:
            _require_listener(address)
            ray.init(address=address, _node_ip_address=os.environ.get(NODE_ADDRESS), **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        origin = " of $RAY_ADDRESS" if address == os.environ.get(RAY_ADDRESS) else ""
        aim = "start a Ray cluster" if address is None else f"join the Ray cluster at {address}{origin}"
        message = str(error).strip().splitlines()[0]
        raise UserError(f"cannot {aim} ({message}): `ray start --head` starts one, --address is HOST:PORT") from error
    try:
        if is_main_thread:
            signal.signal(signal.SIGTERM, former_handler)  # Ray has replaced the handler
        node_address = ray.util.get_node_ip_address()
        if address is None and node_address != _LOOPBACK:
            raise UserError(
                f"Ray {ray.__version__} does not stay on the loopback interface here (its node is {node_address}): "
                "install the version in constraints.txt, or start a cluster yourself and give its --address"
            )
        yield nodes()
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raises `ConnectionError` where nothing listens at an address, and `ValueError` for one that is none: Ray itself
    would try for a quarter of an hour.
    """
    endpoint = canonicalize_bootstrap_address(address)  # of loopback it makes this machine's own address
    if endpoint is None:
        return
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {endpoint}") from error


@contextmanager
def _loopback_allowed() -> Iterator[None]:
    """Inside, Ray accepts the loopback address, as it does on a Mac.

    On Linux it would replace it by the machine's own address, and its servers would listen on every interface. The
    variable that prevents this (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER) is read when Ray is imported, which is too early:
    then it is not known yet whether this process joins a cluster.
    """
    former_setting = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = former_setting


def nodes() -> list[Node]:
    """Returns the nodes of this process's cluster, its own first, with the resources that nobody uses on each.

    What Ray says of these may be a moment old.
    """
    here_id = ray.get_runtime_context().get_node_id()
    free_by_node = available_resources_per_node()
    cluster_nodes = []
    for entry in ray.nodes():
        total, key = entry["Resources"], entry["NodeID"]
        if entry["Alive"]:
            free = free_by_node.get(key, total)
            name = f"{entry['NodeManagerAddress']} ({key[:6]})"
            memory = total.get("memory", 0.0) + total.get("object_store_memory", 0.0)
            cluster_nodes.append(Node(key, name, free.get("CPU", 0.0), free.get("GPU", 0.0), memory, key == here_id))
    return sorted(cluster_nodes, key=lambda node: not node.here)
