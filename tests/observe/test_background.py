"""Trackers of other projects: what they do wrong does not reach the run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from verl.observe import tracker_services
from verl.observe.run_folder import RunFolder
from verl.observe.tracker_services import Background
from verl.observe.trackers import FanOut, FileTracker


class Keeps:
    """Remembers its calls; `fails` names the one that raises, `hangs` the one that waits for `released`."""

    def __init__(self, fails: str = "", hangs: str = "", error: BaseException | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails, self.hangs = fails, hangs
        self.error = error or ConnectionError("no route")
        self.released = threading.Event()

    def _call(self, name: str, *arguments: Any) -> None:
        if name == self.hangs:
            self.released.wait()
        if name == self.fails:
            raise self.error
        self.calls.append((name, *arguments))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log", step, dict(metrics))

    def log_samples(self, step: int, rows: list[Any]) -> None:
        self._call("log_samples", step, rows)

    def close(self, failed: bool) -> None:
        self._call("close", failed)


@pytest.fixture(autouse=True)
def nothing_given_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tracker_services, "_given_up", set())
    yield


def test_calls_arrive_in_order_and_numbers_only() -> None:
    service = Keeps()
    tracker = Background("s", service)
    tracker.log(1, {"a": 1, "text": "no", "findings": [{}], "huge": 10**400})
    tracker.log_samples(2, [])
    tracker.log_samples(2, [{"prompt": "p"}])
    tracker.log(2, {"a": 2.5})
    tracker.close()
    assert service.calls == [
        ("log", 1, {"a": 1.0}),
        ("log_samples", 2, [{"prompt": "p"}]),
        ("log", 2, {"a": 2.5}),
        ("close", False),
    ]
    assert tracker_services._given_up == set()


def test_a_service_is_told_that_the_run_failed() -> None:
    service = Keeps()
    with pytest.raises(ValueError):
        try:
            raise ValueError
        finally:
            Background("s", service).close()
    assert service.calls == [("close", True)]


@pytest.mark.parametrize("error", [ConnectionError("no route"), SystemExit(1)])
@pytest.mark.parametrize("fails", ["log", "log_samples", "close"])
def test_a_service_that_raises_is_switched_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: str, error: BaseException
) -> None:
    service, other = Keeps(fails=fails, error=error), Keeps()
    with RunFolder(tmp_path) as run:
        fan = FanOut(
            {"file": FileTracker(run), "bad": Background("bad", service), "s": Background("s", other)}
        )
        for step in range(3):
            fan.log_samples(step, [{"a": 1}])
            fan.log(step, {"a": step})
        fan.close()
        assert [row["a"] for row in run.read_metrics()] == [0, 1, 2]
    assert len(other.calls) == 7
    (warning,) = [record.getMessage() for record in caplog.records if "'bad'" in record.getMessage()]
    assert str(error) in warning and "off for the rest of this run" in warning
    assert tracker_services._given_up == {"bad"}


@pytest.mark.parametrize("hangs", ["log", "log_samples", "close"])
def test_a_service_that_never_returns_holds_nothing_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    monkeypatch.setattr(tracker_services, "CLOSE_S", 0.2)
    monkeypatch.setattr(tracker_services, "MAX_WAITING", 8)
    service = Keeps(hangs=hangs)
    fan = FanOut({"bad": Background("bad", service)})
    fan.log_samples(1, [{"a": 1}])
    fan.log(1, {"a": 1})
    fan.close()
    assert "'bad' failed (TimeoutError: it did not end within" in caplog.text
    late = FanOut({"late": Background("late", Keeps(hangs="log"))})
    for step in range(20):
        late.log(step, {})
    assert "'late' failed (TimeoutError: it is 8 calls behind)" in caplog.text
    assert tracker_services._given_up == {"bad", "late"}
    service.released.set()


PROGRAM = """
import atexit, sys, threading, time
from verl.observe import tracker_services as background
from verl.runtime import run_command

class Stuck:
    def log(self, step, metrics): pass
    def close(self, failed): threading.Event().wait()

def body():
    background.CLOSE_S = 0.1
    threading.Thread(target=threading.Event().wait).start()  # as a package's own: not a daemon
    atexit.register(threading.Event().wait)
    try:
        background.Background("stuck", Stuck()).close()
    except TimeoutError:
        print("closed")
    return 3

sys.exit(run_command(body))
"""


def test_a_process_ends_although_a_tracker_hangs_at_exit() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (3, "closed\n"), done.stderr
