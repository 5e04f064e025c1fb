"""`tba search --run RUN`: adds a searcher to a run in progress, until the run ends or Ctrl-C.

With `--address`, to a run in the Ray cluster there, from any of its machines. With `--endpoint URL --model NAME`
another model answers the run's prompts, until its budget is spent.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from tba.command.options import SearchOptions
from tba.engines.endpoint import Budget
from tba.errors import UserError
from tba.protocols import Separable
from tba.recipe import Recipe
from tba.record.live import STATUS_SECONDS
from tba.record.log import log_to
from tba.record.terminal import terminal
from tba.runs.endpoint_answers import AnsweringEndpoint, EndpointAnswers
from tba.runs.validating import require_ray
from tba.runtime.cluster.remote import Visit, connect_via, reachable_directory
from tba.runtime.elastic import INTERRUPTED, LocalMembership, join_run
from tba.runtime.program import require_same_version, version
from tba.runtime.run_directory import RunDirectory
from tba.runtime.searcher_loop import (
    NICENESS,
    POLL_SECONDS,
    AnswersFromElsewhere,
    SearcherLoop,
    searcher_loop_at,
    start_searching,
)
from tba.runtime.stop_requests import stop_requests

log = logging.getLogger("tba.searcher")
_PATIENCE = 60.0  # seconds that the gateway may take to answer


class AnswerService(Protocol):
    """A service by which others than the run's weights give a searcher's answers."""

    paces_itself: bool  # it takes no more prompts than the run wants

    @property
    def answers(self) -> AnswersFromElsewhere:
        """Returns who gives the answers."""
        ...

    def check(self, recipe: Recipe) -> None:
        """Raises `UserError` where the recipe's prompts cannot be answered so."""
        ...

    def open_for(self, loop: SearcherLoop, run: RunDirectory, console: Console) -> AbstractContextManager[None]:
        """Returns a context within which the answers come."""
        ...

    def progress(self) -> str:
        """Returns how far it is, for people; empty: as far as the weights are."""
        ...

    def reason_to_leave(self) -> str | None:
        """Returns why no more answers will come; None: they do."""
        ...


def add_searcher(options: SearchOptions, service: AnswerService | None = None) -> int:
    """Add a searcher to a run on this machine, or with an address to one in the Ray cluster there. Returns exit code 0
    when the run ended or the searcher's budget was spent, 130 or 143 when Ctrl-C or SIGTERM ended it before.
    """
    assert options.run is not None  # the command line has seen to it
    if options.endpoint is not None:
        service = EndpointService(_endpoint_answers(options, options.endpoint))
    if options.address is None:
        return _join(options.run, service)
    return _join_in_cluster(options.run.name, options.address, service)


def _endpoint_answers(options: SearchOptions, url: str) -> EndpointAnswers:
    endpoint = AnsweringEndpoint(
        url=url, model=options.model or "", token_variable=options.key_env, temperature=options.temperature
    )
    return EndpointAnswers(endpoint, options.api, Budget(options.budget_tokens, options.budget_calls))


@dataclass
class EndpointService:
    """A model behind an endpoint that answers until its budget is spent."""

    answers: EndpointAnswers
    paces_itself: bool = False

    def check(self, recipe: Recipe) -> None:
        """Raises `UserError` where the recipe's prompts cannot be answered so."""
        self.answers.check(recipe)

    @contextmanager
    def open_for(self, loop: SearcherLoop, run: RunDirectory, console: Console) -> Iterator[None]:
        """Let the endpoint answer within the block; says what it is, and at its end what was spent."""
        engine = self.answers.engine
        assert engine is not None
        console.print(f"answers come from {engine.name}", highlight=False)
        try:
            yield
        finally:
            console.print(self.progress(), highlight=False)
            log.info(self.progress())

    def progress(self) -> str:
        """Returns what was spent."""
        return "" if self.answers.engine is None else f"spent: {self.answers.engine.spending}"

    def reason_to_leave(self) -> str | None:
        """Returns that the budget is spent, once its last answer has come."""
        engine = self.answers.engine
        return "its budget is spent" if engine is not None and engine.is_budget_spent else None


def _join(path: Path, service: AnswerService | None) -> int:
    console = terminal()
    run = RunDirectory.open(path)
    require_same_version(run.facts, "a searcher that would join")
    recipe = run.recipe()
    with stop_requests() as stop_request, join_run(run, recipe, stop_request) as place:
        _search(
            place,
            recipe,
            run,
            lambda log: start_searching(recipe, run, place.number, 0, place.stop, True, _answers_of(service)),
            console,
            service,
        )
    return stop_request.exit_code if place.reason == INTERRUPTED else 0


def _join_in_cluster(name: str, address: str, service: AnswerService | None) -> int:
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
            return searcher_loop_at(recipe, connect, number, 0, visit.stop, True, run, _answers_of(service))

        try:
            _search(visit, recipe, run, start_loop, console, service)
        finally:
            contact.call("leave", number, visit.reason or "an error")
    return stop_request.exit_code if visit.reason == INTERRUPTED else 0


def _answers_of(service: AnswerService | None) -> AnswersFromElsewhere | None:
    return None if service is None else service.answers


def _require_single_grades(recipe: Recipe) -> None:
    """Raises `UserError` where answers that come one by one cannot be graded as the recipe wants."""
    reward = recipe.task.reward()
    if isinstance(reward, Separable) and any(calls.unit == "group" for calls in reward.calls()):
        raise UserError(
            "the task's reward compares the answers of a group, and answers from elsewhere are graded one by one: take "
            "a reward that grades each"
        )
    if recipe.run.synchronous_rounds:
        raise UserError(
            "the recipe has --run.synchronous-rounds, and answers from elsewhere come when they like: turn it off"
        )


def _search(
    place: LocalMembership | Visit,
    recipe: Recipe,
    run: RunDirectory,
    start_loop: Callable[[Path], SearcherLoop],
    console: Console,
    service: AnswerService | None,
) -> None:
    """Makes rounds until the searcher is stopped. It does not evaluate, because others would wait for a searcher that
    may leave.

    `start_loop` returns the loop, given the searcher's log.
    """
    if service is not None:
        _require_single_grades(recipe)
        service.check(recipe)
    torch.set_num_threads(recipe.run.threads)
    os.nice(NICENESS)
    with log_to(run.path, place.name) as log_path:
        console.print(
            f"{place.name} joins {run.displayed_path}; its log is {log_path}; Ctrl-C ends it", highlight=False
        )
        loop, printed_at = start_loop(log_path), time.monotonic()
        opened_service = nullcontext() if service is None else service.open_for(loop, run, console)
        make_round = loop.searcher.round if service is not None and service.paces_itself else loop.round
        reason = None
        try:
            with opened_service:
                while not place.stop():
                    if loop.newest_manifest().stop:
                        if service is not None:  # those who call it are told at once
                            break
                        loop.searcher.drain(stop=True)  # the run ends, unless this trainer dies and is restarted
                        time.sleep(POLL_SECONDS)
                        continue
                    if service is not None and (reason := service.reason_to_leave()) is not None:
                        break
                    make_round()
                    if time.monotonic() - printed_at > STATUS_SECONDS:
                        printed_at = time.monotonic()
                        weights = f"weights {loop.searcher.engine.version}"
                        progress = weights if service is None else service.progress() or weights
                        console.print(f"{place.name}: {loop.searcher.rounds} rounds, {progress}", highlight=False)
                loop.searcher.drain(stop=reason is None)  # what was paid for is graded and sent
            place.reason = place.reason or reason or "the run ended"
        except BaseException:
            loop.searcher.save()
            raise
        finally:
            loop.journal.resume()  # so that other searchers get the prompts that it had leased
            loop.close()
    console.print(f"{place.name} left after {loop.searcher.rounds} rounds: {place.reason}", highlight=False)
