"""The newest metrics of a run at `http://host:port/metrics`, in Prometheus' text format.

What always holds: it only reads; it serves nothing but the two paths below; it binds to the loopback address
unless `trainer.prometheus.host` says otherwise.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.errors import ConfigError


def metric_name(name: str) -> str:
    """`actor/pg_loss` -> `verl_actor_pg_loss`: letters, digits and underscores, as the format wants."""
    return "verl_" + re.sub(r"[^a-zA-Z0-9_]+", "_", name).strip("_")


def exposition(step: int, metrics: Mapping[str, Any]) -> str:
    """The text a scrape gets. Every metric is a gauge with the value of the newest step."""
    lines = ["# TYPE verl_step gauge", f"verl_step {step}"]
    for name, value in sorted(metrics.items()):
        if isinstance(value, (int, float)):
            lines += [f"# TYPE {metric_name(name)} gauge", f"{metric_name(name)} {_number(float(value))}"]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


class PrometheusTracker:
    """A tracker that answers scrapes from a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._text = exposition(0, {})
        tracker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/metrics", "/"):
                    self.send_error(404)
                    return
                body = tracker._text.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                return None

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics at {host}:{port}: {error.strerror or error}. Set trainer.prometheus.port to a "
                f"free port, or trainer.prometheus.enable=False."
            ) from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._text = exposition(step, metrics)

    def log_samples(self, step: int, rows: list[Any]) -> None:
        return None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
