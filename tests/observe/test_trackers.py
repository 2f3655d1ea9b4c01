"""Trackers, console and report: what reaches the user."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from verl.errors import ConfigError, MissingPackage
from verl.observe import trackers as module
from verl.observe.console import StepConsole, sparkline, step_line
from verl.observe.prometheus import MAX_CONNECTIONS, PrometheusTracker
from verl.observe.report import write_report
from verl.observe.run_folder import RunFolder
from verl.observe.trackers import FanOut, FileTracker, build_trackers, register_tracker

METRICS = {
    "reward/mean": 0.4375,
    "response_length/mean": 84.6,
    "actor/pg_loss": -0.00123,
    "actor/entropy": 1.25,
    "actor/grad_norm": 0.512,
    "perf/throughput": 3210.4,
    "timing_s/step": 2.34,
    "val-core/x/acc/mean@1": 0.5,
}


class Broken:
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        raise ConnectionError("no route")

    def log_samples(self, step: int, rows: list[Any]) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("no route")


def test_a_step_is_one_line_with_the_numbers_that_matter() -> None:
    line = step_line(7, METRICS, total_steps=100)
    assert line == (
        "step   7/100  reward 0.438  length 85  loss -0.0012  entropy 1.250  grad 0.51  tok/s 3,210  time 2.3s"
        "  validation 0.500"
    )
    assert step_line(3, {"actor/grad_norm": float("nan"), "actor/kl": 1e-7}) == "step 3  kl 1.0e-07  grad nan"


def test_piped_output_is_plain_lines_even_when_live_is_asked_for() -> None:
    out = io.StringIO()
    console = StepConsole(5, live=True, console=Console(file=out, width=200, highlight=False))
    console.log(1, METRICS)
    console.note("[not markup] <stays>")
    console.close()
    assert out.getvalue().splitlines() == [step_line(1, METRICS, 5), "[not markup] <stays>"]


def test_on_a_terminal_the_display_is_live_and_ends_with_the_last_step() -> None:
    out = io.StringIO()
    console = StepConsole(2, live=True, console=Console(file=out, width=120, force_terminal=True))
    console.log(1, METRICS)
    console.log(2, METRICS | {"reward/mean": 0.9})
    console.note("halfway")
    console.close()
    text = out.getvalue()
    assert "\x1b[" in text and "halfway" in text and "reward 0.900" in text


def test_sparkline_scales_to_its_range() -> None:
    assert sparkline([0.0, 1.0, float("nan"), 0.5]) == "▁█▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_the_file_is_always_written_and_failing_trackers_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder(tmp_path) as run, caplog.at_level(logging.WARNING):
        fan = FanOut({"wandb": Broken(), "file": FileTracker(run)})
        fan.log(1, {"a": 1.0})
        fan.log(2, {"a": 2.0})
        fan.close()
        assert [row["a"] for row in run.read_metrics()] == [1.0, 2.0]
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1
    assert "'wandb' failed (ConnectionError: no route)" in warnings[0]


def test_a_file_that_cannot_be_written_is_said_each_time_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder(tmp_path) as run, caplog.at_level(logging.WARNING):
        (tmp_path / "metrics.jsonl").mkdir()
        fan = build_trackers([], "p", "e", {}, run)
        fan.log(1, {})
        fan.log(2, {})
    assert len([r for r in caplog.records if "could not be written" in r.getMessage()]) == 2


def test_an_unknown_logger_lists_the_known_ones(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path) as run,
        pytest.raises(ConfigError, match="'wandbb'.*console, file, wandb, tensorboard"),
    ):
        build_trackers(["console", "wandbb"], "p", "e", {}, run)


@pytest.mark.parametrize(
    ("name", "module_name"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_a_missing_package_is_named_with_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module_name: str
) -> None:
    monkeypatch.setitem(sys.modules, module_name, None)
    with RunFolder(tmp_path) as run, pytest.raises(MissingPackage, match=f"pip install .{name}>="):
        build_trackers(name, "p", "e", {}, run)


def test_tensorboard_files_hold_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunFolder(tmp_path) as run:
        fan = build_trackers("tensorboard", "p", "e", {}, run)
        fan.log(1, {"reward/mean": 0.25})
        fan.log(2, {"reward/mean": 0.75})
        fan.log_samples(2, [{"prompt": "1+1", "response": "2"}])
        fan.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]


def test_a_registered_tracker_can_be_named_and_built_in_names_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_registered", {})
    seen: list[tuple[int, float]] = []

    @register_tracker("mine")
    def build(project: str, experiment: str, config: Mapping[str, Any], run: RunFolder) -> Any:
        class Mine(Broken):
            def log(self, step: int, metrics: Mapping[str, Any]) -> None:
                seen.append((step, metrics["a"]))

        return Mine()

    with RunFolder(tmp_path) as run:
        build_trackers(["mine"], "p", "e", {}, run).log(4, {"a": 1.0})
    assert seen == [(4, 1.0)]
    with pytest.raises(ConfigError, match="'console' is taken"):
        register_tracker("console")


@pytest.fixture
def served() -> Iterator[PrometheusTracker]:
    tracker = PrometheusTracker("127.0.0.1", 0, "project/experiment")
    yield tracker
    tracker.close()


def scraped(tracker: PrometheusTracker, path: str = "/metrics") -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(f"http://127.0.0.1:{tracker.port}{path}", timeout=120).read().decode()


def test_prometheus_serves_the_newest_step(served: PrometheusTracker) -> None:
    served.log(
        3, {"actor/pg_loss": 0.5, "val-core/x/acc/mean@1": float("nan"), "a/b": 1, "a_b": 2, "text": "no"}
    )
    families = {family.name: family for family in text_string_to_metric_families(scraped(served))}
    assert set(families) == {"verl_step", "verl_actor_pg_loss", "verl_val_core_x_acc_mean_1", "verl_a_b"}
    for family in families.values():
        assert family.type == "gauge" and family.documentation.endswith("of the newest step")
        assert [sample.labels for sample in family.samples] == [{"run": "project/experiment"}]
    assert families["verl_step"].samples[0].value == 3.0
    assert families["verl_actor_pg_loss"].samples[0].value == 0.5
    assert families["verl_actor_pg_loss"].documentation == "actor/pg_loss of the newest step"
    assert math.isnan(families["verl_val_core_x_acc_mean_1"].samples[0].value)
    served.log(4, {"huge": 10**400})
    assert "verl_huge" not in scraped(served, "/")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scraped(served, "/etc/passwd")
    with pytest.raises(ConfigError, match=r"trainer\.prometheus\.port"):
        PrometheusTracker("127.0.0.1", served.port, "r")


def test_connections_that_ask_for_nothing_do_not_use_up_the_metrics_endpoint(
    served: PrometheusTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "verl.observe.prometheus.TIMEOUT_S", 600.0
    )  # the oldest makes place, not one that is too slow
    monkeypatch.setattr("verl.observe.prometheus._Handler.timeout", 600.0)
    with contextlib.ExitStack() as stack:
        for number in range(3 * MAX_CONNECTIONS):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=120))
            half.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")  # and no end of the request
            assert len(served.server.connections) <= MAX_CONNECTIONS, number
        assert "verl_step" in scraped(served)  # they are all still there
        assert len(served.server.connections) <= MAX_CONNECTIONS
    assert "verl_step" in scraped(served)


class Outside(HTMLParser):
    """Collects what a page would run or fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [tag for name, _ in attrs if name in ("src", "href", "onload")]
        self.found += [tag] if tag in ("script", "link", "iframe") else []


def test_the_report_is_self_contained_and_escapes_what_models_write(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as run:
        run.write_config({"a": 1})
        for step in range(1, 4):
            run.append_metrics(step, {"reward/mean": step / 3, "actor/entropy": None, "timing_s/step": 1.0})
        run.append_metrics(4, {"val-core/<b>/acc": 0.5})
        run.write_validation(2, [{"prompt": "p", "response": "<script>alert(1)</script><img src=x>"}])
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    parser = Outside()
    parser.feed(page)
    assert parser.found == []
    assert parser.tags.count("polyline") == 2  # reward and time; one point alone is a dot
    assert "&lt;script&gt;" in page and "0.333 &rarr; 1.000" in page


LONG = "val-core/a_rather_long_dataset_name/with-another-part/acc"


def long_run(folder: Path) -> Path:
    """A run whose metrics have long names and whose rules had something to say."""
    with RunFolder(folder) as run:
        run.write_config({"actor_rollout_ref": {}})
        for step in (1, 2):
            scores = {f"{LONG}/mean@1": step / 10, f"{LONG}/pass@1": step / 10, f"{LONG}/best@4": step / 5}
            run.append_metrics(step, {**scores, "reward/mean": 0.1})
            run.append_health(step, {"rule": "<b>cut</b> at 4"})
    return write_report(folder)


def test_the_report_has_each_curve_once_and_what_the_rules_said(tmp_path: Path) -> None:
    page = long_run(tmp_path / "run").read_text(encoding="utf-8")
    assert page.count("<figure>") == 3, "mean@1 and pass@1 are one curve, best@4 is another"
    assert f"{LONG}/mean@1" in page and f"{LONG}/best@4" in page and f"{LONG}/pass@1" not in page
    assert "<strong>steps 1-2, 2 times</strong> &lt;b&gt;cut&lt;/b&gt; at 4" in page


@pytest.mark.components
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1300, 420])
def test_long_names_stay_inside_their_cards(tmp_path: Path, width: int) -> None:
    page = long_run(tmp_path / "run")
    measure = (
        "<script>document.body.innerHTML = [document.documentElement, ...document.querySelectorAll('figcaption')]"
        ".filter(e => e.scrollWidth > e.clientWidth).map(e => 'OVERFLOW ' + e.textContent).join() || 'FITS'</script>"
    )
    # The page's own policy allows no script.
    text = re.sub(r"<meta http-equiv.*?>", "", page.read_text(encoding="utf-8"), count=1)
    page.write_text(text.replace("</body>", f"{measure}</body>"), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    profile = f"--user-data-dir={tmp_path}/profile"
    done = subprocess.run(
        [*command, profile, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=240
    )
    assert "<body>FITS" in done.stdout, done.stdout[-500:]


def test_a_report_of_an_empty_run_says_so(tmp_path: Path) -> None:
    assert "No step has finished yet" in write_report(tmp_path).read_text()
