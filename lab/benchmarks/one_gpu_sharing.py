"""Two halves of a run on one device, arranged in different ways: how much of each is left.

Each arrangement is measured over the same seconds, by processes that have loaded, warmed up and met before: updates a
second of a trainer, and tokens a second of finished answers of an engine, each on its own work, neither waiting for the
other. `alone` is what each does when the other is not there, and `left` the share of it that an arrangement keeps; two
halves that merely take turns keep 1 together. `of_the_slower_half`: updates a second that the engine can feed (tokens
of a batch, each used once), against those that the slower half allows alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from one_gpu_halves import Half, Rate, Size

from tba.runtime.local.mps import MpsUnavailable, mps_daemon

BY_DEFAULT = ("processes",)  # as `tba train` does it
OTHERS = ("processes, pinned cores", "processes, MPS", "threads, a stream each", "turns")
PATIENCE = 120.0  # seconds in which a half has loaded, and in which it ends

Halves = Mapping[str, Callable[[], Half]]  # `trainer` and `searcher`: who makes them
Rates = dict[str, float]  # of each half: what it does a second


def time_arrangements(
    halves: Halves,
    arrangements: tuple[str, ...],
    size: Size,
    device: str,
    folder: Path,
    note: Callable[..., None],
    batch_tokens: int,
) -> None:
    """Measure what each half does alone, then some arrangements, and note the figures of each at once."""
    seconds = size.window
    rates_alone: Rates = {}
    for name, make in halves.items():
        rates_alone |= run_in_processes({name: make}, seconds, device, folder)
    note(alone=rates_alone)
    processes = partial(run_in_processes, halves, seconds, device, folder)
    runners: dict[str, Callable[[], Rates]] = {
        "processes": processes,
        "processes, pinned cores": lambda: processes(cores=cores_of_each(halves)),
        "processes, MPS": lambda: run_under_mps(processes, device, folder),
        "threads, a stream each": lambda: run_in_process(lambda: run_in_threads(halves, seconds, device), folder),
        "turns": lambda: run_in_process(lambda: run_in_turns(halves, seconds, device, batch_tokens), folder),
    }
    slower_alone = min(rates_alone["trainer"], rates_alone["searcher"] / batch_tokens)
    for name in arrangements:
        try:
            rates = runners[name]()
        except (OSError, RuntimeError, MpsUnavailable) as error:
            note(**{name: {"failed": str(error)}})
            continue
        shares_left = {half: round(rates[half] / rates_alone[half], 3) for half in rates}
        slower_rate = min(rates["trainer"], rates["searcher"] / batch_tokens)
        note(**{name: {**rates, "left": shares_left, "of_the_slower_half": round(slower_rate / slower_alone, 3)}})


def run_in_processes(
    halves: Halves,
    seconds: float,
    device: str,
    folder: Path,
    environment: Callable[[str], Mapping[str, str]] | None = None,
    cores: Mapping[str, set[int]] | None = None,
) -> Rates:
    """Runs each half in a process of its own, all at the same time; returns their rates. environment: the variables of
    a half.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(halves))

    def live(name: str) -> None:
        renew_threads()
        os.environ.update({} if environment is None else environment(name))
        if cores is not None:
            os.sched_setaffinity(0, cores[name])
        (folder / f"{name}.rate").write_text(json.dumps(measure_rate(halves[name](), seconds, device, barrier)))

    children = [context.Process(target=live, args=(name,)) for name in halves]
    for process in children:
        process.start()
    join_processes(children)
    return {name: float((folder / f"{name}.rate").read_text()) for name in halves}


def renew_threads() -> None:
    """Have torch make its pool of threads, which no fork copies, anew from the one thread that a forked process begins
    with: transformers loads with several, and of two that make it at once one finds none.
    """
    torch.set_num_threads(torch.get_num_threads())


def measure_rate(half: Half, seconds: float, device: str, barrier: Barrier | threading.Barrier) -> float:
    """Returns how much a half does a second, once all halves have warmed up."""
    half.warm()
    barrier.wait(PATIENCE)
    return half.work(seconds, device).a_second


def join_processes(children: list[Any]) -> None:
    """Wait for processes. Raises `RuntimeError` if one fails, and then ends the others."""
    try:
        for process in children:
            process.join(2 * PATIENCE)
            if process.exitcode != 0:
                raise RuntimeError(f"a half ended with exit code {process.exitcode}")
    finally:
        for process in children:
            process.kill()


def run_in_process(act: Callable[[], Rates], folder: Path) -> Rates:
    """Returns what `act` returns in a process of its own."""
    file = folder / "both.rate"

    def live() -> None:
        renew_threads()
        file.write_text(json.dumps(act()))

    process = multiprocessing.get_context("fork").Process(target=live)
    process.start()
    join_processes([process])
    rates: Rates = json.loads(file.read_text())
    return rates


def run_in_threads(halves: Halves, seconds: float, device: str) -> Rates:
    """Runs each half in a thread of this process, with a stream of its own; returns their rates."""
    half_by_name, rates = {name: make() for name, make in halves.items()}, {}
    barrier = threading.Barrier(len(half_by_name))

    def live(name: str) -> None:
        stream = torch.cuda.Stream() if device == "cuda" else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream())  # on which it was made
            rates[name] = measure_rate(half_by_name[name], seconds, device, barrier)

    thread_list = [threading.Thread(target=live, args=(name,)) for name in half_by_name]
    for thread in thread_list:
        thread.start()
    for thread in thread_list:
        thread.join(2 * PATIENCE)
    if len(rates) < len(half_by_name):
        raise RuntimeError("a half failed in its thread, or did not end")
    return rates


def run_in_turns(halves: Halves, seconds: float, device: str, batch_tokens: int) -> Rates:
    """Alternates updates with answers of as many tokens as the next update needs, in one process; returns the rates."""
    trainer, searcher = halves["trainer"](), halves["searcher"]()
    trainer.warm()
    searcher.warm()

    class InTurn(Half):
        answered = 0

        def act(self) -> int:
            done, tokens = trainer.act(), 0
            while tokens < batch_tokens:
                tokens += searcher.act()
            self.answered += tokens
            return done

    alternation = InTurn()
    rate = alternation.work(seconds, device)
    return {"trainer": rate.a_second, "searcher": Rate(alternation.answered, rate.seconds).a_second}


def cores_of_each(halves: Halves) -> dict[str, set[int]]:
    """This process's cores, dealt to the halves. Raises `RuntimeError` where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(halves)
    if not share:
        raise RuntimeError(f"there are {len(cores)} cores for {len(halves)} halves")
    return {name: set(cores[i * share : (i + 1) * share]) for i, name in enumerate(halves)}


def run_under_mps(act: Callable[..., Rates], device: str, folder: Path) -> Rates:
    """Returns what `act` returns with the environment of each half by which it is a client of MPS."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    with mps_daemon(gpu, folder / "mps", device) as daemon:
        return act(daemon.environment)
