"""Every probe is answered, whatever the others do, and nothing is left running."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from verl.doctor.runner import DoctorProbe, ProbeAnswer, run_groups

HERE = Path(__file__).parent
SHORT = 1.0  # only probes that never end are given this; the others end or the test fails by their absence


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def probe(function: str, name: str | None = None, limit_s: float = 240.0, **more: Any) -> DoctorProbe:
    arguments = more.pop("arguments", {})
    return DoctorProbe(
        name or function, f"broken_probes:{function}", "software", limit_s, arguments=arguments, **more
    )


def run(*groups: list[DoctorProbe]) -> list[ProbeAnswer]:
    return run_groups(groups)


def test_answers_come_in_the_order_asked_and_a_group_shares_a_process() -> None:
    answers = run([probe("fine", "a"), probe("fine", "b")], [probe("fine", "c")])
    assert [answer.probe.name for answer in answers] == ["a", "b", "c"]
    pids = [answer.findings[0].data["pid"] for answer in answers]
    assert pids[0] == pids[1] != pids[2] != os.getpid()


@pytest.mark.parametrize(
    "function, told",
    [
        ("raises", "RuntimeError: the library is of another version"),
        ("refuses", "trainer.nnodes is 0; it must be at least 1"),
        ("leaves", "SystemExit"),
        ("crashes", "SIGSEGV"),
    ],
)
def test_a_probe_that_breaks_is_reported_and_hides_nothing(function: str, told: str) -> None:
    answers = run([probe("fine", "before"), probe(function), probe("fine", "after")])
    assert [answer.probe.name for answer in answers] == ["before", function, "after"]
    assert told in answers[1].findings[-1].seen and answers[1].findings[-1].status == "warning"
    assert answers[0].findings[0].status == answers[2].findings[0].status == "ok"


def test_the_last_output_before_a_crash_is_shown() -> None:
    (answer,) = run([probe("crashes")])
    assert "last words" in answer.findings[0].seen


@pytest.mark.slow(seconds=2)
def test_a_hang_is_cut_off_and_the_next_probe_runs() -> None:
    answers = run([probe("hangs", limit_s=SHORT, fix="take it out"), probe("fine", "after")])
    assert (
        "no answer within 1 s" in answers[0].findings[0].seen and answers[0].findings[0].fix == "take it out"
    )
    assert answers[1].findings[0].status == "ok"


def test_one_limit_can_hold_for_all() -> None:
    (answer,) = run_groups([[probe("hangs", limit_s=3600.0)]], limit_s=SHORT)
    assert "no answer within 1 s" in answer.findings[0].seen


def test_processes_a_hung_probe_started_go_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    limit = 1.0
    while (
        not file.exists() or not file.read_text()
    ):  # a slow machine gets to start the child with a longer limit
        run([probe("hangs_with_a_child", limit_s=limit, arguments={"file": str(file)})])
        limit *= 2
    pid = int(file.read_text())
    while _alive(pid):
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_broken_probe_is_as_serious_as_it_says() -> None:
    (answer,) = run([probe("raises", on_failure="fatal")])
    assert answer.fatal


@pytest.mark.parametrize("function", ["fatal", "crashes"])
def test_probes_after_a_required_one_that_failed_are_skipped(function: str) -> None:
    answers = run([probe(function, required=True, on_failure="fatal"), probe("hangs")], [probe("fine")])
    assert answers[1].findings[0].seen == f"not tried: {function} does not work"
    assert answers[2].findings[0].status == "ok"


def test_noise_and_threads_do_not_get_in_the_way() -> None:
    answers = run([probe("talks"), probe("keeps_a_thread")])
    assert [answer.findings[0].status for answer in answers] == ["ok", "ok"]


def test_an_interrupt_ends_the_children(tmp_path: Path) -> None:
    """Ctrl-C while a probe hangs: the command ends and so does its child."""
    import signal
    import subprocess

    file = tmp_path / "pid"
    program = (
        "import signal, sys; sys.path[:0] = [sys.argv[1]]\n"
        # Tests that run in a shell's background were told to ignore it, and what they start inherits that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from verl.doctor.runner import DoctorProbe, run_groups\n"
        "arguments = {'file': sys.argv[2]}\n"
        "probe = DoctorProbe('h', 'broken_probes:hangs_with_a_child', 'software', 3600.0, arguments=arguments)\n"
        "run_groups([[probe]])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(HERE), str(file)], stderr=subprocess.DEVNULL
    )
    try:
        while not (file.exists() and file.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(240) != 0
        pid = int(file.read_text())
        while _alive(pid):
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
