"""The numbers of a run at `http://host:port/metrics`, in Prometheus' text format: live ones of all processes, and the
metrics of the newest step.

It only reads, serves nothing but the two paths below, binds to the loopback address unless `trainer.prometheus.host`
says otherwise, and has few connections (`verl/http_server.py`): it cannot use up the run's file descriptors.
Counters never fall, also not after a kill and a resume: what is sent was written to `counters.json` before.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import threading
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from verl import __version__, http_server
from verl.errors import ConfigError
from verl.json_input import read_json
from verl.observe.jsonl import numbers
from verl.observe.live import METRICS, Snapshot, live

_FAMILIES: dict[str, type[Metric]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def metric_name(name: str) -> str:
    """`actor/pg_loss` -> `verl_actor_pg_loss`: letters, digits and underscores, as the format wants."""
    return "verl_" + re.sub(r"[^a-zA-Z0-9_]+", "_", name).strip("_")


class Counts:
    """What counters and histograms had reached when they were last served, in a file of the run folder.

    A resumed run continues from there. Where a run that starts over removed the file, counts begin at 0 again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._before: dict[str, list[float]] = {}
        if path is not None:
            # Of another program, or damaged: counts begin at 0.
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, OverflowError):
                read = read_json(path)
                self._before = {str(key): [float(value) for value in values] for key, values in read.items()}
        self._now = dict(self._before)

    def begin(self) -> None:
        """A scrape begins."""
        if self._before and self._path is not None and not self._path.exists():
            self._before, self._now = {}, {}

    def reached(self, process: str, name: str, label: str, values: list[float]) -> list[float]:
        """These values of this process, on top of those before it was started."""
        key = f"{process} {name} {label}".rstrip()
        before = self._before.get(key, [])
        if len(before) == len(values):
            values = [old + new for old, new in zip(before, values, strict=True)]
        # Of two scrapes at a time the later one may have taken its numbers first; a rank may have started again.
        last = self._now.get(key, [])
        self._now[key] = list(map(max, last, values)) if len(last) == len(values) else values
        return self._now[key]

    def save(self) -> None:
        """Before the numbers are sent. Without waiting for the disk: a kill loses nothing that was written."""
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk does not stop the endpoint
            temporary.write_text(json.dumps(self._now), encoding="utf-8")
            os.replace(temporary, self._path)


class _Handler(http_server.Handler, MetricsHandler):
    timeout = idle_s = 10.0

    def do_GET(self) -> None:
        if urlsplit(self.path).path in ("/metrics", "/"):
            super().do_GET()
        else:
            self.send_error(404, explain="metrics are at /metrics")


class PrometheusTracker(Collector):
    """A tracker that answers scrapes from its own threads. `folder`: where counts are kept for a resumed run."""

    def __init__(
        self,
        host: str,
        port: int,
        project: str,
        experiment: str,
        folder: Path | None = None,
        device: str = "auto",
    ) -> None:
        if device == "auto":
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._run = {"project": project, "experiment": experiment}
        self._build = {
            **self._run,
            "version": __version__,
            "torch": importlib.metadata.version("torch"),
            "python": platform.python_version(),
            "device": device,
        }
        self._newest: dict[str, float] = {}
        self._counts = Counts(None if folder is None else folder / "counters.json")
        self._lock = threading.Lock()
        registry = CollectorRegistry(auto_describe=False)
        try:
            self.server = http_server.Server(host, port, _Handler.factory(registry))
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics at {host}:{port}: {error.strerror or error}. Set trainer.prometheus.port to a "
                f"free port, {http_server.free_port()} for example, or trainer.prometheus.enable=False."
            ) from None
        registry.register(self)
        self.port = int(self.server.server_address[1])
        self._thread = threading.Thread(target=self.server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._newest = dict(sorted(numbers(metrics).items()))

    def log_samples(self, step: int, rows: list[Any]) -> None:
        """Samples are no numbers."""

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.server.close_connections()
        self._thread.join(timeout=5)

    def collect(self) -> Iterator[Metric]:
        snapshots = live.everything()  # asks other processes: outside of the lock
        with self._lock:
            self._counts.begin()
            families = [*self._of_the_run(snapshots), *self._live(snapshots)]
            self._counts.save()
        written = {family.name for family in families}
        yield from families
        for name, value in self._newest.items():
            about = f"{name} of the newest step"
            family = GaugeMetricFamily(metric_name(name), about, labels=list(self._run))
            if family.name not in written:  # names that differ only in punctuation are one name here
                written.add(family.name)
                family.add_metric(list(self._run.values()), value)
                yield family

    def _of_the_run(self, snapshots: list[Snapshot]) -> Iterator[Metric]:
        versions = "Versions of the running program"
        build = GaugeMetricFamily("verl_build_info", versions, labels=list(self._build))
        build.add_metric(list(self._build.values()), 1.0)
        yield build
        labels = [*self._run, "process", "phase"]
        running = GaugeMetricFamily("verl_phase", "1 for each phase of a step that is running", labels=labels)
        began = "Unix time at which a running phase began"
        start = GaugeMetricFamily("verl_phase_start_timestamp_seconds", began, labels=labels)
        for snapshot in snapshots:
            for name, since in snapshot.phases.items():
                where = [*self._run.values(), snapshot.process, name]
                running.add_metric(where, 1.0)
                start.add_metric(where, since)
        yield from (running, start)

    def _live(self, snapshots: list[Snapshot]) -> Iterator[Metric]:
        for name, metric in METRICS.items():
            labels = [*self._run, "process", *([metric.label] if metric.label else [])]
            family = _FAMILIES[metric.kind](metric_name(name), metric.help, labels=labels)  # type: ignore[call-arg]
            for snapshot in snapshots:
                where = [*self._run.values(), snapshot.process]
                if metric.kind == "histogram":
                    self._add_histogram(family, name, where, snapshot)
                elif name in snapshot.values:
                    value = snapshot.values[name]
                    if metric.kind == "counter":
                        value = self._counts.reached(snapshot.process, name, "", [value])[0]
                    family.add_metric(where, value)  # type: ignore[attr-defined]
            yield family

    def _add_histogram(self, family: Any, name: str, where: list[str], snapshot: Snapshot) -> None:
        bounds = [*map(str, METRICS[name].bounds), "+Inf"]
        for (histogram, label), (counts, total) in snapshot.histograms.items():
            if histogram == name:
                *numbers, total = self._counts.reached(snapshot.process, name, label, [*counts, total])
                buckets = list(zip(bounds, accumulate(numbers), strict=True))
                labels = [*where, label] if METRICS[name].label else where
                family.add_metric(labels, buckets=buckets, sum_value=total)
