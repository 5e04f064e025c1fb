"""Serves what a run records to Prometheus, while it goes on.

Invariant: the run's files are read when somebody asks, and a step costs nothing more. Every figure has the label `run`.
Whoever can reach the port from another machine needs a token.
"""

from __future__ import annotations

import hmac
import re
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tba.errors import UserError
from tba.fields import as_declared
from tba.record import metrics
from tba.record.evaluations import RunningEvaluations
from tba.record.faults import count_faults
from tba.record.metrics import RunningMetrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_SHORTEST_TOKEN = 16  # characters


@dataclass(frozen=True)
@as_declared
class PrometheusSettings:
    """Says where a run's figures are served. Raises `UserError` for a port that is none."""

    port: int | None = None  # port that serves /metrics; 0: any that is free; None: nothing is served
    host: str = "127.0.0.1"  # the address that it listens on; another than loopback needs a token
    token_file: Path | None = None  # a file with the bearer token that Prometheus sends

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port < 2**16:
            raise UserError(f"record.prometheus: port is {self.port}, give one from 0 to 65535")

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect while nothing is served."""
        return {"host": "port 9400", "token_file": "port 9400"} if self.port is None else {}

    def validate(self) -> None:
        """Raises `UserError` where the package is missing, or others could reach the port without a token."""
        if self.port is None:
            return
        if find_spec("prometheus_client") is None:
            raise UserError(
                "figures for Prometheus were asked for, but the package prometheus-client is not installed: pip "
                "install -e '.[prometheus]', or leave out --record.prometheus.port"
            )
        if self._token() is None and not _is_loopback(self.host):
            raise UserError(
                f"--record.prometheus.host is {self.host}, which others can reach: give "
                "--record.prometheus.token-file, or leave the host out"
            )

    def serve(self, run: Path, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """Returns a context in which the figures of the run in `run` are served, if they are to be. say: is told the
        address. Raises `UserError` as `validate`, and for a port that is taken.
        """
        self.validate()
        return nullcontext() if self.port is None else self._serve(run, self.port, say)

    @contextmanager
    def _serve(self, run: Path, port: int, say: Callable[[str], None]) -> Iterator[None]:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry()
        registry.register(RunCollector(run))
        app, token = make_wsgi_app(registry), self._token()
        try:
            server = make_server(
                self.host, port, app if token is None else _require_token(app, token), _MetricsServer, _QuietHandler
            )
        except OSError as error:
            raise UserError(
                f"figures for Prometheus cannot be served at {self.host}:{port} ({error}): give another "
                "--record.prometheus.port, 0 for any that is free"
            ) from error
        thread = threading.Thread(target=server.serve_forever, name="prometheus", daemon=True)
        thread.start()
        say(f"figures for Prometheus at http://{self.host}:{server.server_port}/metrics")
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()

    def _token(self) -> str | None:
        """Returns the token. Raises `UserError` for a file without one, or with one that is easy to guess."""
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--record.prometheus.token-file {self.token_file} cannot be read: {error}") from error
        if len(token) < _SHORTEST_TOKEN or not re.fullmatch(r"[!-~]+", token):
            raise UserError(
                f"--record.prometheus.token-file {self.token_file} needs one word of at least {_SHORTEST_TOKEN} "
                "letters, digits and signs"
            )
        return token


class RunCollector:
    """Gives Prometheus what a run has recorded so far. Each call reads only what was written since the last, and the
    faults.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._lock = run, threading.Lock()  # two may ask at a time
        self._metrics, self._evaluations = RunningMetrics(run), RunningEvaluations(run)

    def collect(self) -> Iterable[Metric]:
        """Yields every figure of the newest step, rates in tokens a second, held-out figures and counts of faults."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            self._metrics.read_new()
            self._evaluations.read_new()
            row, evaluations = dict(self._metrics.newest), [*self._evaluations.newest]
            rates = {half: self._metrics.rate(half) for half in ("generated", "trained")}
        gauges = {re.sub(r"\W", "_", name): value for name, value in row.items() if metrics.is_number(value)}
        gauges |= {f"{half}_tokens_per_second": rate for half, rate in rates.items() if rate is not None}
        with suppress(OSError):  # there is none before the first step
            gauges["last_step_timestamp_seconds"] = (self._run / metrics.FILE).stat().st_mtime
        text = "of the newest step, as in metrics.jsonl"
        for name, value in gauges.items():
            yield self._family(GaugeMetricFamily, name, text, {(): value})
        figures: dict[tuple[str, ...], float] = {(e.metric,): e.value for e in evaluations}
        yield self._family(GaugeMetricFamily, "evaluation", "newest held-out figures", figures, "metric")
        faults: dict[tuple[str, ...], float] = {(kind,): count for kind, count in count_faults(self._run).items()}
        yield self._family(CounterMetricFamily, "faults", "faults that the run survived", faults, "kind")

    def _family(self, kind: Any, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        """Returns the values of one name. labels: what they differ by, beside the run."""
        family = kind(f"tba_{name}", text, labels=["run", *labels])
        for label_values, value in values.items():
            family.add_metric([self._run.name, *label_values], value)
        return cast("Metric", family)


class _MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """Answers each request in a thread of its own, so that a slow one keeps nobody waiting."""

    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """Writes no line for each request."""

    timeout = 30  # seconds, of a connection that sends nothing

    def log_message(self, format: str, *args: object) -> None:
        pass


def _require_token(app: Any, token: str) -> Any:
    """Returns the application for requests that have the token; others are answered with 401."""
    expected_header = f"Bearer {token}".encode("latin-1")

    def guarded_app(environ: Mapping[str, Any], start_response: Any) -> Any:
        if hmac.compare_digest(str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1"), expected_header):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"a bearer token is needed\n"]

    return guarded_app


def _is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches an address; of names, `localhost` alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
