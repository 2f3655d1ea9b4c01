"""Runs probes, each group of them in a process that can be killed.

What always holds: every probe asked for is answered, by itself or, when it hangs or takes its process down, by a
finding that says so; the probes behind it then go on in a new process; nothing that was started is left running.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any

from verl.doctor.finding import Finding, Status, one_line

_START_S = 20.0
"""What starting Python and importing a probe may take on top of the probe's own limit."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from verl.doctor.child import main; main()"
)


@dataclass(frozen=True)
class Probe:
    """Something to find out."""

    name: str
    target: str
    """`module:function`; the function returns findings."""
    section: str
    limit_s: float = 30.0
    when_broken: Status = "warning"
    """How serious it is that the probe itself does not come to an end."""
    advice: str = ""
    """What to do then."""
    needs: str = ""
    """A probe before it in its group that must not end fatally; it is not tried otherwise."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def job(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "target": self.target,
            "arguments": dict(self.arguments),
            "when_broken": self.when_broken,
            "needs": self.needs,
        }


@dataclass(frozen=True)
class Answer:
    """What a probe found."""

    probe: Probe
    findings: list[Finding]

    @property
    def fatal(self) -> bool:
        return any(finding.status == "fatal" for finding in self.findings)


def run_groups(
    groups: Sequence[Sequence[Probe]],
    *,
    at_once: int,
    limit_s: float | None = None,
    on_start: Callable[[str], None] = lambda name: None,
) -> list[Answer]:
    """Run the groups, some at once, the probes of a group one after the other; answers in the order asked.

    `limit_s` holds for every probe instead of its own limit."""
    stop = _Stop()
    with ThreadPoolExecutor(max(1, at_once), thread_name_prefix="verl-doctor") as pool:
        futures = [pool.submit(_run_group, list(group), limit_s, on_start, stop) for group in groups]
        try:
            return [answer for future in futures for answer in future.result()]
        except BaseException:
            stop.now()
            for future in futures:
                future.cancel()
            raise


class _Stop:
    """Whoever interrupts the parent interrupts the children with it."""

    def __init__(self) -> None:
        self.asked = False
        self.running: set[subprocess.Popen[bytes]] = set()

    def now(self) -> None:
        self.asked = True
        for process in list(self.running):
            _kill(process)


def _run_group(
    probes: list[Probe], limit_s: float | None, on_start: Callable[[str], None], stop: _Stop
) -> list[Answer]:
    answers: list[Answer] = []
    while probes and not stop.asked:
        broken = [answer.probe.name for answer in answers if answer.fatal]
        child = _Child(probes, broken, limit_s, stop)
        try:
            found = child.answers(on_start)
        finally:
            child.end()
        answers += found
        probes = probes[len(found) :]
    return answers


class _Child:
    """One process, running probes until one of them breaks it."""

    def __init__(self, probes: list[Probe], broken: list[str], limit_s: float | None, stop: _Stop) -> None:
        self.probes, self._limit_s, self._stop = probes, limit_s, stop
        self._read, write = os.pipe()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        job = {"pipe": write, "broken": broken, "probes": [probe.job() for probe in probes]}
        command = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), json.dumps(job)]
        environment = {**os.environ, **{k: v for probe in probes for k, v in probe.environment.items()}}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[write],
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(write)
        stop.running.add(self.process)

    def answers(self, on_start: Callable[[str], None]) -> list[Answer]:
        """What the probes said, and of the one that broke the process, that it did."""
        found: list[Answer] = []
        deadline = time.monotonic() + _START_S + self._limit(0)
        buffer = b""
        while len(found) < len(self.probes):
            left = deadline - time.monotonic()
            if left <= 0:
                return [*found, self._broken(len(found), f"no answer within {self._limit(len(found)):g} s")]
            if not select.select([self._read], [], [], left)[0]:
                continue
            data = os.read(self._read, 1 << 16)
            if not data:
                return [*found, self._broken(len(found), self._ending())]
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "starts" in message:
                    on_start(message["starts"])
                    deadline = time.monotonic() + self._limit(len(found))
                else:
                    findings = [Finding.from_json(each) for each in message["findings"]]
                    found.append(Answer(self.probes[len(found)], findings))
        return found

    def _limit(self, number: int) -> float:
        return self.probes[number].limit_s if self._limit_s is None else self._limit_s

    def _broken(self, number: int, how: str) -> Answer:
        probe = self.probes[number]
        finding = Finding(
            probe.name, probe.when_broken, how, "what is checked here hangs or crashes", probe.advice
        )
        return Answer(probe, [finding])

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        code = self.process.returncode
        if code is not None and code < 0:
            how = f"the process was ended by {signal.Signals(-code).name}"
        else:
            how = f"the process ended in the middle (exit code {code})"
        last = self._last_line()
        return f"{how}{f', after: {last}' if last else ''}"

    def _last_line(self) -> str:
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - 4000))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return one_line(lines[-1]) if lines else ""

    def end(self) -> None:
        _kill(self.process)
        self._stop.running.discard(self.process)
        os.close(self._read)
        self._output.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and all of its group. One that cannot die (it waits for a broken disk) is left to the kernel."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2.0)
