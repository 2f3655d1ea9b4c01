"""Runs probes in child processes that can be killed.

Every probe gets at least one finding: its result, or one that says that it hung or crashed. The probes after it then
run in a new process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.doctor.finding import Finding, Status, one_line
from verl.errors import VerlError

_START_S = 20.0
"""For starting Python, on top of the limit of the first probe."""
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verl.doctor.runner import child; child()"
)


@dataclass(frozen=True)
class Probe:
    """A function that returns findings, and how long it may take."""

    name: str
    target: str
    """`module:function`, below `verl.doctor`."""
    section: str
    limit_s: float = 60.0
    on_failure: Status = "warning"
    fix: str = ""
    required: bool = False
    """The probes after it in its group are skipped where it is fatal."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its whole group: those of the first probe count."""


@dataclass(frozen=True)
class Answer:
    probe: Probe
    findings: list[Finding]

    @property
    def fatal(self) -> bool:
        return any(finding.status == "fatal" for finding in self.findings)


def run_groups(groups: Sequence[Sequence[Probe]], limit_s: float | None = None) -> list[Answer]:
    """Run each group in a separate process, a few at once; `limit_s` replaces the limits of the probes."""
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 1)), thread_name_prefix="verl-doctor") as pool:
        futures = [pool.submit(_run_group, list(group), limit_s, running) for group in groups]
        try:
            return [answer for future in futures for answer in future.result()]
        except BaseException:
            # The children run in separate sessions: an interrupt of this process does not reach them.
            for future in futures:
                future.cancel()
            for process in list(running):
                _kill(process)
            raise


def _run_group(
    probes: list[Probe], limit_s: float | None, running: set[subprocess.Popen[bytes]]
) -> list[Answer]:
    answers: list[Answer] = []
    while probes:
        if answers and answers[-1].probe.required and answers[-1].fatal:
            skipped = f"not tried: {answers[-1].probe.name} does not work"
            return answers + [Answer(probe, [Finding(probe.name, "note", skipped)]) for probe in probes]
        found = _run_child(probes, limit_s, running)
        answers += found
        probes = probes[len(found) :]
    return answers


def _run_child(
    probes: list[Probe], limit_s: float | None, running: set[subprocess.Popen[bytes]]
) -> list[Answer]:
    """The answers of one process: of all probes, or of those up to the one that broke it."""
    with tempfile.TemporaryDirectory(prefix="verl-doctor-") as folder:
        results, output = Path(folder, "results"), Path(folder, "output")
        jobs = [(p.name, p.target, p.on_failure, dict(p.arguments), p.required) for p in probes]
        command = [sys.executable, "-P", "-c", _CHILD, *map(json.dumps, (sys.path, str(results), jobs))]
        environment = {**os.environ, **probes[0].environment}
        with open(output, "wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        running.add(process)
        try:
            how = _wait(process, results, [limit_s or probe.limit_s for probe in probes])
        finally:
            _kill(process)
            running.discard(process)
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        answers = [
            Answer(probe, [Finding(**found) for found in json.loads(line)])
            for probe, line in zip(probes, lines, strict=False)
        ]
        stopped = bool(answers) and answers[-1].probe.required and answers[-1].fatal
        if len(answers) < len(probes) and not stopped:
            printed = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            seen = f"the check hangs or crashes: {how}" + (
                f", after: {one_line(printed[-1])}" if printed else ""
            )
            probe = probes[len(answers)]
            answers.append(Answer(probe, [Finding(probe.name, probe.on_failure, seen, probe.fix)]))
        return answers


def _wait(process: subprocess.Popen[bytes], results: Path, limits: list[float]) -> str:
    """Wait until the process ends or one of its probes takes longer than its limit; how it ended."""
    done, since, started = 0, time.monotonic() + _START_S, False
    while done < len(limits) and time.monotonic() - since < limits[done]:
        try:
            code = process.wait(0.1)
            return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            if not results.exists():
                continue
            finished = results.read_bytes().count(b"\n")
            if finished > done or not started:
                done, since, started = finished, time.monotonic(), True
    return f"no answer within {limits[min(done, len(limits) - 1)]:g} s"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started. One in an uninterruptible system call is left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2.0)


def child() -> None:
    """In the child: write one line of findings per probe."""
    results, jobs = map(json.loads, sys.argv[2:4])
    with open(results, "w", encoding="utf-8") as file:
        for name, target, on_failure, arguments, required in jobs:
            findings = _findings(name, target, on_failure, arguments)
            file.write(json.dumps([asdict(finding) for finding in findings], default=str) + "\n")
            file.flush()
            if required and any(finding.status == "fatal" for finding in findings):
                break
    os._exit(0)  # threads and exit handlers of packages must not delay the answer


def _findings(name: str, target: str, on_failure: Status, arguments: dict[str, Any]) -> list[Finding]:
    try:
        module, _, function = target.partition(":")
        return list(getattr(importlib.import_module(module), function)(**arguments))
    except VerlError as error:
        return [Finding(name, on_failure, one_line(str(error), 1200))]
    except BaseException as error:  # a broken package raises anything, SystemExit included
        return [Finding(name, on_failure, f"could not be checked: {one_line(error)}")]
