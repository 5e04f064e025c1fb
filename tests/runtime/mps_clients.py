"""The toy as a run whose trainer and searcher want one GPU, and are clients of MPS where there is a daemon of it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from tba.protocols import Engine
from tba.settings import find
from tba.types import Version
from toy.model import TabularModel
from toy.policy import TabularTask


@dataclass(frozen=True)
class Model(TabularModel):
    device: str = "cuda"  # which the run's placement believes
    ends_daemon: bool = False  # the engine of a client ends the daemon, and fails as CUDA does then

    @property
    def gpus_per_searcher(self) -> int:
        return 1

    def engine(self, version: Version, longest_prompt: int = 1) -> Engine:
        folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        if self.ends_daemon and folder is not None:
            os.kill(int((Path(folder) / "pid").read_text()), signal.SIGKILL)
            raise RuntimeError("CUDA error: the remote procedural call between the MPS server and the client failed")
        return super().engine(version, longest_prompt)


recipe = replace(find(str(Path(__file__).parents[1] / "toy" / "recipe.py")), model=Model(TabularTask()))
