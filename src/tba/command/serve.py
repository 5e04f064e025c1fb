"""`tba serve --run RUN`: answers agents' calls from a run in progress, which learns from their episodes.

It joins the run as `tba search` does. Agents call it as they call OpenAI's API; docs/agents.md has the whole of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from rich.console import Console

from tba.command.options import SearchOptions, ServeOptions
from tba.command.search import add_searcher
from tba.environments.hosts import Hosts, InProcessHost
from tba.environments.recorded import EpisodeReplays
from tba.errors import DeadlineExceeded, UserError
from tba.imported_answers.report import Report
from tba.json_input import read_json
from tba.models.endpoint_teacher import EndpointTeacher
from tba.protocols import Acted, SamplesBase
from tba.recipe import Recipe
from tba.rollout.searcher import OpenAnswer
from tba.runtime.engines import turn_encoder_of, worlds_of
from tba.runtime.graders import grader_of
from tba.runtime.importing import build_importer, replay_hosts_of
from tba.runtime.prompt_sets import prompt_set_of
from tba.runtime.run_directory import RunDirectory
from tba.runtime.searcher_loop import LONGEST_HELD_BACK, SearcherLoop
from tba.serving.engine import AgentLink, Mailbox
from tba.serving.judging import EpisodeJudge
from tba.types import Json, Sampling

_START_SECONDS = 60.0  # that the HTTP server may take to start and to end
_GATE_SECONDS = 0.25  # between two looks whether the run wants another episode
_BODY_BYTES = 1 << 20  # of a body, at least: encoding four times as much takes seconds, for which others wait
_BYTES_PER_TOKEN = 32  # of a body, for each token of an episode
_SHORTEST_TOKEN = 16  # characters of a token that somebody gives


def serve_run(options: ServeOptions) -> int:
    """Serve a run until it ends or Ctrl-C. Returns exit code 0 when the run ended, 130 or 143 after a signal."""
    service = AgentService(options)
    with service.listener:
        return add_searcher(SearchOptions(options.run, options.address), service)


@dataclass
class AgentService:
    """The service of one searcher to agents: an HTTP server in a thread of its own. Raises `UserError` for an address
    that is taken, or that others can reach without TLS, and for tokens or a certificate that cannot be read.
    """

    options: ServeOptions
    agent_link: AgentLink = field(init=False)
    listener: socket.socket = field(init=False)  # from the beginning on, so that who comes early waits
    paces_itself: bool = True  # an episode begins only where the run wants one
    _tokens: dict[str, str] = field(init=False)
    _listeners: list[Any] = field(default_factory=list)
    _judge: EpisodeJudge | None = None
    _replay_hosts: InProcessHost | Hosts | None = None  # of environments, for episodes that were played elsewhere

    def __post_init__(self) -> None:
        _require_server()
        options = self.options
        if not _is_loopback(options.host) and options.certificate is None:
            raise UserError(
                f"--host is {options.host}, which other machines can reach: give --certificate, a file with a TLS "
                "certificate and its key, or listen at 127.0.0.1 behind a tunnel"
            )
        if options.certificate is not None:
            _check_certificate(options.certificate)
        self._tokens = _read_tokens(options.tokens)
        self.agent_link = AgentLink(Mailbox(), self._tell)
        self.listener = _listen(options.host, options.port)

    def _tell(self, answer: OpenAnswer) -> None:
        for listener in self._listeners:
            listener(answer)

    @property
    def answers(self) -> AgentLink:
        """Returns what agents ask of the searcher's engine."""
        return self.agent_link

    def progress(self) -> str:
        """Returns nothing: it is as far as the weights are."""
        return ""

    def reason_to_leave(self) -> None:
        """Returns nothing: agents may come until the run ends."""

    def check(self, recipe: Recipe) -> None:
        """Raises `UserError` where agents cannot answer the recipe's prompts. Environments are made ready here, before
        there is a model whose memory their processes would share.
        """
        if recipe.vine is not None:
            raise UserError(
                "the recipe estimates the values of an answer's steps (vine), which an agent's episode does not have: "
                "serve a recipe without it"
            )
        if not getattr(recipe.model.tokenizer(), "chat_template", None):
            raise UserError(
                "the model's tokenizer has no chat template, and agents send chats: take an instruction-tuned model"
            )
        if recipe.teacher is not None and any(isinstance(model, EndpointTeacher) for model in recipe.teacher.models):
            raise UserError(
                "the recipe has a teacher behind an endpoint, which scores one conversation; an agent's episode may "
                "have several: take a teacher with weights"
            )
        self._replay_hosts = replay_hosts_of(recipe)
        if isinstance(recipe.task, Acted):
            turn_encoder = turn_encoder_of(recipe.task, recipe.model.tokenizer())
            self._judge = EpisodeJudge(EpisodeReplays(worlds_of(recipe.task, inline=False), turn_encoder))

    @contextmanager
    def open_for(self, loop: SearcherLoop, run: RunDirectory, console: Console) -> Iterator[None]:
        """Serve agents within the block; says where, and at its end what was served."""
        from tba.serving.app import AccessRules, application
        from tba.serving.connections import http_server
        from tba.serving.server import EpisodeServer, ServingLimits

        options, recipe, mailbox = self.options, run.recipe(), self.agent_link.mailbox
        model = recipe.model.prepared(recipe.task)
        scheme = "http" if options.certificate is None else "https"
        host, port = self.listener.getsockname()[:2]
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        limits = ServingLimits(
            max_tokens=options.max_tokens or model.max_completion_tokens,
            max_calls=options.max_calls,
            episodes_per_token=options.episodes,
            idle_seconds=options.idle_seconds,
        )
        server = EpisodeServer(
            mailbox=mailbox,
            tokenizer=model.tokenizer(),
            task=recipe.task,
            prompts=prompt_set_of(recipe, model, "train").prompts,
            limits=limits,
            weights=lambda: str(loop.searcher.engine.version),
            sampling=Sampling(recipe.policy_temperature),
            judge=self._judge,
            import_rollouts=self._rollout_importer(loop, recipe, run),
        )
        names = {"localhost", "127.0.0.1", "::1", options.host, host, *filter(None, options.names.split(","))}
        access = AccessRules(
            self._tokens,
            frozenset(name.strip().lower() for name in names),
            scheme,
            max_body_bytes=max(_BODY_BYTES, _BYTES_PER_TOKEN * limits.max_tokens),
        )
        http = http_server(application(server, access), options.certificate)
        self._listeners.append(server.note_done)
        self.agent_link.accepts_episodes = _EpisodeGate(loop)
        if isinstance(model, SamplesBase):
            keeps_base = recipe.reference is None and not recipe.reference_reset
            reference = loop.searcher.reference if keeps_base else None
            self.agent_link.make_base_engine = partial(model.base_engine, recipe.prompts.max_tokens, reference)
        thread = threading.Thread(target=http.run, kwargs={"sockets": [self.listener]}, name="server", daemon=True)
        thread.start()
        try:
            _wait_until(lambda: http.started or not thread.is_alive(), f"the HTTP server at {url} to start")
            if not http.started:
                raise UserError(f"the HTTP server at {url} did not start: the log of this searcher says why")
            with _facts_file(run.path, loop.searcher.name) as facts:
                _write_private(facts, {"url": url, "tokens": self._tokens})
                console.print(f"serving at {url}; its token is in {run.displayed_path}/{facts.name}", highlight=False)
                yield
        finally:
            server.close()
            if self._judge is not None:
                self._judge.close()
            if isinstance(self._replay_hosts, Hosts):
                self._replay_hosts.end()
            http.should_exit = True
            with suppress(DeadlineExceeded):
                _wait_until(lambda: not thread.is_alive(), "the HTTP server to end")
            loop.served = server.figures
            figures = ", ".join(f"{count} {name}" for name, count in sorted(server.figures.items()))
            console.print(f"served: {figures or 'nothing'}", highlight=False)

    def _rollout_importer(self, loop: SearcherLoop, recipe: Recipe, run: RunDirectory) -> Callable[..., Report]:
        """Returns what takes episodes into the run that were played elsewhere, by the parts that the searcher has."""
        searcher, prepared_recipe = loop.searcher, replace(recipe, model=recipe.model.prepared(recipe.task))
        reward = grader_of(recipe, run, retries=0)
        importer = build_importer(
            prepared_recipe,
            reward,
            searcher.reference,
            searcher.teachers,
            loop.journal,
            self._replay_hosts,
            task_prompts_only=True,
        )

        def import_rollouts(rollouts: Sequence[Json], source: str) -> Report:
            searcher.finish_scoring()
            searcher.load_reference()
            report = importer.import_values([_with_uid(row) for row in rollouts], source)
            if recipe.record.hide_text:
                report.hide_details()
            return report

        return import_rollouts


def _with_uid(row: Json) -> Json:
    """Returns a rollout with a name of its own, so that equal ones without names stay several."""
    return {"uid": secrets.token_hex(16), **row} if isinstance(row, dict) else row


@dataclass
class _EpisodeGate:
    """Says whether the run wants another episode: not while it has all trajectories that it wants by now, or while too
    many answers wait for their grades.
    """

    loop: SearcherLoop
    _is_open: bool = True
    _looked_at: float = -_GATE_SECONDS
    _closed_since: float = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at < _GATE_SECONDS:
            return self._is_open
        self._looked_at = now
        searcher, was_open = self.loop.searcher, self._is_open
        wanted_rows = searcher.manifest.wanted
        is_behind = wanted_rows is None or self.loop.journal.rows() + searcher.unsent_count < wanted_rows
        self._is_open = is_behind and not searcher.has_grading_backlog
        self._closed_since = now if was_open else self._closed_since
        if not self._is_open and now - self._closed_since > LONGEST_HELD_BACK:
            self._is_open = True
        return self._is_open


def _require_server() -> None:
    try:
        import starlette
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError("tba serve needs starlette and uvicorn: pip install 'tba-rl[serve]'") from error
    del starlette


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_certificate(path: Path) -> None:
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(path, password="")  # so that nobody is asked for one
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"--certificate {path} cannot be used ({error}): give a PEM file with the certificate and its key"
        ) from error


def _read_tokens(path: Path | None) -> dict[str, str]:
    """Returns the tokens by their owners' names: those of a file, or a new one."""
    if path is None:
        return {"agent": secrets.token_urlsafe(24)}
    remedy = 'give a JSON object such as {"alice": "a-long-random-text"}'
    tokens: dict[str, str] = read_json(path, remedy, dict[str, str])
    if not tokens or any(len(token) < _SHORTEST_TOKEN for token in tokens.values()):
        raise UserError(f"--tokens {path} has none, or one of less than {_SHORTEST_TOKEN} characters: {remedy}")
    if len(set(tokens.values())) < len(tokens):
        raise UserError(f"--tokens {path} gives one token to two owners, who would be taken for each other: {remedy}")
    if not all(re.fullmatch(r"[!-~]+", token) for token in tokens.values()):
        raise UserError(f"--tokens {path} has a token that no header can carry: take letters, digits and signs")
    return tokens


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises `UserError` where the address is taken or none of this machine's."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"cannot listen at --host {host} --port {port} ({error.strerror}): give a port that is free (0: any)"
        ) from error


@contextmanager
def _facts_file(run: Path, searcher: str) -> Iterator[Path]:
    """Yields the file that says where a server listens, which is removed at the end: serve.json of the run, or where
    another server of this run has that, one of the searcher's name.
    """
    with (run / "serve.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file = run / "serve.json"
        except BlockingIOError:
            file = run / f"serve-{searcher}.json"
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)


def _write_private(path: Path, value: Any) -> None:
    """Write JSON to a file that only its owner can read, beside it and renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(value, file)
    temporary.replace(path)


def _wait_until(condition: Any, purpose: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {_START_SECONDS:g} s for {purpose}")
        time.sleep(0.02)
