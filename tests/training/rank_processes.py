"""The ranks of a trainer, for a test: this process is rank 0, and the others are forked from it."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from tba.record.memory import peak_memory_bytes, resident_memory_bytes
from tba.training.ranks.messages import Ranks, Rendezvous


@contextmanager
def ranks_of(
    count: int,
    store: Path,
    life: Callable[[Ranks], None],
    patience: float = 60.0,
    word: float = 60.0,
    code: int = 0,
    loading: float = 60.0,
) -> Iterator[Ranks]:
    """Rank 0 of `count`; the others live in forked processes and have ended with `code` when this ends.

    patience: seconds that each waits inside a step. word: that the others wait for what rank 0 says. loading: that rank
    0 waits for the others to load the model.
    """

    def started(rank: int) -> Ranks:
        shared, device = dist.FileStore(str(store), count), torch.device("cpu")
        return Ranks(rank, count, Rendezvous(shared), device, 60.0, word if rank else 60.0, patience, loading)

    children = []
    gc.collect()  # a child that collected the process groups of an earlier test would wait for threads it does not have
    for rank in range(1, count):
        child = os.fork()
        if child == 0:
            gc.freeze()
            torch.set_num_threads(1)  # those of OpenMP that this process has started are not in its copy
            failed = 1
            try:
                ranks = started(rank)
                life(ranks)
                ranks.close()
                failed = 0
            except BaseException:  # noqa: BLE001 - it ends here
                traceback.print_exc()
            finally:
                os._exit(failed)
        children.append(child)
    ended = False
    try:
        ranks = started(0)
        try:
            yield ranks
        finally:
            ranks.close()
        ended = True
    finally:
        for child in () if ended else children:  # rank 0 has failed: nobody says the word for which they wait
            os.kill(child, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [code] * (count - 1)


def risen(act: Callable[[], object]) -> int:
    """By how many bytes the largest resident memory of this process is above what it has now, after `act`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed counts if it is used again
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far is what there is now
    before = resident_memory_bytes()
    assert before is not None
    act()
    return peak_memory_bytes() - before
