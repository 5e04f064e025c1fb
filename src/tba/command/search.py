"""`tba search --run RUN`: adds a searcher to a run in progress, until the run ends or Ctrl-C.

With `--address`, to a run in the Ray cluster there, from any of its machines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from tba.command.options import SearchOptions
from tba.recipe import Recipe
from tba.record.live import STATUS_SECONDS
from tba.record.log import log_to
from tba.record.terminal import terminal
from tba.runs.validating import require_ray
from tba.runtime.cluster.remote import Visit, connect_via, reachable_directory
from tba.runtime.elastic import INTERRUPTED, LocalMembership, join_run
from tba.runtime.program import require_same_version, version
from tba.runtime.run_directory import RunDirectory
from tba.runtime.searcher_loop import NICENESS, SearcherLoop, searcher_loop_at, start_searching
from tba.runtime.stop_requests import stop_requests
from tba.serving.engine import AgentLink

_PATIENCE = 60.0  # seconds that the gateway may take to answer


class Serving(Protocol):
    """A searcher's service to agents elsewhere, whose episodes are its answers."""

    agent_link: AgentLink

    def check(self, recipe: Recipe) -> None:
        """Raises `UserError` where agents cannot answer the recipe's prompts."""
        ...

    def open_for(self, loop: SearcherLoop, run: RunDirectory, console: Console) -> AbstractContextManager[None]:
        """Returns a context within which agents can call."""
        ...


def add_searcher(options: SearchOptions, serving: Serving | None = None) -> int:
    """Add a searcher to a run on this machine, or with an address to one in the Ray cluster there. Returns exit code 0
    when the run ended, 130 or 143 when Ctrl-C or SIGTERM ended this searcher before.
    """
    assert options.run is not None  # the command line has seen to it
    if options.address is None:
        return _join(options.run, serving)
    return _join_in_cluster(options.run.name, options.address, serving)


def _join(path: Path, serving: Serving | None) -> int:
    console = terminal()
    run = RunDirectory.open(path)
    require_same_version(run.facts, "a searcher that would join")
    recipe = run.recipe()
    with stop_requests() as stop_request, join_run(run, recipe, stop_request) as place:
        _search(
            place,
            recipe,
            run,
            lambda log: start_searching(recipe, run, place.number, 0, place.stop, True, agent_link(serving)),
            console,
            serving,
        )
    return stop_request.exit_code if place.reason == INTERRUPTED else 0


def _join_in_cluster(name: str, address: str, serving: Serving | None) -> int:
    """Join the run of this name from any machine of its Ray cluster. Raises `UserError` when the run is not in it."""
    require_ray()
    from tba.runtime.cluster.actors import place_of, scratch
    from tba.runtime.cluster.client import connect_to_ray, contact_with

    console = terminal()
    with connect_to_ray(address), stop_requests() as stop_request:
        contact = contact_with(name, "a searcher that joins", _PATIENCE)
        number, facts = contact.call("join", version())
        visit = Visit(number, stop_request, contact)
        run = reachable_directory(facts, scratch)
        recipe = run.recipe()

        def start_loop(log: Path) -> SearcherLoop:
            place = place_of(visit.name, log)
            connect = partial(connect_via, contact, visit.name, place)
            return searcher_loop_at(recipe, connect, number, 0, visit.stop, True, run, agent_link(serving))

        try:
            _search(visit, recipe, run, start_loop, console, serving)
        finally:
            contact.call("leave", number, visit.reason or "an error")
    return stop_request.exit_code if visit.reason == INTERRUPTED else 0


def agent_link(serving: Serving | None) -> AgentLink | None:
    """Returns what agents ask of the searcher's engine; None where it serves none."""
    return None if serving is None else serving.agent_link


def _search(
    place: LocalMembership | Visit,
    recipe: Recipe,
    run: RunDirectory,
    start_loop: Callable[[Path], SearcherLoop],
    console: Console,
    serving: Serving | None,
) -> None:
    """Makes rounds until the searcher is stopped. It does not evaluate, because others would wait for a searcher that
    may leave.

    `start_loop` returns the loop, given the searcher's log.
    """
    if serving is not None:
        serving.check(recipe)
    torch.set_num_threads(recipe.run.threads)
    os.nice(NICENESS)
    with log_to(run.path, place.name) as log:
        console.print(f"{place.name} joins {run.displayed_path}; its log is {log}; Ctrl-C ends it", highlight=False)
        loop, printed_at = start_loop(log), time.monotonic()
        serve = nullcontext() if serving is None else serving.open_for(loop, run, console)
        make_round = loop.round if serving is None else loop.searcher.round  # which is never ahead by more than a seat
        try:
            with serve:
                while not place.stop() and not loop.newest_manifest().stop:
                    make_round()
                    if time.monotonic() - printed_at > STATUS_SECONDS:
                        printed_at = time.monotonic()
                        weights = loop.searcher.engine.version
                        line = f"{place.name}: {loop.searcher.rounds} rounds, weights {weights}"
                        console.print(line, highlight=False)
                loop.searcher.drain(stop=True)
            place.reason = place.reason or "the run ended"
        except BaseException:
            loop.searcher.save()
            raise
        finally:
            loop.journal.resume()  # so that other searchers get the prompts that it had leased
            loop.close()
    console.print(f"{place.name} left after {loop.searcher.rounds} rounds: {place.reason}", highlight=False)
