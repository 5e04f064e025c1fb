"""What a live cluster says of its nodes. Their GPUs are names to Ray here, and CUDA does not start on any."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from tests.runtime.cluster.test_cluster import TOKEN

from tba.errors import UserError

os.environ.setdefault("RAY_AUTH_MODE", "token")  # which Ray reads when it is loaded
ray = pytest.importorskip("ray", reason="the cluster runtime needs Ray: pip install -e '.[cluster]'")


@pytest.fixture
def address() -> Iterator[str]:
    """A cluster of a head without GPUs and a node that claims four."""
    from ray._private.authentication_test_utils import reset_auth_token_state
    from ray.cluster_utils import Cluster as Nodes

    home = tempfile.mkdtemp(prefix="tba")  # short: the names of Ray's sockets begin with it
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HOME", home), ("RAY_TMPDIR", home), ("RAY_USAGE_STATS_ENABLED", "0")):
            patch.setenv(name, value)
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_worker_niceness", "0")
        reset_auth_token_state()  # Ray keeps the token of a cluster that this process has started before
        nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
        try:
            nodes.add_node(num_cpus=1, num_gpus=4)
            yield nodes.address
        finally:
            nodes.shutdown()
            reset_auth_token_state()
            shutil.rmtree(home, ignore_errors=True)


def test_nodes_are_those_of_the_cluster_and_gpus_without_cuda_have_an_unknown_memory(address: str) -> None:
    from tba.runtime.cluster.machines import machines_at

    head, other = machines_at(address)
    assert (head.gpus, other.gpus) == ((), (0, 0, 0, 0))
    assert head.memory is not None
    assert other.memory is not None
    with pytest.raises(UserError, match=r"cannot join the Ray cluster at 127\.0\.0\.1:1 \(nothing answers"):
        machines_at("127.0.0.1:1")
