"""One part of a run in its own process: `python -m tba.runtime.part searcher-0 RUN`. Started by the driver.

Invariant: a part ends when its driver is gone. The driver holds the other end of this process's standard input: a
byte from it asks to stop (which is not lost, however early it comes), and end of file means that the driver has died,
however it died.

Exit codes: 0 done or asked to stop, 1 an error of its own (left in logs/PART.error.json), 2 input it cannot use, 3 its
driver is gone, 4 the disk is full (nothing more can be left).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tba.runtime.pulse import Pulse, pulse_of

ORPHANED = 3  # exit codes: its driver is gone
NO_SPACE = 4  # the disk is full
_LOOK = 0.1  # seconds between two looks for weights to evaluate, where that is all there is to do
_GRACE = 5.0  # seconds an orphan has to end by itself


class Stop:
    """Asked to stop: by the driver, by SIGTERM, or because the driver is gone. Whoever asks shows that it lives."""

    def __init__(self, pulse: Path) -> None:
        self._event = threading.Event()
        self._pulse = Pulse(pulse)

    def __call__(self) -> bool:
        self._pulse.beat()
        return self._event.is_set()

    def listen(self) -> None:
        """Install the signal and the watch on standard input. SIGINT is the driver's business, not ours."""
        signal.signal(signal.SIGTERM, lambda *_: self._event.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._watch, name="driver-watch", daemon=True).start()

    def _watch(self) -> None:
        while os.read(0, 4096):
            self._event.set()
        self._event.set()
        threading.Event().wait(_GRACE)
        os._exit(ORPHANED)


def main(part: str, path: Path) -> int:
    """Run `part` (`trainer` or `searcher-N`) of the run at `path` until it is done."""
    stop = Stop(pulse_of(path, part))
    stop.listen()
    faulthandler.register(signal.SIGUSR1)  # a look at where it is, in its log
    from tba.errors import UserError
    from tba.record.jsonl import write_json
    from tba.record.log import set_up_log
    from tba.runtime.directory import RunDirectory
    from tba.runtime.disk import disk_full

    run = RunDirectory.open(path)
    set_up_log(path, part)
    try:
        _body(part)(run, stop)
    except BaseException as error:  # noqa: BLE001 - the process ends here; the driver shows it as its own
        text = traceback.format_exc()
        if disk_full(error, path) is not None:
            print(text, file=sys.stderr)  # noqa: T201 - as far as it fits
            return NO_SPACE
        write_json(run.error(part), {"kind": type(error).__name__, "message": str(error), "traceback": text})
        print(text, file=sys.stderr)  # noqa: T201 - standard error is the part's log
        return 2 if isinstance(error, UserError) else 1
    return 0


def _body(part: str) -> Callable[[object, Stop], None]:
    if part == "trainer":
        return _train
    return lambda run, stop: _search(part, run, stop)


def _search(part: str, run: object, stop: Stop) -> None:
    """Rounds until told to stop. Consumes prompts and weights, waits for nothing; offline it only evaluates."""
    import torch

    from tba.runtime.directory import RunDirectory
    from tba.runtime.searching import start_searching

    assert isinstance(run, RunDirectory)
    recipe = run.recipe()
    torch.set_num_threads(recipe.run.threads)
    attempt = int(os.environ.get("TBA_ATTEMPT", "0"))
    half = start_searching(recipe, run, int(part.removeprefix("searcher-")), attempt, stop)
    try:
        while not stop() and not half.evaluate():
            if recipe.offline:
                time.sleep(_LOOK)
            else:
                half.round()
    finally:
        half.close()


def _train(run: object, stop: Stop) -> None:
    """Steps until all are done or told to stop. Waits for batches; searchers unblock it."""
    import torch

    from tba.runtime.directory import RunDirectory
    from tba.runtime.offline import nothing_more
    from tba.runtime.training import start_training

    assert isinstance(run, RunDirectory)
    recipe = run.recipe()
    torch.set_num_threads(recipe.run.threads)
    half = start_training(
        recipe, run, stop, prefetch=recipe.run.prefetch, fill=nothing_more if recipe.offline else None
    )
    try:
        while not half.finished and not stop():
            half.step()
        half.finish()
    finally:
        half.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
