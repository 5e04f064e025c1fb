"""What a live cluster says of its nodes. Their GPUs are names to Ray here, and CUDA does not start on any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.runtime.cluster.ray_nodes import SECONDS, in_other_process, ray_nodes

from tba.errors import UserError

if TYPE_CHECKING:
    from tba.runtime.hardware import Machine

pytest.importorskip("ray", reason="the cluster runtime needs Ray: pip install -e '.[cluster]'")


def machines_and_refusal(address: str) -> tuple[list[Machine], str]:
    from tba.runtime.cluster.machines import machines_at

    machines = list(machines_at(address))
    try:
        machines_at("127.0.0.1:1")
    except UserError as error:
        return machines, str(error)
    return machines, "none"


def test_nodes_are_those_of_the_cluster_and_gpus_without_cuda_have_an_unknown_memory() -> None:
    with ray_nodes(1) as nodes:
        nodes.add_node(num_cpus=1, num_gpus=4)
        (head, other), sentence = in_other_process(SECONDS, machines_and_refusal, nodes.address)
    assert (head.gpus, other.gpus) == ((), (0, 0, 0, 0))
    assert head.memory is not None
    assert other.memory is not None
    assert sentence.startswith("cannot join the Ray cluster at 127.0.0.1:1 (nothing answers")
