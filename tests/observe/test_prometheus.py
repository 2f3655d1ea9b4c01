"""The metrics endpoint: what a scrape sees, and that counters never fall."""

from __future__ import annotations

import contextlib
import math
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from verl.errors import ConfigError
from verl.observe.live import METRICS, Snapshot, live
from verl.observe.prometheus import PrometheusTracker, metric_name
from verl.observe.run_folder import RunFolder


@pytest.fixture(autouse=True)
def fresh_table() -> Iterator[None]:
    live.begin_run()
    yield
    live.begin_run()


@pytest.fixture
def served() -> Iterator[PrometheusTracker]:
    tracker = PrometheusTracker("127.0.0.1", 0, "project", "experiment")
    yield tracker
    tracker.close()


def scraped(tracker: PrometheusTracker, path: str = "/metrics") -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(f"http://127.0.0.1:{tracker.port}{path}", timeout=120).read().decode()


def samples(tracker: PrometheusTracker) -> dict[str, float]:
    """By name, process and own labels."""
    found = {}
    for family in text_string_to_metric_families(scraped(tracker)):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("project", "experiment")}
            found[" ".join([sample.name, *(f"{k}={v}" for k, v in sorted(labels.items()))])] = sample.value
    return found


def test_every_live_metric_has_its_help_and_type(served: PrometheusTracker) -> None:
    text = scraped(served)
    for name, metric in METRICS.items():
        assert f"# HELP {metric_name(name)} {metric.help}\n# TYPE {metric_name(name)} {metric.kind}\n" in text


def test_the_metrics_of_the_newest_step_are_gauges(served: PrometheusTracker) -> None:
    served.log(3, {"actor/pg_loss": 0.5, "val-core/x/acc/mean@1": math.nan, "a/b": 1, "a_b": 2, "text": "no"})
    families = {family.name: family for family in text_string_to_metric_families(scraped(served))}
    loss = families["verl_actor_pg_loss"]
    assert (loss.type, loss.documentation) == ("gauge", "actor/pg_loss of the newest step")
    assert [sample.labels for sample in loss.samples] == [{"project": "project", "experiment": "experiment"}]
    assert math.isnan(families["verl_val_core_x_acc_mean_1"].samples[0].value)
    assert families["verl_a_b"].samples[0].value == 1.0 and "verl_text" not in families
    served.log(4, {"huge": 10**400})
    assert "verl_huge" not in scraped(served, "/")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scraped(served, "/etc/passwd")


def test_a_scrape_in_the_middle_of_a_step_sees_phases_and_counts_of_all_processes(
    served: PrometheusTracker,
) -> None:
    live.others = lambda: [Snapshot("rank_0", {"generated_tokens_total": 7.0, "sequences_running": 2.0})]
    with live.phase("gen"):
        live.add("generated_tokens_total", 3)
        found = samples(served)
        live.add("generated_tokens_total", 4)
        later = samples(served)
    assert found["verl_phase phase=gen process=controller"] == 1.0
    assert found["verl_phase_start_timestamp_seconds phase=gen process=controller"] > 1e9
    assert found["verl_generated_tokens_total process=rank_0"] == 7.0
    assert found["verl_sequences_running process=rank_0"] == 2.0
    assert found["verl_generated_tokens_total process=controller"] == 3.0
    assert later["verl_generated_tokens_total process=controller"] == 7.0
    live.observe("response_length_tokens", 20)
    ended = samples(served)
    assert "verl_phase phase=gen process=controller" not in ended
    assert ended["verl_phase_seconds_count phase=gen process=controller"] == 1.0
    assert ended["verl_response_length_tokens_bucket le=16 process=controller"] == 0.0
    assert ended["verl_response_length_tokens_bucket le=32 process=controller"] == 1.0


@pytest.mark.slow(seconds=3)
def test_counters_continue_where_a_killed_run_left_them(tmp_path: Path) -> None:
    def run(tokens: int, path: Path) -> float:
        live.begin_run()
        tracker = PrometheusTracker("127.0.0.1", 0, "p", "e", path)
        live.add("generated_tokens_total", tokens)
        live.observe("response_length_tokens", 20)
        found = samples(tracker)
        tracker.close()  # what a kill leaves is what the last scrape wrote
        assert found["verl_response_length_tokens_count process=controller"] == (1 if tokens == 5 else 2)
        return found["verl_generated_tokens_total process=controller"]

    with RunFolder(tmp_path) as folder:
        assert run(5, folder.path) == 5
        assert run(2, folder.path) == 7
        folder.restart()
        assert run(5, folder.path) == 5, "a run that starts over counts from 0"
        folder.counters_file.write_text("{damaged")
        assert run(5, folder.path) == 5


def test_a_taken_port_is_refused_with_a_free_one(served: PrometheusTracker) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.prometheus\.port to a free port, \d+ for example"):
        PrometheusTracker("127.0.0.1", served.port, "p", "e")


def test_connections_that_ask_for_nothing_do_not_use_up_the_metrics_endpoint(
    served: PrometheusTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The oldest makes place, not one that is too slow.
    monkeypatch.setattr("verl.observe.prometheus._Handler.timeout", 600.0)
    monkeypatch.setattr("verl.observe.prometheus._Handler.idle_s", 600.0)
    most = served.server.max_connections
    with contextlib.ExitStack() as stack:
        for number in range(3 * most):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=120))
            half.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")  # and no end of the request
            assert len(served.server.connections) <= most, number
        assert "verl_step" in scraped(served)  # they are all still there
        assert len(served.server.connections) <= most
    assert "verl_step" in scraped(served)


def test_a_scraper_that_reads_nothing_delays_nobody(served: PrometheusTracker) -> None:
    served.log(1, {f"number_{number}": 0.5 for number in range(3000)})
    # What is accepted has the same small buffer: the answer does not fit into the kernel.
    served.server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.settimeout(120)
        stuck.connect(("127.0.0.1", served.port))
        stuck.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        stuck.recv(1)  # its answer is being sent
        live.add("steps_total")
        assert samples(served)["verl_steps_total process=controller"] == 1.0
        served.log(2, {"number_0": 0.25})
        assert samples(served)["verl_number_0"] == 0.25
        clients = []
        for each in list(served.server.connections):
            with contextlib.suppress(OSError):  # just closed
                clients.append(each.getpeername())
        assert stuck.getsockname() in clients, "it is still there"
