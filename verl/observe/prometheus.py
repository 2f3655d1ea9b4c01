"""The newest metrics of a run at `http://host:port/metrics`, in Prometheus' text format.

It only reads, serves nothing but the two paths below, binds to the loopback address unless `trainer.prometheus.host`
says otherwise, and never has more than `MAX_CONNECTIONS` connections: it cannot use up the run's file descriptors.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app
from prometheus_client.registry import Collector

from verl.errors import ConfigError

MAX_CONNECTIONS = 32
TIMEOUT_S = 10.0


def metric_name(name: str) -> str:
    """`actor/pg_loss` -> `verl_actor_pg_loss`: letters, digits and underscores, as the format wants."""
    return "verl_" + re.sub(r"[^a-zA-Z0-9_]+", "_", name).strip("_")


class NewestStep(Collector):
    """Every number of the newest step as a gauge, with the run as its label."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._values: dict[str, float] = {"step": 0.0}

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = {"step": float(step)}
        for name, value in sorted(metrics.items()):
            with contextlib.suppress(OverflowError):  # an integer above what a float can hold
                if isinstance(value, (int, float)):
                    values[name] = float(value)
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        written = set()
        for name, value in self._values.items():
            family = GaugeMetricFamily(metric_name(name), f"{name} of the newest step", labels=["run"])
            if family.name not in written:  # names that differ only in punctuation are one name here
                written.add(family.name)
                family.add_metric([self._run], value)
                yield family


class _Server(ThreadingWSGIServer):
    """A thread per connection, and a limit on connections: for a new one beyond that, the oldest is closed."""

    request_queue_size = 128  # a client that finds the queue full is kept waiting for a second by the kernel

    def __init__(self, *arguments: Any) -> None:
        self.connections: list[socket.socket] = []
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.cut_off(self.connections[:1])
            if not self._free.acquire(timeout=TIMEOUT_S):
                super().shutdown_request(request)
                return
        self.connections.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        if request in self.connections:
            self.connections.remove(request)
            self._free.release()

    def cut_off(self, connections: list[socket.socket]) -> None:
        """Let the threads that read from them see their end."""
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None  # a client that disconnected or timed out must not disturb the run


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        return None


class PrometheusTracker:
    """A tracker that answers scrapes from its own threads. `run` is the label of every metric."""

    def __init__(self, host: str, port: int, run: str) -> None:
        self._newest = NewestStep(run)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._newest)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            server_class = type("Server", (_Server,), {"address_family": family})
            self.server: _Server = make_server(host, port, _application(registry), server_class, _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics at {host}:{port}: {error.strerror or error}. Set trainer.prometheus.port to a "
                f"free port, or trainer.prometheus.enable=False."
            ) from None
        self.port = int(self.server.server_address[1])
        self._thread = threading.Thread(target=self.server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._newest.update(step, metrics)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        return None

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.server.cut_off(list(self.server.connections))
        self._thread.join(timeout=5)


def _application(registry: CollectorRegistry) -> Callable[..., Iterable[bytes]]:
    metrics = make_wsgi_app(registry)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in ("/metrics", "/"):
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        return metrics(environ, start_response)

    return application
