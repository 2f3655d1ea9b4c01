"""The tracker `scrape`: after every step, in the loop's own thread, it keeps what the run's metrics endpoint serves."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from verl.observe.run_folder import RunFolder
from verl.observe.trackers import register_tracker

PATIENCE_S = 120.0


def scraping() -> list[str]:
    """Keys of a run that scrapes itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        "trainer.plugins=[tests.scraping]",
        "trainer.logger=[scrape]",
        "trainer.prometheus.enable=True",
        f"trainer.prometheus.port={port}",
    ]


def scraped(folder: Path) -> list[dict[str, float]]:
    """By step: the numbers, by name and labels other than those of the run."""
    return [json.loads(line) for line in (folder / "scraped.jsonl").read_text().splitlines()]


def spans(folder: Path, process: str) -> list[dict[str, Any]]:
    """The phases of a process."""
    lines = (folder / "phases" / f"{process}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def complete(numbers: Mapping[str, float], processes: int) -> bool:
    """Every process has answered, with all tokens of the responses that are there (others are drawn to compare engines
    after weights were sent)."""
    found = {name.partition("process=")[2] for name in numbers if name.startswith("verl_steps_total ")}
    found |= {name.partition("process=")[2] for name in numbers if name.startswith("verl_phase_seconds_sum ")}
    return len(found) >= processes and total(numbers, "verl_generated_tokens_total") >= total(
        numbers, "verl_response_length_tokens_sum"
    )


def total(numbers: Mapping[str, float], name: str) -> float:
    """Over all processes."""
    return sum(value for key, value in numbers.items() if key.partition(" ")[0] == name)


@register_tracker("scrape")
class Scraper:
    def __init__(self, project: str, experiment: str, config: Mapping[str, Any], folder: RunFolder) -> None:
        self._url = f"http://127.0.0.1:{config['trainer']['prometheus']['port']}/metrics"
        trainer, rollout = config["trainer"], config.get("actor_rollout_ref", {}).get("rollout", {})
        ranks = trainer["n_gpus_per_node"] * trainer["nnodes"]
        pool = rollout.get("n_gpus_per_node", 0) * rollout.get("nnodes", 0)
        self._processes = 1 if ranks == 1 or "WORLD_SIZE" in os.environ else 1 + ranks + pool
        self._file = folder.path / "scraped.jsonl"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not complete(numbers := self._scrape(), self._processes) and time.monotonic() < deadline:
            time.sleep(0.2)  # a busy rank answers later, and its last numbers are served meanwhile
        with self._file.open("a") as file:
            file.write(json.dumps(numbers) + "\n")

    def _scrape(self) -> dict[str, float]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        text = opener.open(self._url, timeout=PATIENCE_S).read().decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("project", "experiment")}
                name = " ".join([sample.name, *(f"{k}={v}" for k, v in sorted(labels.items()))])
                found[name] = sample.value
        return found

    def log_samples(self, step: int, rows: list[Any]) -> None:
        return None

    def close(self) -> None:
        return None
